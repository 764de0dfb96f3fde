"""Frames as the functions take and return them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import (
    AppendOutcome,
    Frame,
    FrameMode,
    StreamedFrame,
    StreamFrames,
    SummaryDocument,
)
from flowfabric.core.errors import CorruptionError
from flowfabric.core.stored import Stored
from flowfabric.core.text import lossless
from flowfabric.engine.api import check
from flowfabric.engine.api.frames import Append
from flowfabric.engine.valkey.calls import proof, text

_MODES: dict[str, str] = {"durable": "d", "summary": "s", "best_effort": "b"}
_MODE_NAMES: dict[bytes, FrameMode] = {b"d": "durable", b"s": "summary", b"b": "best_effort"}
_PAGE_PARTS = (
    *("examined", "more", "closed_at", "closed_reason", "trimmed", "oldest", "last_sequence"),
    "followed",
)
_pack = msgspec.msgpack.Encoder().encode


class Page(msgspec.Struct):
    """One reply of the range read."""

    frames: list[StreamedFrame]
    examined: str | None
    more: bool
    closed_at: int | None
    closed_reason: str | None
    trimmed: bool
    oldest: str | None
    newest: str | None
    followed: bool

    def after(self, earlier: Page) -> Page:
        """This page with the frames of the one before it."""
        self.frames[:0] = earlier.frames
        self.examined = self.examined or earlier.examined
        return self

    def result(self, position: str, asked: str) -> StreamFrames:
        """The result of a read from `asked`; `position` is its cursor if no frame was examined."""
        # With nothing retained, all up to the last frame ever written are gone.
        oldest = self.oldest or self.newest
        return StreamFrames(
            frames=tuple(self.frames),
            next_cursor=self.examined or position,
            closed_at=self.closed_at,
            closed_reason=self.closed_reason,
            truncated=self.trimmed and oldest is not None and _order(oldest) > _order(asked),
        )


def _order(entry: str) -> tuple[int, int]:
    if entry in {"-", "+"}:
        return (-1, 0) if entry == "-" else (2**64, 0)
    ms, _, seq = entry.partition("-")
    return int(ms), int(seq)


def append_args(handle: Handle, frames: Sequence[Frame], append: Append) -> list[Any]:
    """The arguments of one append; those of a patch get their document later."""
    proof(check.handle(handle))
    args: list[Any] = [
        handle.execution_id,
        handle.lease,
        handle.attempt,
        _MODES[append.mode],
        "" if append.retention_maxlen is None else append.retention_maxlen,
        _pack(append.live()) if append.mode == "best_effort" else b"",
        "" if append.seq is None else append.seq,
    ]
    for frame in frames:
        args += (frame.name, frame.payload, _extra(frame))
    return args


def _extra(frame: Frame) -> bytes:
    """What differs from the defaults; nothing else is stored."""
    extra: list[Any] = []
    if frame.encoding != "utf8":
        extra += ("e", frame.encoding)
    if frame.source != "worker":
        extra += ("s", frame.source)
    if frame.correlation_id:
        extra += ("c", frame.correlation_id)
    if frame.metadata_json:
        extra += ("md", frame.metadata_json)
    if frame.ts is not None:
        extra += ("ts", str(frame.ts))
    return _pack(extra) if extra else b""


def append_outcome(reply: Sequence[Any]) -> AppendOutcome:
    """The outcome of an append. Entries of one call have consecutive ids."""
    count, last, version = int(reply[2]), text(reply[3]), text(reply[5])
    ids: tuple[str, ...] = (last,) if count == 1 else ()
    if count > 1:
        ms, _, seq = last.partition("-")
        newest = int(seq)
        ids = tuple(f"{ms}-{number}" for number in range(newest - count + 1, newest + 1))
    return AppendOutcome(
        stream_ids=ids,
        frame_count=int(reply[4]),
        summary_version=int(version) if version else None,
        duplicate=reply[6] == 1,
    )


def page_of(reply: Sequence[Any], execution_id: str) -> Page:
    """A page of the range read."""
    entries, *rest = reply[2:]
    page = Stored.from_row(f"stream of {execution_id}", _PAGE_PARTS, rest)
    return Page(
        frames=[_frame(lossless(entry), flat) for entry, flat in entries],
        examined=page.maybe_text("examined"),
        more=rest[1] == 1,
        closed_at=page.maybe_number("closed_at"),
        closed_reason=page.maybe_text("closed_reason"),
        trimmed=rest[4] == 1,
        oldest=page.maybe_text("oldest"),
        newest=page.maybe_text("last_sequence"),
        followed=rest[7] == 1,
    )


def _frame(entry: str, flat: list[bytes]) -> StreamedFrame:
    """A frame from a stream entry; absent fields have their defaults.

    Decoding is direct: 1.4 µs per frame, and 3.9 µs through `Stored`.
    """
    fields = {flat[i]: flat[i + 1] for i in range(0, len(flat), 2)}
    version, ttl, ts = fields.get(b"v"), fields.get(b"ttl"), fields.get(b"ts")
    try:
        return StreamedFrame(
            id=entry,
            frame_type=fields[b"t"].decode(),
            payload=fields[b"p"],
            encoding=fields.get(b"e", b"utf8").decode(),
            source=fields.get(b"s", b"worker").decode(),
            mode=_MODE_NAMES[fields.get(b"m", b"d")],
            ts=int(ts or entry.partition("-")[0]),
            correlation_id=fields.get(b"c", b"").decode(),
            metadata_json=fields.get(b"md", b"").decode(),
            summary_version=int(version) if version else None,
            ttl_ms=int(ttl) if ttl else None,
        )
    except (KeyError, ValueError):
        raise _damage(Stored.from_hash(f"frame {entry}", flat)) from None


def _damage(stored: Stored) -> CorruptionError:
    """Which field of a frame cannot be read."""
    stored.text("t")
    for name in ("e", "s", "c", "md"):
        stored.text(name, "")
    for name in ("ts", "v", "ttl"):
        stored.number(name, 0)
    if "p" not in stored.fields:
        return stored.corrupt("p", "is missing")
    return stored.corrupt("m", "is no mode")


def summary_of(context: str, raw: Any) -> SummaryDocument | None:
    """A summary from a hash reply, which is a map or a flat list by protocol version."""
    if not raw:
        return None
    stored = Stored.from_hash(context, raw)
    if not stored.is_set("document"):
        raise stored.corrupt("document", "is missing")
    return SummaryDocument(
        document_json=stored.fields["document"],
        version=stored.number("version"),
        patch_kind=stored.text("patch_kind"),
        last_updated_ms=stored.number("last_updated_ms"),
        first_applied_ms=stored.number("first_applied_ms"),
    )
