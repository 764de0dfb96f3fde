"""The current activity of a deployment, read at a cost independent of the number of executions."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Self, TypeVar

import msgspec

from flowfabric.core.contracts.budgets import BudgetStatus
from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.workers import WorkerEntry
from flowfabric.engine.lane_overview import LaneOverview, read_lanes
from flowfabric.engine.overview import Wait, read_wait

T = TypeVar("T")
_SAMPLE = 1000
"""How many completions to count between two readings; enough to estimate the rate."""
_MAX_WORKERS = 50
_MAX_LEASES = 1000
_MAX_SUSPENDED = 100
_SHOWN_WAITS = 10
_MAX_BUDGETS = 200
_NEAR = 0.8
_NEVER = 2**63
_FAILURES = ("failed", "expired")


class Rates(msgspec.Struct, frozen=True):
    """Executions per second since the last reading."""

    submitted: float
    finished: float
    failed: float
    """The finished ones that failed or expired."""


class WorkerOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker process."""

    worker: str
    namespace: str
    lanes: tuple[str, ...]
    leases: int | None
    """How many executions it runs; None if it was not read."""
    draining: bool
    last_heartbeat_ms: int


class DimensionUse(msgspec.Struct, frozen=True, kw_only=True):
    """A dimension of a budget that is near its limit or above it."""

    budget: str
    dimension: str
    used: int
    limit: int


class LiveOverview(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a deployment. None means that a part could not be read."""

    now_ms: int
    rates: Rates | None = None
    """None in the first reading."""
    lanes: list[LaneOverview] | None
    workers: list[WorkerOverview] | None
    waits: list[Wait] | None
    """Some of the waits for an answer, soonest timeout first."""
    budgets: list[DimensionUse] | None

    def total(self, name: str) -> int:
        """The sum of a count over all lanes."""
        return sum(getattr(lane, name) for lane in self.lanes or ())


async def unless_refused(part: Awaitable[T]) -> T | None:
    """The result; None if the store refused, so that the other parts are still shown."""
    try:
        return await part
    except EngineError as error:
        if error.retryable:
            raise
        return None


async def read_live(backend: Backend) -> LiveOverview:
    """Read once, without rates."""
    now = await backend.meta.server_time_ms()
    lanes, workers, waits, budgets = await asyncio.gather(
        unless_refused(read_lanes(backend)),
        unless_refused(_workers(backend)),
        unless_refused(_waits(backend)),
        unless_refused(_budgets(backend)),
    )
    return LiveOverview(now_ms=now, lanes=lanes, workers=workers, waits=waits, budgets=budgets)


async def _workers(backend: Backend) -> list[WorkerOverview]:
    found = await backend.workers.list_workers(None, limit=None)
    leases = await asyncio.gather(
        *(_leases(backend, worker) for worker in found[:_MAX_WORKERS]), return_exceptions=True
    )
    counts = [None if isinstance(each, BaseException) else each for each in leases]
    counts += [None] * (len(found) - len(counts))
    return [
        WorkerOverview(
            worker=worker.worker_instance_id,
            namespace=worker.namespace,
            lanes=worker.lanes,
            leases=count,
            draining=worker.draining,
            last_heartbeat_ms=worker.last_heartbeat_ms,
        )
        for worker, count in zip(found, counts, strict=True)
    ]


async def _leases(backend: Backend, worker: WorkerEntry) -> int:
    page = await backend.workers.list_worker_leases(worker.worker_instance_id, limit=_MAX_LEASES)
    return len(page.entries)


async def _waits(backend: Backend) -> list[Wait]:
    page = await backend.suspensions.list_suspended(limit=_MAX_SUSPENDED)
    entries = sorted(page.entries, key=lambda one: (one.timeout_at or _NEVER, one.suspended_at))
    read = await asyncio.gather(
        *(read_wait(backend, one.execution_id) for one in entries[:_SHOWN_WAITS]),
        return_exceptions=True,
    )
    # Some may have been answered or deleted since they were listed.
    found = [each[0] for each in read if not isinstance(each, BaseException)]
    return [wait for wait in found if wait.since is not None]


async def _budgets(backend: Backend) -> list[DimensionUse]:
    page = await backend.budgets.list_budgets(limit=_MAX_BUDGETS)
    found = [use for status in page.entries for use in _near(status)]
    return sorted(found, key=lambda use: -use.used / use.limit)


def _near(status: BudgetStatus) -> Sequence[DimensionUse]:
    title = status.scope_id if status.scope_type == "name" else status.budget_id
    held = Counter(status.usage)
    held.update(status.reserved)
    return [
        DimensionUse(budget=title, dimension=name, used=held[name], limit=limit)
        for name, limit in sorted(status.hard_limits.items())
        if limit and held[name] >= limit * _NEAR
    ]


class LiveReader:
    """Reads a deployment repeatedly, with rates.

    The engine has no counters over time, so this follows the feed of completions. After a thousand
    it stops until the next reading, so that the cost stays the same on a busy deployment.

    >>> async with LiveReader(backend) as reader:  # doctest: +SKIP
    ...     print(await reader.read())
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ended: Counter[str] = Counter()
        self._from: float | None = None
        """Since when completions are counted; None while they are not."""
        self._until: float | None = None
        """When counting stopped; None while it continues."""
        self._resume = asyncio.Event()
        self._before: tuple[float, int] | None = None
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def read(self) -> LiveOverview:
        """Read now; the rates are those since the last reading."""
        found = await read_live(self._backend)
        at, unfinished = time.monotonic(), found.total("unfinished")
        before, self._before = self._before, (at, unfinished)
        finished = self._take()
        if before is None or finished is None or found.lanes is None:
            return found
        ended, failed = finished
        grown = (unfinished - before[1]) / (at - before[0])
        rates = Rates(round(max(0.0, ended + grown), 1), round(ended, 1), round(failed, 1))
        return msgspec.structs.replace(found, rates=rates)

    def _take(self) -> tuple[float, float] | None:
        """Finished and failed per second since the last call; None if nothing was followed."""
        since, until, counts, now = self._from, self._until, self._ended, time.monotonic()
        self._ended, self._from = Counter(), None if since is None or until else now
        if self._from is None:
            self._resume.set()
        covered = 0.0 if since is None else (until or now) - since
        if not covered:
            return None
        return counts.total() / covered, sum(counts[each] for each in _FAILURES) / covered

    async def _follow(self) -> None:
        while True:
            with suppress(EngineError):
                await self._count()
            self._resume.clear()
            await self._resume.wait()

    async def _count(self) -> None:
        async with await self._backend.events.subscribe_completion() as feed:
            self._from, self._until = time.monotonic(), None
            try:
                async for event in feed:
                    if not isinstance(event, CorruptionError):
                        self._ended[event.outcome] += 1
                    if self._ended.total() >= _SAMPLE:
                        return
            finally:
                self._until = time.monotonic()
