"""Waiting for executions to stop: one reader serves every waiter of a process."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence

from flowfabric.core.backoff import Backoff
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.forks import forget_on_fork, leave_behind
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.events.reader import FeedReader
from flowfabric.engine.events.source import FeedSource, Stop

log = logging.getLogger(__name__)
_WAIT_S = 5.0
_PAUSES_S = (0.05, 1.0)
_NUDGE_S = 0.001
_RECHECK_S = 15.0
"""After this time, a waiter reads the state again in case it missed its event."""
_ENDED = frozenset({"completed", "failed", "cancelled", "expired", "skipped"})
Waiters = dict[Stop, list[asyncio.Future[None]]]
"""The futures of waiters, by the stop they wait for."""


class CompletionWatch:
    """Follows the feeds of the executions that are waited for.

    A waiter notes the end of the feed, then reads the state: an execution that ends after that
    read has its entry after the noted position, so no completion is missed.
    """

    def __init__(
        self, source: FeedSource, read_state: Callable[[ExecutionId], Awaitable[PublicState]]
    ) -> None:
        self._source = source
        self._read_state = read_state
        self._watchers: dict[str, _Watcher] = {}
        forget_on_fork(self)

    async def wait(self, execution_id: ExecutionId, *, suspended: bool = False) -> None:
        """Wait until the execution has ended or, if requested, is suspended; may return early."""
        stops: list[Stop] = [(execution_id, "ended")]
        if suspended:
            stops.append((execution_id, "suspended"))

        async def is_over() -> bool:
            state = await self._read_state(execution_id)
            return state in _ENDED or (suspended and state == "suspended")

        await self._wait(execution_id.tag, stops, is_over)

    async def wait_for(
        self, tag: str, subject: str, has_ended: Callable[[], Awaitable[bool]]
    ) -> None:
        """Wait until an execution or a flow has ended; may return early."""
        await self._wait(tag, [(subject, "ended")], has_ended)

    async def _wait(
        self, tag: str, stops: Sequence[Stop], is_over: Callable[[], Awaitable[bool]]
    ) -> None:
        feed = tag[1:-1]
        key = "" if self._source.waits_across_feeds else feed
        watcher = self._watchers.get(key)
        if watcher is None:
            watcher = self._watchers[key] = _Watcher(self._source)
        with watcher.waiter(feed, stops) as stopped:
            if self._source.answers_in_order:
                _, over = await asyncio.gather(watcher.follow(feed), is_over())
            else:
                await watcher.follow(feed)
                over = await is_over()
            if not over:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RECHECK_S):
                        await stopped

    @property
    def waiting(self) -> int:
        return sum(len(of) for each in self._watchers.values() for of in each.waiters.values())

    async def aclose(self) -> None:
        """Stop reading; pending waiters get an error."""
        watchers, self._watchers = self._watchers, {}
        for watcher in watchers.values():
            await watcher.aclose()

    def forget(self) -> None:
        """In a forked child: leave the parent's readers alone."""
        leave_behind(self._watchers)
        self._watchers = {}


class _Watcher:
    """Reads some feeds while there are waiters for their executions."""

    def __init__(self, source: FeedSource) -> None:
        self._source = source
        self._reader = FeedReader(source)
        self.waiters: dict[str, Waiters] = {}
        self._task: asyncio.Task[None] | None = None
        self._nudging: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def waiter(self, feed: str, stops: Sequence[Stop]) -> Generator[asyncio.Future[None]]:
        stopped = asyncio.get_running_loop().create_future()
        of_feed = self.waiters.setdefault(feed, {})
        for stop in stops:
            of_feed.setdefault(stop, []).append(stopped)
        try:
            yield stopped
        finally:
            for stop in stops:
                of_feed[stop].remove(stopped)
                if not of_feed[stop]:
                    del of_feed[stop]
            if not of_feed:
                del self.waiters[feed]
                self._reader.positions.pop(feed, None)

    async def follow(self, feed: str) -> None:
        if feed not in self._reader.positions:
            last = await self._source.last_position(feed)
            if feed not in self.waiters:
                return
            self._reader.positions.setdefault(feed, last)
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._run())
        elif feed not in self._reader.reading and self._nudging is None:
            self._nudging = loop.create_task(self._nudge())

    async def _nudge(self) -> None:
        """Interrupt the current read, so that the next one covers the new feeds."""
        try:
            while self._task and not self._reader.positions.keys() <= self._reader.reading:
                await self._reader.link.interrupt()
                # The read may not have reached the server yet, so retry until it has ended.
                await asyncio.sleep(_NUDGE_S)
        except TransportError as error:
            log.debug("the reader of the feeds was not interrupted: %s", error)
        finally:
            self._nudging = None

    async def _run(self) -> None:
        backoff, wait_s = Backoff(*_PAUSES_S), _WAIT_S
        try:
            while self.waiters:
                try:
                    await self._read(wait_s)
                    if not wait_s:
                        # Entries may have been trimmed, or lost, during the outage.
                        self._wake(self.waiters)
                    backoff.reset()
                    wait_s = _WAIT_S
                except EngineError as error:
                    log.debug("event feed lost, reading again: %s", error)
                    await asyncio.sleep(backoff.jittered_s())
                    wait_s = 0.0
        finally:
            self._task = None
            reader, self._reader = self._reader, FeedReader(self._source)
            reader.link.close()

    async def _read(self, wait_s: float) -> None:
        positions = self._reader.positions
        if not positions:
            # A waiter is about to note its position.
            await asyncio.sleep(_NUDGE_S)
            return
        found, gaps = await self._reader.read(list(positions), wait_s)
        for feed, entries in found.items():
            if feed in positions:
                positions[feed] = self._source.position(entries[-1])
            of_feed = self.waiters.get(feed, {})
            for entry in entries:
                if (stop := self._source.stop(entry)) in of_feed:
                    _wake(of_feed[stop])
        self._wake(gaps)

    def _wake(self, feeds: Iterable[str]) -> None:
        for feed in feeds:
            for waiting in self.waiters.get(feed, {}).values():
                _wake(waiting)

    async def aclose(self) -> None:
        tasks = [task for task in (self._task, self._nudging) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for ended in (
            each for of in self.waiters.values() for some in of.values() for each in some
        ):
            if not ended.done():
                ended.set_exception(TransportError("transport", "the client was closed"))


def _wake(waiting: Iterable[asyncio.Future[None]]) -> None:
    for ended in waiting:
        if not ended.done():
            ended.set_result(None)
