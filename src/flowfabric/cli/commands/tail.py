"""`flowfabric tail` and `flowfabric summary`."""

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec

from flowfabric.cli import options
from flowfabric.cli.errors import CliError, discard_output
from flowfabric.cli.options import Target, value
from flowfabric.cli.session import open_execution
from flowfabric.cli.views.screen import Screen, print_json
from flowfabric.cli.views.tail import JsonPrinter, Printer, TextPrinter
from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.contracts.streams import START, StreamCursor, StreamFrames
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import LifecyclePhase, PublicState
from flowfabric.core.text import plural
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.overview import read_wait

_IDLE_MS = 1000
"""After this time without a frame, read the state of the execution."""
_PAGE = 500
_RETRY_S = 0.5
_SUMMARY_FIELDS = ("version", "patch_kind", "first_applied_ms", "last_updated_ms")
_FROM_HELP = "Start after this frame: an id from --json, a time in ms, start or end."
_parse_cursor = partial(options.checked, StreamCursor.parse)


async def tail(
    target: Target,
    id_: options.Id,
    *,
    attempt: Annotated[
        int | None, value("N", "Start with this attempt instead of the newest.", min=1)
    ] = None,
    from_: Annotated[str, value("CURSOR", _FROM_HELP, "--from", parser=_parse_cursor)] = "start",
    follow: Annotated[
        bool, options.flag("--follow/--no-follow", "Wait for new output, or stop at the end.")
    ] = True,
) -> None:
    """Print the output of an execution live, until it finishes.

    After a retry, continues with the next attempt. Frames go to standard output, notes about the
    execution to standard error. With --json, prints one JSON object per line; bytes that are not
    text are base64.
    """
    printer = JsonPrinter() if target.as_json else TextPrinter()
    try:
        # Ctrl-C is a normal way to stop.
        with contextlib.suppress(asyncio.CancelledError):
            async with open_execution(target, id_) as (backend, execution_id):
                await _Follower(backend, execution_id, printer, follow).run(attempt, from_)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)


async def summary(
    target: Target,
    id_: options.Id,
    *,
    attempt: Annotated[
        int | None, value("N", "Read this attempt instead of the newest.", min=1)
    ] = None,
) -> None:
    """Print the summary document of an execution.

    Handlers update it with frames in summary mode. You can read it while they run and afterwards.
    With --json, prints it with its version and times in one object.
    """
    async with open_execution(target, id_) as (backend, execution_id):
        info = await backend.reads.read_execution_info(execution_id)
        index = max(1, info.total_attempt_count if attempt is None else attempt) - 1
        found = await backend.streams.read_summary(execution_id, index)
    if found is None:
        problem = f"attempt {index + 1} of {execution_id} has no summary"
        raise CliError("no_summary", problem, "another attempt may have one: pass --attempt")
    document = msgspec.Raw(found.document_json)
    if target.as_json:
        plain = {"execution_id": execution_id, "attempt_index": index, "document": document}
        print_json(plain | {name: getattr(found, name) for name in _SUMMARY_FIELDS})
    else:
        Screen().block(msgspec.json.format(document).decode())


def _finished(info: ExecutionInfo) -> bool:
    return info.state_vector.lifecycle_phase is LifecyclePhase.TERMINAL


@dataclass
class _Follower:
    backend: Backend
    id: ExecutionId
    printer: Printer
    follow: bool
    cursor: str = START.text
    announced: bool = True
    """Whether the current attempt was announced."""
    announced_wait: int | None = None
    """When the last announced wait began; None after it ended."""

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
                if not (self.follow and error.retryable):
                    raise
                if not reported:
                    self.printer.note("interrupted", problem=error.message or error.kind)
                reported = True
                await asyncio.sleep(_RETRY_S)

    async def _begin(self, attempt: int | None, cursor: StreamCursor) -> None:
        count = max(1, (await self._info()).total_attempt_count)
        if attempt is not None and attempt > count:
            problem = f"{self.id} has {plural(count, 'attempt')}; there is no attempt {attempt}"
            raise CliError("attempt_not_found", problem, "omit --attempt to start with the newest")
        self.printer.index = (attempt or count) - 1
        if cursor.is_concrete:
            self.cursor = cursor.text
        elif cursor.text == "end":
            page = await self.backend.streams.read_stream(
                self.id, self.printer.index, from_="end", to="end", count_limit=1
            )
            self.cursor = page.frames[-1].id if page.frames else START.text
        if self.printer.index:
            await self._note_attempt(new=False)

    async def _info(self) -> ExecutionInfo:
        return await self.backend.reads.read_execution_info(self.id)

    async def _attempt_fields(self, *names: str) -> dict[str, object]:
        """Fields of the current attempt; None if it has no record yet."""
        attempts = await self.backend.reads.read_attempts(self.id)
        record = attempts[self.printer.index] if self.printer.index < len(attempts) else None
        return {name: getattr(record, name, None) for name in names}

    async def _note_attempt(self, *, new: bool) -> None:
        fields = await self._attempt_fields("attempt_type", "worker_instance_id")
        self.printer.note("attempt", new=new, **fields)

    async def _step(self) -> bool:
        """Read the stream once. Returns whether everything was printed."""
        page = await self.backend.streams.tail_stream(
            self.id,
            self.printer.index,
            after=self.cursor,
            block_ms=_IDLE_MS if self.follow else 0,
            count_limit=_PAGE,
        )
        if page.frames:
            await self._print(page)
            return False
        if page.closed_at is not None:
            return await self._closed(page)
        return await self._check_execution() or not self.follow

    async def _print(self, page: StreamFrames) -> None:
        await self._announce_attempt()
        await self._announce_resume()
        if page.truncated:
            self.printer.note("gap")
        for frame in page.frames:
            self.printer.frame(frame)
        sys.stdout.flush()
        self.cursor = page.next_cursor

    async def _closed(self, page: StreamFrames) -> bool:
        """Continue with the next attempt, unless there will be none."""
        await self._announce_attempt()
        info = await self._info()
        why = await self._attempt_fields("failure_reason")
        self.printer.note("closed", reason=page.closed_reason or "", **why)
        if info.total_attempt_count <= self.printer.index + 1:
            if _finished(info):
                self.printer.note("end", public_state=info.public_state.value)
                return True
            if not self.follow:
                return True
        self.printer.index += 1
        self.cursor = START.text
        self.announced = False
        return False

    async def _check_execution(self) -> bool:
        """Report the state of the execution after the last frame, or after a pause without any."""
        info = await self._info()
        if info.total_attempt_count > self.printer.index:
            await self._announce_attempt()
        elif _finished(info):
            # It finished between two attempts, or before the first.
            self.printer.note("end", public_state=info.public_state.value)
            return True
        if info.public_state is PublicState.SUSPENDED:
            await self._announce_wait()
        elif not _finished(info):
            await self._announce_resume()
        return False

    async def _announce_attempt(self) -> None:
        if not self.announced:
            self.announced = True
            await self._note_attempt(new=True)

    async def _announce_wait(self) -> None:
        wait, _ = await read_wait(self.backend, self.id)
        if wait.since is not None and wait.since != self.announced_wait:
            self.announced_wait = wait.since
            self.printer.note("waiting", at=await self.backend.meta.server_time_ms(), wait=wait)

    async def _announce_resume(self) -> None:
        if self.announced_wait is not None:
            self.announced_wait = None
            last = await self.backend.waitpoints.read_last_wait(self.id)
            self.printer.note("resumed", wait=last)
