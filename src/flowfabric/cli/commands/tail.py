"""`flowfabric tail` and `flowfabric summary`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Annotated

import msgspec
import typer

from flowfabric.cli.errors import CliError
from flowfabric.cli.options import IdArgument, Target, check_option
from flowfabric.cli.session import on_execution
from flowfabric.cli.streams import discard_output
from flowfabric.cli.views.screen import Screen, print_json
from flowfabric.cli.views.tail import JsonPrinter, Printer, TextPrinter
from flowfabric.core.contracts.executions import AttemptRecord, ExecutionInfo
from flowfabric.core.contracts.streams import StreamFrames, SummaryDocument
from flowfabric.core.cursors import START, StreamCursor
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import LifecyclePhase, PublicState
from flowfabric.core.text import plural
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.overview import read_wait

_IDLE_MS = 1000
"""How long without a frame until the state of the execution is read."""
_PAGE = 500
_RETRY_S = 0.5
_SUMMARY_FIELDS = ("version", "patch_kind", "first_applied_ms", "last_updated_ms")


def tail(
    target: Target,
    id_: IdArgument,
    *,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Start with this attempt instead of the newest."),
    ] = None,
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="CURSOR",
            help="Start after this frame: an id from --json, milliseconds, start or end.",
        ),
    ] = "start",
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Wait for more, or stop at the newest.")
    ] = True,
) -> None:
    """Print the output of an execution live, until it ends.

    After a retry, continues with the next attempt. Frames go to standard output, notes about the
    execution to standard error. With --json, prints one JSON object per line; bytes that are not
    text are base64.
    """
    check_option(StreamCursor.parse, from_, "--from")
    printer = JsonPrinter() if target.as_json else TextPrinter()

    async def run(backend: Backend, execution_id: ExecutionId) -> None:
        await _Follower(backend, execution_id, printer, follow=follow).run(attempt, from_)

    try:
        with contextlib.suppress(KeyboardInterrupt):
            on_execution(target, id_, run)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def summary(
    target: Target,
    id_: IdArgument,
    *,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Read this attempt instead of the newest."),
    ] = None,
) -> None:
    """Print the summary document of an execution.

    Handlers update it with frames in summary mode. It can be read while they run and afterwards.
    With --json, prints it with its version and times in one object.
    """

    async def read(
        backend: Backend, execution_id: ExecutionId
    ) -> tuple[ExecutionId, int, SummaryDocument | None]:
        info = await backend.reads.read_execution_info(execution_id)
        index = max(1, info.total_attempt_count if attempt is None else attempt) - 1
        return execution_id, index, await backend.streams.read_summary(execution_id, index)

    execution_id, index, found = on_execution(target, id_, read)
    if found is None:
        raise CliError(
            "no_summary",
            f"attempt {index + 1} of {execution_id} has no summary",
            "another attempt may have one: pass --attempt",
        )
    document = msgspec.Raw(found.document_json)
    if target.as_json:
        plain = {"execution_id": execution_id, "attempt_index": index, "document": document}
        print_json(plain | {name: getattr(found, name) for name in _SUMMARY_FIELDS})
    else:
        Screen().block(msgspec.json.format(document).decode())


def _finished(info: ExecutionInfo) -> bool:
    return info.state_vector.lifecycle_phase is LifecyclePhase.TERMINAL


class _Follower:
    def __init__(
        self,
        backend: Backend,
        execution_id: ExecutionId,
        printer: Printer,
        *,
        follow: bool,
    ) -> None:
        self._backend = backend
        self._id = execution_id
        self._follow = follow
        self._printer = printer
        self._index = 0
        self._cursor = START.text
        self._announced = True
        self._announced_wait: int | None = None

    async def run(self, attempt: int | None, from_: str) -> None:
        """Print from this attempt and cursor until the execution finishes."""
        await self._begin(attempt, StreamCursor.parse(from_))
        reported = False
        while True:
            try:
                if await self._step():
                    return
                reported = False
            except TransportError as error:
                if not (self._follow and error.retryable):
                    raise
                if not reported:
                    self._printer.interrupted(error.message or error.kind)
                reported = True
                await asyncio.sleep(_RETRY_S)

    async def _begin(self, attempt: int | None, cursor: StreamCursor) -> None:
        info = await self._backend.reads.read_execution_info(self._id)
        count = max(1, info.total_attempt_count)
        if attempt is not None and attempt > count:
            raise CliError(
                "attempt_not_found",
                f"{self._id} has {plural(count, 'attempt')}, no attempt {attempt}",
                "omit --attempt to start with the newest",
            )
        self._index = self._printer.index = (attempt or count) - 1
        if cursor.is_concrete:
            self._cursor = cursor.text
        elif cursor.text == "end":
            self._cursor = await self._newest()
        if self._index:
            self._printer.attempt(await self._record(), first=True)

    async def _newest(self) -> str:
        page = await self._backend.streams.read_stream(
            self._id, self._index, from_="end", to="end", count_limit=1
        )
        return page.frames[-1].id if page.frames else START.text

    async def _record(self) -> AttemptRecord | None:
        attempts = await self._backend.reads.read_attempts(self._id)
        return attempts[self._index] if self._index < len(attempts) else None

    async def _step(self) -> bool:
        """Read the stream once. Returns whether everything was printed."""
        page = await self._backend.streams.tail_stream(
            self._id,
            self._index,
            after=self._cursor,
            block_ms=_IDLE_MS if self._follow else 0,
            count_limit=_PAGE,
        )
        if page.frames:
            await self._print(page)
            return False
        if page.closed_at is not None:
            return await self._closed(page)
        if not self._follow:
            sys.stdout.flush()
            return True
        return await self._check_execution()

    async def _print(self, page: StreamFrames) -> None:
        await self._announce_attempt()
        self._announce_resume()
        if page.truncated:
            self._printer.gap()
        for frame in page.frames:
            self._printer.frame(frame)
        sys.stdout.flush()
        self._cursor = page.next_cursor

    async def _announce_attempt(self) -> None:
        if not self._announced:
            self._announced = True
            self._printer.attempt(await self._record(), first=False)

    async def _closed(self, page: StreamFrames) -> bool:
        """The attempt ended: continue with the next one, unless there will be none."""
        await self._announce_attempt()
        info = await self._backend.reads.read_execution_info(self._id)
        self._printer.closed(page.closed_reason or "", await self._record())
        if info.total_attempt_count <= self._index + 1:
            if _finished(info):
                self._printer.end(info)
                return True
            if not self._follow:
                return True
        self._index += 1
        self._printer.index = self._index
        self._cursor = START.text
        self._announced = False
        return False

    async def _check_execution(self) -> bool:
        """No frame came for a while: see what the execution does."""
        info = await self._backend.reads.read_execution_info(self._id)
        if info.total_attempt_count > self._index:
            await self._announce_attempt()
        elif _finished(info):
            # It finished between two attempts, or before the first.
            self._printer.end(info)
            return True
        if info.public_state is PublicState.SUSPENDED:
            await self._announce_wait()
        elif not _finished(info):
            self._announce_resume()
        return False

    def _announce_resume(self) -> None:
        if self._announced_wait is not None:
            self._announced_wait = None
            self._printer.resumed()

    async def _announce_wait(self) -> None:
        wait, _ = await read_wait(self._backend, self._id)
        if wait.since is not None and wait.since != self._announced_wait:
            self._announced_wait = wait.since
            self._printer.waiting(wait, await self._backend.meta.server_time_ms())
