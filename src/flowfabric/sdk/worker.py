"""A worker process: connects, claims within its permits, keeps leases and its registration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from flowfabric.core.contracts.leases import (
    Claim,
    ClaimGrant,
    ReclaimGrant,
    ReclaimOutcome,
    ResumeGrant,
)
from flowfabric.core.errors import ConfigError, ContentionError, EngineError, WorkerAtCapacity
from flowfabric.engine.backend import Backend
from flowfabric.engine.scheduling import Want
from flowfabric.scheduler.hints import LaneHints, Lanes
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.lease_keeper import LeaseKeeper
from flowfabric.sdk.task import ClaimedTask

__all__ = ["Connect", "Worker"]

log = logging.getLogger(__name__)

Connect = Callable[[], Awaitable[Backend]]
"""Opens a backend in the running event loop; the worker and its lease keeper each open one."""


class Worker:
    """Claims tasks and owns the permits. `WorkerRuntime` runs handlers on top of it.

    >>> async with await Worker.connect(config, connect) as worker:
    ...     async with await worker.claim() as task:
    ...         await task.complete(b"done")
    """

    def __init__(self, config: WorkerConfig, backend: Backend, keeper: LeaseKeeper) -> None:
        self.config = config
        self.backend = backend
        self.keeper = keeper
        self.free = config.permits
        self.tasks: set[ClaimedTask] = set()
        self.lanes = Lanes(config.lanes, backend.counts, config.worker_instance_id)
        self.on_release: Callable[[], None] | None = None
        self._wants = {
            lane: Want.of(
                lane,
                config.worker_id,
                config.worker_instance_id,
                capabilities=config.capabilities_csv,
                lease_ttl_ms=config.lease_ttl_ms,
            )
            for lane in config.lanes
        }
        self._heartbeat: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def connect(cls, config: WorkerConfig, connect: Connect) -> Self:
        """Open connections, register the process, start the lease keeper and the heartbeat."""
        backend = await connect()
        try:
            worker = cls(config, backend, LeaseKeeper(connect, config.lease_ttl_ms))
            await worker._register(only_if_absent=True)
            await asyncio.to_thread(worker.keeper.start)
        except BaseException:
            await backend.aclose()
            raise
        worker._heartbeat = asyncio.create_task(worker._beat())
        log.info(
            "worker connected",
            extra={
                "action": "worker_connected",
                "worker_id": config.worker_id,
                "instance_id": config.worker_instance_id,
                "lanes": list(config.lanes),
            },
        )
        return worker

    async def _register(self, *, only_if_absent: bool) -> None:
        config = self.config
        try:
            await self.backend.register_worker(
                worker_id=config.worker_id,
                worker_instance_id=config.worker_instance_id,
                lanes=config.lanes,
                capabilities=config.capabilities,
                liveness_ttl_ms=config.liveness_ttl_ms,
                namespace=config.namespace,
                only_if_absent=only_if_absent,
            )
        except EngineError as error:
            if error.code != "invalid_input":
                raise
            raise ConfigError("worker", error.detail, "worker_instance_id") from error

    async def _beat(self) -> None:
        config = self.config
        while True:
            await asyncio.sleep(config.liveness_ttl_ms / 3000)
            try:
                expiry = await self.backend.heartbeat_worker(
                    config.worker_instance_id, config.namespace
                )
                if expiry is None:
                    await self._register(only_if_absent=False)
            except (EngineError, ConfigError) as error:
                log.warning("heartbeat failed: %s", error, extra={"action": "heartbeat_failed"})

    def want(self, lane_id: str) -> Want:
        """The claim request of one lane."""
        return self._wants[lane_id]

    # --- permits ------------------------------------------------------------------------

    def reserve(self, wanted: int) -> int:
        """Take up to so many permits, before any storage call."""
        taken = min(wanted, self.free)
        self.free -= taken
        return taken

    def unreserve(self, count: int) -> None:
        """Return permits that no task took."""
        self.free += count

    def adopt(self, claim: Claim) -> ClaimedTask:
        """A task on a permit that is already reserved."""
        task = ClaimedTask(self, claim)
        self.tasks.add(task)
        return task

    def release(self, task: ClaimedTask) -> None:
        """A task ended: its permit is free again."""
        self.tasks.discard(task)
        self.free += 1
        if self.on_release is not None:
            self.on_release()

    # --- claiming -------------------------------------------------------------------------

    async def claim_at(self, lane_id: str, tag: str, max_n: int) -> tuple[list[ClaimedTask], int]:
        """Claim from one lane and partition; the tasks and how many more wait there."""
        reserved = self.reserve(max_n)
        if not reserved:
            return [], 0
        tasks: list[ClaimedTask] = []
        try:
            claimed = await self.backend.claim_many(self.want(lane_id), tag, reserved)
            tasks = [self.adopt(claim) for claim in claimed.claims]
        finally:
            self.unreserve(reserved - len(tasks))
        lane = self.lanes[lane_id]
        if claimed.remaining:
            lane.add(tag)
        else:
            lane.drop(tag)
        return tasks, claimed.remaining

    async def claim_many(self, max_n: int | None = None) -> list[ClaimedTask]:
        """Claim up to `max_n` tasks of the configured lanes; empty without work or permits."""
        wanted = self.free if max_n is None else min(max_n, self.free)
        tasks: list[ClaimedTask] = []
        for lane in list(self.lanes):
            for tag in await self._places(lane):
                if len(tasks) >= wanted:
                    return tasks
                found, _ = await self.claim_at(lane.lane_id, tag, wanted - len(tasks))
                tasks += found
        return tasks

    async def _places(self, lane: LaneHints) -> list[str]:
        """Where to look: hinted partitions, else those of the sweep if any of them holds work."""
        if len(lane):
            return list(lane)
        tags = lane.sweep()
        return tags if await self.backend.any_work(lane.lane_id, tags) else []

    async def claim(self) -> ClaimedTask | None:
        """Claim one task, or None when there is no work or no permit."""
        tasks = await self.claim_many(1)
        return tasks[0] if tasks else None

    async def claim_next(self) -> ClaimedTask | None:
        """The next task of the configured lanes, in turn."""
        return await self.claim()

    async def claim_from_grant(self, lane_id: str, grant: ClaimGrant) -> ClaimedTask:
        """Turn a scheduler's grant into a task; a paused attempt is resumed by itself."""

        async def consume() -> Claim:
            config = self.config
            identity = {
                "worker_id": config.worker_id,
                "worker_instance_id": config.worker_instance_id,
            }
            try:
                return await self.backend.claim_execution(
                    grant, **identity, lease_ttl_ms=config.lease_ttl_ms, lane_id=lane_id
                )
            except ContentionError as error:
                if error.code != "use_claim_resumed_execution":
                    raise
                return await self.backend.claim_resumed_execution(
                    grant, **identity, lease_ttl_ms=config.lease_ttl_ms, lane_id=lane_id
                )

        return await self._with_permit(consume)

    async def claim_from_resume_grant(self, grant: ResumeGrant) -> ClaimedTask:
        """Turn a resume grant into a task: the same attempt goes on here."""
        config = self.config
        return await self._with_permit(
            lambda: self.backend.claim_from_resume_grant(
                grant,
                worker_id=config.worker_id,
                worker_instance_id=config.worker_instance_id,
                lease_ttl_ms=config.lease_ttl_ms,
            )
        )

    async def claim_from_reclaim_grant(
        self, grant: ReclaimGrant, *, max_reclaim_count: int | None = None
    ) -> ClaimedTask | ReclaimOutcome:
        """Take over an execution whose lease was lost."""
        if not self.reserve(1):
            raise WorkerAtCapacity
        try:
            outcome = await self.backend.reclaim_execution(
                grant,
                worker_id=self.config.worker_id,
                worker_instance_id=self.config.worker_instance_id,
                lease_ttl_ms=self.config.lease_ttl_ms,
                max_reclaim_count=max_reclaim_count,
            )
        except BaseException:
            self.unreserve(1)
            raise
        if isinstance(outcome, Claim):
            return self.adopt(outcome)
        self.unreserve(1)
        return outcome

    async def _with_permit(self, consume: Callable[[], Awaitable[Claim]]) -> ClaimedTask:
        if not self.reserve(1):
            raise WorkerAtCapacity
        try:
            claim = await consume()
        except BaseException:
            self.unreserve(1)
            raise
        return self.adopt(claim)

    # --- ending -----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Give held leases back, deregister, close every connection."""
        if self._closed:
            return
        self._closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.wait([self._heartbeat])
        await asyncio.gather(*(task.discard() for task in list(self.tasks)))
        await asyncio.to_thread(self.keeper.stop)
        try:
            await self.backend.mark_worker_dead(
                self.config.worker_instance_id, self.config.namespace, "shutdown"
            )
        except EngineError as error:
            log.debug("worker not deregistered: %s", error)
        await self.backend.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
