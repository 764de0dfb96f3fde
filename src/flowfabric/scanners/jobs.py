"""Scanners of time-ordered indexes, with their common loop, and some small ones."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from flowfabric.core.ids import is_execution_id, is_uuid
from flowfabric.core.state import ExpireReason
from flowfabric.core.text import shown
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import DueScan, Index
from flowfabric.scanners.base import Cycle, report
from flowfabric.scanners.watch import Territory

Act: TypeAlias = Callable[..., Awaitable[list[str]]]
"""The engine call for the due `ids` of a partition, or of a lane in it; one answer per id."""

_INDEXES_AT_ONCE = 2000
_NOT_DUE = frozenset({"not_yet_due", "not_yet_expired", "not_due"})
_MAX_FAILURES = 3
_SKIPPED_CYCLES = 10
_TIDY_EVERY = 50
_TIDY_ABOVE = 500
_LANES_AT_ONCE = 100
_CLAIMABLE = ("eligible", "reclaimable", "sigs")


class PoisonList:
    """Skips members that keep failing. Local to the process: losing it is harmless."""

    def __init__(self) -> None:
        self._cycle = 0
        self._failures: dict[str, int] = {}
        # The first cycle in which a skipped member is tried again.
        self._skipped_until: dict[str, int] = {}

    def begin_cycle(self) -> None:
        self._cycle += 1
        skipped = self._skipped_until.items()
        self._skipped_until = {item: until for item, until in skipped if until > self._cycle}
        if self._cycle % _TIDY_EVERY == 0 and len(self) > _TIDY_ABOVE:
            self._failures.clear()

    def skips(self, item: str) -> bool:
        return item in self._skipped_until

    def failed(self, item: str) -> bool:
        """Count a failure; returns whether the item is skipped from now on."""
        failures = self._failures.pop(item, 0) + 1
        if failures < _MAX_FAILURES:
            self._failures[item] = failures
            return False
        self._skipped_until[item] = self._cycle + _SKIPPED_CYCLES + 1
        return True

    def succeeded(self, item: str) -> None:
        self._failures.pop(item, None)

    def __len__(self) -> int:
        return len(self._failures) + len(self._skipped_until)


@dataclass
class DueScanner:
    """Acts on the due members of its indexes, page by page.

    Members that stay in an index (they failed, are skipped, or belong to another deployment) are
    passed with an offset, so that they never hide those after them.
    """

    name: str
    act: Act
    index: str
    per_lane: bool = False
    """Whether each lane has such an index."""
    page: int = 50
    _poison: PoisonList = field(default_factory=PoisonList)

    async def accepted(self, cycle: Cycle, tag: str, ids: Sequence[str]) -> list[str]:  # noqa: ARG002
        """The members that this process may touch, in order."""
        return await cycle.where.accepted(cycle.backend, ids)

    def is_member(self, tag: str, member: str) -> bool:
        """Whether this is an id; the engine removes everything else from the index."""
        return is_execution_id(member, tag)

    def indexes(self, territory: Territory) -> list[Index]:
        if not self.per_lane:
            return [Index(tag, self.index) for tag in territory]
        return [Index(tag, self.index, lane) for tag, lanes in territory.items() for lane in lanes]

    async def scan(self, cycle: Cycle) -> None:
        self._poison.begin_cycle()
        indexes = self.indexes(cycle.territory)
        for start in range(0, len(indexes), _INDEXES_AT_ONCE):
            some = indexes[start : start + _INDEXES_AT_ONCE]
            scan = await self._read(cycle, some)
            if cycle.watch is not None and cycle.watch.watches(self.name):
                cycle.watch.learn(some, scan)
            for index, ids in scan.due.items():
                if cycle.out_of_time():
                    return
                with cycle.surviving("could not read an index", partition=index.tag):
                    await self._drain(cycle, index, ids)

    async def _read(self, cycle: Cycle, indexes: Sequence[Index], offset: int = 0) -> DueScan:
        scan = await cycle.backend.upkeep.scan_due(indexes, self.page, offset)
        cycle.progress()
        for index, error in scan.unreadable.items():
            cycle.failed("could not read an index", error, partition=index.tag, index=str(index))
        return scan

    async def _drain(self, cycle: Cycle, index: Index, ids: list[str]) -> None:
        """Act on everything due in one index, beginning with a page already read."""
        offset = 0
        seen: set[str] = set()
        while True:
            fresh = [member for member in ids if member not in seen]
            seen.update(fresh)
            removed = 0
            with cycle.surviving("could not act", partition=index.tag):
                removed = await self._handle(cycle, index, fresh)
            if len(ids) < self.page or cycle.out_of_time():
                return
            offset += len(ids) - removed
            scan = await self._read(cycle, [index], offset)
            ids = scan.due.get(index, [])

    async def _handle(self, cycle: Cycle, index: Index, ids: list[str]) -> int:
        """Act on one page; returns how many members left the index."""
        healthy = [member for member in ids if not self._poison.skips(member)]
        accepted = await self.accepted(cycle, index.tag, healthy)
        if not accepted:
            return 0
        place = (index.tag, index.lane) if self.per_lane else (index.tag,)
        answers = await self.act(*place, ids=accepted)
        removed = 0
        for member, answer in zip(accepted, answers, strict=True):
            if answer.startswith("error:"):
                cycle.errors += 1
                self._note_failure(index, member, answer)
                continue
            self._poison.succeeded(member)
            if answer not in _NOT_DUE:
                removed += 1
                cycle.processed += 1
                if not self.is_member(index.tag, member):
                    message = f"removed a malformed member of {index}: {shown(member)}"
                    self._report(logging.WARNING, "member_malformed", message, index, member)
        return removed

    def _note_failure(self, index: Index, member: str, answer: str) -> None:
        if not self._poison.failed(member):
            message = f"failed for {shown(member)}: {answer.removeprefix('error:')}"
            level, action = logging.WARNING, "scanner_failure"
            self._report(level, action, message, index, member, error=answer)
            return
        counts = {"failures": _MAX_FAILURES, "backoff_cycles": _SKIPPED_CYCLES}
        message = f"persistent failure: {shown(member)} is skipped for {_SKIPPED_CYCLES} cycles"
        self._report(logging.ERROR, "scanner_poison", message, index, member, **counts)

    def _report(
        self, level: int, action: str, message: str, index: Index, member: str, **fields: object
    ) -> None:
        where = {"item": shown(member), "partition": index.tag}
        report(level, self.name, action, message, **where, **fields)


class UuidScanner(DueScanner):
    """Acts on members that are not executions but have a UUID; no filter applies to them."""

    def is_member(self, tag: str, member: str) -> bool:  # noqa: ARG002
        return is_uuid(member)

    async def accepted(self, cycle: Cycle, tag: str, ids: Sequence[str]) -> list[str]:  # noqa: ARG002
        return list(ids)


class PendingWpExpiry(UuidScanner):
    """Closes waitpoints that no suspension used in time; the filter applies to their owners."""

    async def accepted(self, cycle: Cycle, tag: str, ids: Sequence[str]) -> list[str]:
        if cycle.where.is_empty:
            return list(ids)
        upkeep = cycle.backend.upkeep
        owners = await asyncio.gather(*(upkeep.waitpoint_owner(tag, each) for each in ids))
        ours = set(await cycle.where.accepted(cycle.backend, sorted(set(owners))))
        return [each for each, owner in zip(ids, owners, strict=True) if owner in ours]


def due_scanners(backend: Backend) -> list[DueScanner]:
    """The scanners that act when something is due."""
    upkeep, suspensions = backend.upkeep, backend.suspensions
    too_long = partial(upkeep.expire_execution, reason=ExpireReason.ATTEMPT_TIMEOUT)
    too_late = partial(upkeep.expire_execution, reason=ExpireReason.EXECUTION_DEADLINE)
    return [
        DueScanner("lease_expiry", upkeep.mark_lease_expired_if_due, "lease_expiry"),
        DueScanner("delayed_promoter", upkeep.promote_delayed, "delayed", per_lane=True),
        DueScanner("attempt_timeout", too_long, "attempt_timeout"),
        DueScanner("execution_deadline", too_late, "execution_deadline"),
        DueScanner("suspension_timeout", suspensions.expire_suspension, "suspension_timeout"),
        PendingWpExpiry(
            "pending_wp_expiry", suspensions.expire_waitpoints, "pending_waitpoint_expiry", page=100
        ),
    ]


class RetentionTrimmer(DueScanner):
    """Deletes executions at the end of their retention, old events and idle lanes."""

    def __init__(self, backend: Backend, events_retention_ms: int) -> None:
        trim = backend.upkeep.trim_retention
        super().__init__("retention_trimmer", trim, "terminal", per_lane=True, page=20)
        self._events_retention_ms = events_retention_ms

    async def scan(self, cycle: Cycle) -> None:
        await super().scan(cycle)
        upkeep = cycle.backend.upkeep
        oldest = max(0, await cycle.backend.meta.server_time_ms() - self._events_retention_ms)
        for tag in cycle.territory:
            if cycle.out_of_time():
                return
            with cycle.surviving("could not trim the feed", partition=tag):
                await upkeep.trim_events(tag, oldest)
            with cycle.surviving("could not purge", partition=tag):
                while await upkeep.purge(tag) and not cycle.out_of_time():
                    cycle.progress()
        with cycle.surviving("could not trim the feeds of budgets and quotas"):
            await upkeep.trim_policy_events(oldest)
        with cycle.surviving("could not read the namespaces"):
            for namespace in await cycle.backend.places.namespaces_in_use():
                with cycle.surviving("could not trim the worker feed", namespace=namespace):
                    await upkeep.trim_worker_events(namespace, oldest)
        with cycle.surviving("could not trim the lane registry"):
            await upkeep.forget_idle_lanes()


class WorkerSweeper:
    """Removes the registrations of workers that died without deregistering."""

    name = "worker_sweeper"

    async def scan(self, cycle: Cycle) -> None:
        for namespace in await cycle.backend.places.namespaces_in_use():
            if cycle.out_of_time():
                return
            with cycle.surviving("could not sweep the workers", namespace=namespace):
                cycle.processed += await cycle.backend.upkeep.sweep_workers(namespace)


class DoorbellScanner:
    """Rings again for lanes and partitions with claimable work, in case a ring was lost."""

    name = "doorbell"

    def indexes(self, territory: Mapping[str, Collection[str]]) -> list[Index]:
        places = [(tag, lane) for tag, lanes in territory.items() for lane in lanes]
        return [Index(tag, name, lane) for tag, lane in places for name in _CLAIMABLE]

    async def scan(self, cycle: Cycle) -> None:
        places = [(tag, lane) for tag, lanes in cycle.territory.items() for lane in lanes]
        for start in range(0, len(places), _LANES_AT_ONCE):
            if cycle.out_of_time():
                return
            some: dict[str, list[str]] = {}
            for tag, lane in places[start : start + _LANES_AT_ONCE]:
                some.setdefault(tag, []).append(lane)
            indexes = self.indexes(some)
            with cycle.surviving("could not ring"):
                if await cycle.backend.upkeep.any_exists(indexes):
                    await cycle.backend.wakeups.ring_waiting(some)
                elif cycle.watch is not None:
                    cycle.watch.learn_absent(indexes)
