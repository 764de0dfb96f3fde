"""Every scanner but the index reconciler: what it looks for, and the engine call that it makes."""

import asyncio
from collections.abc import Collection, Mapping, Sequence

from flowfabric.core.ids import is_uuid
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.base import Cycle
from flowfabric.scanners.due import DueScanner

_LANES_AT_ONCE = 100
_CLAIMABLE = ("eligible", "reclaimable", "sigs")


class LeaseExpiry(DueScanner):
    """Makes leases that their worker no longer renews reclaimable, and rings for their lanes."""

    name = index = "lease_expiry"

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.upkeep.mark_lease_expired_if_due(index.tag, ids)


class DelayedPromoter(DueScanner):
    """Makes delayed executions and retries claimable when they are due."""

    name = "delayed_promoter"
    index = "delayed"
    per_lane = True

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.upkeep.promote_delayed(index.tag, index.lane, ids)


class AttemptTimeout(DueScanner):
    """Ends attempts that run too long, or retries them if the policy says so."""

    name = index = "attempt_timeout"

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.upkeep.expire_execution(index.tag, ExpireReason.ATTEMPT_TIMEOUT, ids)


class ExecutionDeadline(DueScanner):
    """Ends executions, in any phase, whose deadline passed."""

    name = index = "execution_deadline"

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        reason = ExpireReason.EXECUTION_DEADLINE
        return await backend.upkeep.expire_execution(index.tag, reason, ids)


class SuspensionTimeout(DueScanner):
    """Fails, cancels, expires, resumes or escalates suspensions whose timeout passed."""

    name = index = "suspension_timeout"

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.suspensions.expire_suspension(index.tag, ids)


class PendingWpExpiry(DueScanner):
    """Closes waitpoints that no suspension used in time: its members are no executions."""

    name = "pending_wp_expiry"
    index = "pending_waitpoint_expiry"
    page = 100

    def is_member(self, tag: str, member: str) -> bool:  # noqa: ARG002
        return is_uuid(member)

    async def accepted(self, cycle: Cycle, tag: str, ids: Sequence[str]) -> list[str]:
        if cycle.where.is_empty:
            return list(ids)
        upkeep = cycle.backend.upkeep
        owners = await asyncio.gather(*(upkeep.waitpoint_owner(tag, each) for each in ids))
        ours = set(await cycle.where.accepted(cycle.backend, sorted(set(owners))))
        return [each for each, owner in zip(ids, owners, strict=True) if owner in ours]

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.suspensions.expire_waitpoints(index.tag, ids)


class RetentionTrimmer(DueScanner):
    """Deletes executions at the end of their retention, old events and idle lanes."""

    name = "retention_trimmer"
    index = "terminal"
    per_lane = True
    page = 20

    def __init__(self, events_retention_ms: int) -> None:
        super().__init__()
        self._events_retention_ms = events_retention_ms

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.upkeep.trim_retention(index.tag, index.lane, ids)

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
        with cycle.surviving("could not read the namespaces"):
            for namespace in await cycle.backend.places.namespaces_in_use():
                with cycle.surviving("could not trim the worker feed", namespace=namespace):
                    await upkeep.trim_worker_events(namespace, oldest)
        with cycle.surviving("could not trim the lane registry"):
            await upkeep.forget_idle_lanes()


class WorkerSweeper:
    """Removes the registrations of workers that died without signing off."""

    name = "worker_sweeper"

    async def scan(self, cycle: Cycle) -> None:
        for namespace in await cycle.backend.places.namespaces_in_use():
            if cycle.out_of_time():
                return
            with cycle.surviving("could not sweep the workers", namespace=namespace):
                cycle.processed += await cycle.backend.upkeep.sweep_workers(namespace)


class DoorbellScanner:
    """Rings again for lanes and partitions that hold claimable work, in case a ring was lost."""

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
