"""Gauges that are read from the engine when metrics are scraped: queue depths, ages, workers."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, PartitionKey
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.label_budget import OTHER, Labels
from flowfabric.engine.metrics import Meter
from flowfabric.engine.paging import read_pages

log = logging.getLogger(__name__)

_MAX_AGE_S = 5.0
_REST = 10
"""Pause this many times as long as the read took, so that reads use a tenth of the time at most."""
_KIDS_EVERY_S = 60.0
_MAX_PLACES = 256
_MAX_SUSPENDED = 2000
_MAX_WAITPOINTS = 500
_PAGE = 500
_BLOCKED = "blocked_"
_CANCELS = "cancel_backlog"


class Gauges:
    """Reads a deployment's gauges into the metrics of this process, at most every few seconds.

    A part that cannot be read keeps its last values.

    >>> gauges = Gauges(backend, meter)  # doctest: +SKIP
    >>> await gauges.refresh()  # doctest: +SKIP
    """

    def __init__(self, backend: Backend, meter: Meter, max_age_s: float = _MAX_AGE_S) -> None:
        self._backend = backend
        self._meter = meter
        self._max_age_s = max_age_s
        self._due_at = self._kids_due_at = 0.0
        self._gate = asyncio.Lock()

    async def refresh(self) -> None:
        """Read everything that was not read just before."""
        async with self._gate:
            started = time.monotonic()
            if started < self._due_at:
                return
            await self._part(self._read_lanes)
            await self._part(self._read_workers)
            await self._part(self._read_backlog)
            if started >= self._kids_due_at:
                await self._part(self._read_kids)
                self._kids_due_at = started + _KIDS_EVERY_S
            took = time.monotonic() - started
            self._due_at = started + (self._max_age_s and max(self._max_age_s, took * _REST))

    async def _part(self, read: Callable[[], Awaitable[None]]) -> None:
        try:
            await read()
        except EngineError as error:
            log.debug("gauges keep their last values: %s", error)

    async def _read_lanes(self) -> None:
        backend, replace = self._backend, self._meter.replace
        counts = await backend.listings.count_lanes(await backend.places.lanes_in_use())
        for state in ("eligible", "reclaimable"):
            replace(f"ff_{state}_depth", {(lane,): of[state] for lane, of in counts.items()})
        blocked: dict[Labels, float] = {
            (lane, state.removeprefix(_BLOCKED)): count
            for lane, of in counts.items()
            for state, count in of.items()
            if state.startswith(_BLOCKED) and count
        }
        replace("ff_blocked_depth", blocked)
        waiting = [lane for lane, of in counts.items() if of["eligible"]]
        ages = dict.fromkeys(counts, 0) | await backend.listings.oldest_eligible(waiting)
        seconds = {(lane,): age_ms / 1000 for lane, age_ms in ages.items()}
        replace("ff_oldest_eligible_age_seconds", seconds)
        await self._read_suspended({lane: of["suspended"] for lane, of in counts.items()})

    async def _read_suspended(self, totals: dict[str, int]) -> None:
        """Count suspensions by lane and reason; beyond the first ones, the reason is not read."""
        found: Counter[Labels] = Counter()
        if any(totals.values()):
            async for entry_lane, reason, _ in self._suspended(_MAX_SUSPENDED):
                found[entry_lane, reason] += 1
        listed = Counter(lane for lane, _ in found.elements())
        for lane, total in totals.items():
            if (rest := total - listed[lane]) > 0:
                found[lane, OTHER] += rest
        self._meter.replace("ff_suspensions_open", dict(found))

    async def _suspended(self, limit: int) -> AsyncGenerator[tuple[str, str, ExecutionId]]:
        """Lane, reason and id of the first suspended executions."""
        list_suspended = self._backend.suspensions.list_suspended
        async for page in read_pages(lambda cursor: list_suspended(cursor=cursor, limit=_PAGE)):
            for entry in page.entries:
                yield entry.lane_id, entry.reason, entry.execution_id
            limit -= len(page.entries)
            if limit <= 0:
                return

    async def _read_workers(self) -> None:
        places, workers = self._backend.places, self._backend.workers
        alive = Counter(dict.fromkeys(await places.namespaces_in_use(), 0))
        alive.update(worker.namespace for worker in await workers.list_workers(None, limit=None))
        values: dict[Labels, float] = {(name,): count for name, count in alive.items()}
        self._meter.replace("ff_workers_alive", values)

    async def _read_backlog(self) -> None:
        tags = await self._backend.places.used_partitions()
        backlog = await self._backend.upkeep.flow_backlog(tags)
        cancels = backlog.queued.get(_CANCELS, 0)
        rest = sum(backlog.queued.values()) - cancels + len(backlog.parked)
        self._meter.set("ff_cancel_backlog_depth", cancels)
        self._meter.set("ff_cascade_backlog_depth", rest)

    async def _read_kids(self) -> None:
        secrets, current = self._backend.secrets, dict[str, str | None]()
        kids: dict[Labels, float] = {}
        tags = await self._backend.places.used_partitions()
        for tag in tags[:_MAX_PLACES]:
            number = PartitionKey.trusted(tag).index_number
            found = await secrets.list_waitpoint_hmac_kids(number)
            kids[str(number),] = len(found.verifying) + (found.current_kid is not None)
            if found.verifying:
                current[tag] = found.current_kid
        self._meter.replace("ff_waitpoint_kids", kids)
        old = await self._signed_with_old_kid(current) if current else 0
        self._meter.set("ff_waitpoint_tokens_old_kid_open", old)

    async def _signed_with_old_kid(self, current: dict[str, str | None]) -> int:
        """Open waitpoints of suspended executions with another key than their partition's."""
        suspended = [one async for _, _, one in self._suspended(_MAX_WAITPOINTS)]
        return sum([await self._count_old(each, current) for each in _within(suspended, current)])

    async def _count_old(self, execution_id: ExecutionId, current: dict[str, str | None]) -> int:
        waitpoints = self._backend.waitpoints
        page = await waitpoints.list_pending_waitpoints(execution_id, "", _PAGE)
        return sum(one.token_kid != current[execution_id.tag] for one in page.entries)


def _within(ids: Iterable[ExecutionId], tags: Iterable[str]) -> list[ExecutionId]:
    known = set(tags)
    return [execution_id for execution_id in ids if execution_id.tag in known]
