"""Attempt output: frames and summaries (10 §3.2, 06 §10)."""

import base64
from typing import Any

import msgspec

from flowfabric.core.contracts.streams import (
    MAX_TAIL_BLOCK_MS,
    StreamCursor,
    StreamedFrame,
    StreamFrames,
)
from flowfabric.core.errors import ValidationError
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem, invalid
from flowfabric.server.queries import NoQuery
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import FramePage, SummaryPage
from flowfabric.server.wire import Reply, answer

routes = Routes()
_MAX_FRAMES = 1000


class ReadQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which frames to read; both ends are included."""

    from_: str = msgspec.field(name="from", default="start")
    to: str = "end"
    limit: str = "100"
    visibility: str = "all"


class TailQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Where to continue, and how long to wait for more."""

    after: str = "0-0"
    block_ms: str = "0"
    limit: str = "50"
    visibility: str = "all"


def parse_cursor(name: str, text: str) -> StreamCursor:
    """A position in a stream."""
    try:
        return StreamCursor.parse(text)
    except ValidationError as error:
        raise invalid(name, error.detail.removeprefix("cursor: ")) from None


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise invalid(name, f"must be a whole number, got {text[:40]!r}")
    return int(text)


def _limit(text: str) -> int:
    limit = _number("limit", text)
    if limit < 1:
        raise invalid("limit", "must be >= 1")
    if limit > _MAX_FRAMES:
        raise invalid("limit", f"exceeds REST ceiling {_MAX_FRAMES}; read page by page")
    return limit


def _visibility(text: str) -> Any:
    if text not in ("", "all", "exclude_best_effort"):
        raise invalid("visibility", "must be all or exclude_best_effort")
    return text or "all"


def frame_of(frame: StreamedFrame) -> dict[str, Any]:
    """A frame as JSON: text where the payload is UTF-8, otherwise base64. Every field is text."""
    fields = frame.fields
    try:
        fields["payload"] = frame.payload.decode()
    except UnicodeDecodeError:
        fields["payload"] = base64.b64encode(frame.payload).decode()
        fields["encoding"] = "base64"
    return {"id": frame.id, "fields": {name: str(value) for name, value in fields.items()}}


def _page(found: StreamFrames) -> Reply:
    frames = [frame_of(frame) for frame in found.frames]
    body: dict[str, Any] = {
        "frames": frames,
        "count": len(frames),
        "next_cursor": found.next_cursor,
    }
    if found.closed_at is not None:
        body |= {"closed_at": found.closed_at, "closed_reason": found.closed_reason}
    if found.truncated:
        body["truncated"] = True
    return answer(body)


@routes.get(
    "/v1/executions/{id}/attempts/{idx}/stream",
    scope="read",
    answers={200: FramePage},
    errors=(404, 503),
)
async def read_stream(call: Call[None, ReadQuery]) -> Reply:
    """Read the output frames of an attempt."""
    query = call.query
    first, last = parse_cursor("from", query.from_), parse_cursor("to", query.to)
    limit, visibility = _limit(query.limit), _visibility(query.visibility)
    execution_id, attempt = call.execution_id(), call.attempt_index()
    await _check_visible(call)
    found = await call.backend.streams.read_stream(
        execution_id,
        attempt,
        from_=first.text,
        to=last.text,
        count_limit=limit,
        visibility=visibility,
    )
    return _page(found)


@routes.get(
    "/v1/executions/{id}/attempts/{idx}/stream/tail",
    scope="read",
    counted=False,
    answers={200: FramePage},
    errors=(404, 503),
)
async def tail_stream(call: Call[None, TailQuery]) -> Reply:
    """Read the frames after a position; with `block_ms`, wait for one."""
    query = call.query
    after = parse_cursor("after", query.after)
    block_ms = _number("block_ms", query.block_ms)
    if block_ms > MAX_TAIL_BLOCK_MS:
        raise invalid("block_ms", f"must be at most {MAX_TAIL_BLOCK_MS}")
    limit, visibility = _limit(query.limit), _visibility(query.visibility)
    if not after.is_concrete:
        raise invalid(
            "after", f"{after.text!r} is not a frame id; pass 0-0 to start at the beginning"
        )
    execution_id, attempt = call.execution_id(), call.attempt_index()
    await _check_visible(call)

    async def tail(block_ms: int) -> StreamFrames:
        return await call.backend.streams.tail_stream(
            execution_id,
            attempt,
            after=after.text,
            block_ms=block_ms,
            count_limit=limit,
            visibility=visibility,
        )

    if not block_ms:
        return _page(await tail(0))
    # A client that leaves frees its permit at once.
    found = await call.until(lambda: tail(block_ms), block_ms + 5000)
    return _page(found if found is not None else await tail(0))


async def _check_visible(call: Call[None, Any]) -> None:
    """An unknown stream is empty; one of another namespace looks the same to this caller."""
    if call.caller.namespaces is not None:
        found = await call.backend.reads.get_execution_namespace(call.execution_id())
        if found is not None and not call.caller.sees(found):
            raise Problem("execution_not_found", call.execution_id())


@routes.get(
    "/v1/executions/{id}/attempts/{idx}/summary",
    scope="read",
    answers={200: SummaryPage},
    errors=(404,),
)
async def read_summary(call: Call[None, NoQuery]) -> Reply:
    """Read the rolling summary document of an attempt."""
    execution_id, attempt = await call.execution(), call.attempt_index()
    found = await call.backend.streams.read_summary(execution_id, attempt)
    if found is None:
        raise Problem("summary_not_found", f"{execution_id}, attempt {attempt}")
    return answer(
        {
            "document": msgspec.Raw(found.document_json),
            "version": found.version,
            "patch_kind": found.patch_kind,
            "last_updated_ms": found.last_updated_ms,
            "first_applied_ms": found.first_applied_ms,
        }
    )
