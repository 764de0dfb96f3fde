"""Following an execution's output from attempt to attempt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec

from flowfabric.cli.errors import CliError
from flowfabric.cli.options import Target
from flowfabric.cli.resolve import resolve
from flowfabric.cli.session import opened
from flowfabric.cli.tail_view import JsonPrinter, Printer, TextPrinter
from flowfabric.cli.waiting_read import read_wait
from flowfabric.cli.words import plural
from flowfabric.core.contracts.executions import AttemptRecord, ExecutionInfo
from flowfabric.core.contracts.streams import StreamFrames
from flowfabric.core.cursors import START, StreamCursor
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import LifecyclePhase, PublicState
from flowfabric.engine.backend import Backend

__all__ = ["Wanted", "tail"]

_LOOK_MS = 1000
"""How long nothing may come before the execution itself is looked at."""
_PAGE = 500
_PAUSE_S = 0.5


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to print, as it was typed."""

    attempt: int | None
    from_: str
    follow: bool


def tail(target: Target, text: str, wanted: Wanted, *, as_json: bool) -> None:
    """Print until the execution has ended, or until Ctrl-C."""
    printer = JsonPrinter() if as_json else TextPrinter()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_tail(target, text, wanted, printer))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _tail(target: Target, text: str, wanted: Wanted, printer: Printer) -> None:
    async with opened(target.url) as backend:
        execution_id = await resolve(backend, text, target.namespace)
        await _Follower(backend, execution_id, wanted, printer).run()


def _ended(info: ExecutionInfo) -> bool:
    return info.state_vector.lifecycle_phase is LifecyclePhase.TERMINAL


class _Follower:
    def __init__(
        self, backend: Backend, execution_id: ExecutionId, wanted: Wanted, printer: Printer
    ) -> None:
        self._backend = backend
        self._id = execution_id
        self._follow = wanted.follow
        self._wanted = wanted
        self._printer = printer
        self._index = 0
        self._cursor = START.text
        self._announced = True
        self._told_of: int | None = None

    async def run(self) -> None:
        """Everything from the first attempt that is wanted to the end."""
        await self._begin()
        told = False
        while True:
            try:
                if await self._step():
                    return
                told = False
            except TransportError as error:
                if not (self._follow and error.retryable):
                    raise
                if not told:
                    self._printer.interrupted(error.message or error.kind)
                told = True
                await asyncio.sleep(_PAUSE_S)

    async def _begin(self) -> None:
        cursor = StreamCursor.parse(self._wanted.from_)
        info = await self._backend.read_execution_info(self._id)
        count = max(1, info.total_attempt_count)
        chosen = self._wanted.attempt
        if chosen is not None and chosen >= count:
            raise CliError(
                "attempt_not_found",
                f"{self._id} has {plural(count, 'attempt')}: the newest is {count - 1}",
                "leave --attempt out to follow the newest",
            )
        self._index = self._printer.index = count - 1 if chosen is None else chosen
        if cursor.is_concrete:
            self._cursor = cursor.text
        elif cursor.text == "end":
            self._cursor = await self._newest()
        if self._index:
            self._printer.attempt(await self._record(), first=True)

    async def _newest(self) -> str:
        page = await self._backend.read_stream(
            self._id, self._index, from_="end", to="end", count_limit=1
        )
        return page.frames[-1].id if page.frames else START.text

    async def _record(self) -> AttemptRecord | None:
        attempts = await self._backend.read_attempts(self._id)
        return attempts[self._index] if self._index < len(attempts) else None

    async def _step(self) -> bool:
        """One look at the stream; whether there is nothing more to come."""
        page = await self._backend.tail_stream(
            self._id,
            self._index,
            after=self._cursor,
            block_ms=_LOOK_MS if self._follow else 0,
            count_limit=_PAGE,
        )
        if page.frames:
            await self._print(page)
            return False
        if page.closed_at is not None:
            return await self._closed(page)
        if not self._follow:
            self._printer.flush()
            return True
        return await self._look()

    async def _print(self, page: StreamFrames) -> None:
        await self._announce()
        self._tell_resumed()
        if page.truncated:
            self._printer.gap()
        for frame in page.frames:
            self._printer.frame(frame)
        self._printer.flush()
        self._cursor = page.next_cursor

    async def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._printer.attempt(await self._record(), first=False)

    async def _closed(self, page: StreamFrames) -> bool:
        """The attempt is over: on to the next one, if there is or may be one."""
        await self._announce()
        info = await self._backend.read_execution_info(self._id)
        self._printer.closed(page.closed_reason or "", await self._record())
        if info.total_attempt_count <= self._index + 1:
            if _ended(info):
                self._printer.end(info)
                return True
            if not self._follow:
                return True
        self._index += 1
        self._printer.index = self._index
        self._cursor = START.text
        self._announced = False
        return False

    async def _look(self) -> bool:
        """Nothing came for a while: what does the execution do?"""
        info = await self._backend.read_execution_info(self._id)
        if info.total_attempt_count > self._index:
            await self._announce()
        elif _ended(info):
            # It ended between two attempts, or before the first.
            self._printer.end(info)
            return True
        if info.public_state is PublicState.SUSPENDED:
            await self._tell_waiting()
        elif not _ended(info):
            self._tell_resumed()
        return False

    def _tell_resumed(self) -> None:
        if self._told_of is not None:
            self._told_of = None
            self._printer.resumed()

    async def _tell_waiting(self) -> None:
        wait = await read_wait(self._backend, self._id)
        if wait.since is not None and wait.since != self._told_of:
            self._told_of = wait.since
            self._printer.waiting(wait, await self._backend.server_time_ms())
