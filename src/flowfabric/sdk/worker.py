"""A worker process: connects, claims within its permits, keeps leases and its registration."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Self

from flowfabric.core.closing import ClosedOnce
from flowfabric.core.contracts.leases import (
    Claim,
    ClaimGrant,
    Handle,
    ReclaimGrant,
    ReclaimOutcome,
    ResumeGrant,
)
from flowfabric.core.contracts.suspension import Accepted, SignalOutcome, TriggeredResume
from flowfabric.core.errors import (
    ConfigError,
    ContentionError,
    EngineError,
    TransportError,
    WorkerAtCapacity,
)
from flowfabric.core.ids import ExecutionId, WaitpointToken, new_uuid
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.valkey.backend import ValkeyBackend, limits_from_env
from flowfabric.engine.valkey.connect import Place, open_backend
from flowfabric.engine.valkey.health import log_findings
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scheduler.hints import LaneHints, Lanes
from flowfabric.scheduler.sweep import find_work
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.lease_keeper import HeldLease, LeaseKeeper, opened
from flowfabric.sdk.scanner_thread import ScannerThread
from flowfabric.sdk.task import DROP_PAUSE_S, ClaimedTask, warn_dropped

log = logging.getLogger(__name__)

Connect = Callable[[], Awaitable[ValkeyBackend]]
"""Opens a backend in the running event loop: one for the worker, one for its lease keeper, one for
its scanners."""


class Worker(ClosedOnce):
    """Claims tasks and owns the permits. `WorkerRuntime` runs handlers on top of it.

    >>> async with await Worker.connect(config, "valkey://127.0.0.1:6379") as worker:
    ...     task = await worker.claim()
    ...     if task is not None:
    ...         async with task:
    ...             await task.complete(b"done")
    """

    def __init__(
        self,
        config: WorkerConfig,
        backend: ValkeyBackend,
        keeper: LeaseKeeper,
        new_scanners: Callable[[], ScannerThread | None],
    ) -> None:
        self.config = config
        self.backend = backend
        self.keeper = keeper
        self.new_scanners = new_scanners
        """Makes the scanners of one run, not yet started; None when this process has none."""
        self.free = config.permits
        self.complete_on_exit = config.complete_on_exit
        self.lanes = Lanes(config.lanes, backend.counts, config.worker_instance_id)
        self.on_release: Callable[[], None] | None = None
        self._held: set[HeldLease] = set()
        self._unanswered: dict[tuple[str, str], tuple[str, float]] = {}
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Task[None]] = set()
        self._wants = {
            lane: ClaimRequest.of(
                lane,
                config.worker_id,
                config.worker_instance_id,
                capabilities=config.capabilities_csv,
                lease_ttl_ms=config.lease_ttl_ms,
            )
            for lane in config.lanes
        }
        self._heartbeat: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, config: WorkerConfig, place: Connect | Place) -> Self:
        """Open connections, register the process, start the lease keeper and the heartbeat.

        `place` is a url, an address, or a function that opens a backend.
        """
        connect = place if callable(place) else partial(open_backend, place)
        # Local mistakes first: a typo must not register an instance that never serves.
        settings = ScannerSettings.from_env() if config.scanners else None
        limits_from_env()
        backend = await opened(connect)
        keeper = LeaseKeeper(connect, config.lease_ttl_ms)
        worker = cls(
            config,
            backend,
            keeper,
            lambda: None if settings is None else ScannerThread(connect, settings, backend),
        )
        try:
            # Whoever prepared the server may have been warned long ago, and elsewhere.
            await asyncio.gather(
                worker._register(only_if_absent=True), log_findings(backend.transport)
            )
        except BaseException:
            await backend.aclose()
            raise
        try:
            await asyncio.to_thread(keeper.start)
        except BaseException:
            await worker.aclose()
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
            await self.backend.workers.register_worker(
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
        await self.backend.places.register_places(self._places())

    def _places(self) -> dict[str, list[str]]:
        """Where this worker looks for work by default."""
        places: dict[str, list[str]] = {}
        for lane in self.lanes:
            places.setdefault(lane.home, []).append(lane.lane_id)
        return places

    async def _beat(self) -> None:
        config = self.config
        while True:
            await asyncio.sleep(config.liveness_ttl_ms / 3000)
            try:
                expiry = await self.backend.workers.heartbeat_worker(
                    config.worker_instance_id, config.namespace
                )
                if expiry is None:
                    await self._register(only_if_absent=False)
                for tag, lanes in self._places().items():
                    self.backend.places.known_places.setdefault(tag, set()).update(lanes)
                await self.backend.places.register_again()
            except (EngineError, ConfigError) as error:
                log.warning("heartbeat failed: %s", error, extra={"action": "heartbeat_failed"})

    def want(self, lane_id: str) -> ClaimRequest:
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

    def adopt(self, claim: Claim, since: float) -> ClaimedTask:
        """A task on a permit that is already reserved; `since` is when the claim was asked for."""
        task = ClaimedTask(self, claim, since)
        self._held.add(task.held)
        return task

    def release(self, held: HeldLease) -> None:
        """A task ended: its permit is free again."""
        self._held.discard(held)
        self.free += 1
        if self.on_release is not None:
            self.on_release()

    def forgotten(self, held: HeldLease) -> None:
        """A task was garbage collected, in whatever thread: free its permit, return its lease."""
        self.keeper.release(held)
        # The loop is closed when the whole worker was left behind.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take_back, held)

    def _take_back(self, held: HeldLease) -> None:
        warn_dropped(held.handle.execution_id)
        self.release(held)
        if held.alive and not self.closed:
            self._in_background(self._give_back_dropped(held))

    async def _give_back_dropped(self, held: HeldLease) -> None:
        await asyncio.sleep(DROP_PAUSE_S)
        await self.give_back([held.handle])

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def give_back(self, handles: Iterable[Handle]) -> None:
        """Return leases that no task will use; best effort, they lapse otherwise."""
        outcomes = await asyncio.gather(
            *(self.backend.executions.delay(handle, 1) for handle in handles),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                log.debug("lease not given back: %s", outcome)

    # --- claiming -------------------------------------------------------------------------

    async def claim_at(self, lane_id: str, tag: str, max_n: int) -> tuple[list[ClaimedTask], bool]:
        """Claim from one lane and partition; the tasks, and whether to ask again at once."""
        reserved = self.reserve(max_n)
        if not reserved:
            return [], False
        request_id, since, repeats = self._request(lane_id, tag)
        tasks: list[ClaimedTask] = []
        try:
            claimed = await self.backend.claims.claim_many(
                self.want(lane_id), tag, reserved, request_id=request_id
            )
            tasks = [self.adopt(claim, since) for claim in claimed.claims[:reserved]]
        except (TransportError, asyncio.CancelledError) as error:
            if not isinstance(error, TransportError) or error.ambiguous:
                self.unanswered(lane_id, tag, request_id, since)
            raise
        finally:
            self.unreserve(reserved - len(tasks))
        if len(claimed.claims) > reserved:
            # The answer to an earlier request, when there was more room.
            await self.give_back(claim.handle for claim in claimed.claims[reserved:])
        if tasks:
            self._found(lane_id, tag)
        lane = self.lanes[lane_id]
        # Who got nothing although there is something was shown all that it may take: a ring or
        # the next sweep tells when that has changed. A repeat only gave what it gave before.
        more = claimed.remaining > 0 and (repeats or bool(claimed.claims))
        if more:
            lane.add(tag)
        else:
            lane.drop(tag)
        return tasks, more

    def _found(self, lane_id: str, tag: str) -> None:
        """There is work: our scanners look here from now on, others once it is registered."""
        lanes = self.backend.places.known_places.get(tag)
        if lanes is None or lane_id not in lanes:
            self._in_background(self._register_place(lane_id, tag))

    async def _register_place(self, lane_id: str, tag: str) -> None:
        try:
            await self.backend.places.register_places({tag: [lane_id]})
        except EngineError as error:
            # The next claim there repeats it.
            log.debug("place not registered: %s", error)

    def _request(self, lane_id: str, tag: str) -> tuple[str, float, bool]:
        """The id of the claim to make: that of a lost one, whose leases would else lie idle."""
        now = time.monotonic()
        lost = self._unanswered.pop((lane_id, tag), None)
        if lost is not None and now - lost[1] < self.config.lease_ttl_ms / 1000:
            return *lost, True
        return new_uuid(), now, False

    def unanswered(self, lane_id: str, tag: str, request_id: str, since: float) -> None:
        """A claim's reply was lost: the next claim there repeats it and gets its leases."""
        self._unanswered[lane_id, tag] = request_id, since
        self.lanes[lane_id].add(tag)

    async def claim_many(self, max_n: int | None = None) -> list[ClaimedTask]:
        """Claim up to `max_n` tasks of the configured lanes; empty without work or permits."""
        wanted = self.free if max_n is None else min(max_n, self.free)
        tasks: list[ClaimedTask] = []
        try:
            for lane in self.lanes.in_turn():
                if len(tasks) < wanted:
                    tasks += await self._claim_in(lane, wanted - len(tasks))
        except EngineError:
            # What was claimed before the fault is not lost with it.
            if not tasks:
                raise
        return tasks

    async def _claim_in(self, lane: LaneHints, wanted: int) -> list[ClaimedTask]:
        poll_s = self.config.claim_poll_interval_ms / 1000
        swept_at = lane.swept_at
        if not len(lane) or swept_at is None or time.monotonic() - swept_at >= poll_s:
            for tag in await find_work(self.backend, lane):
                lane.add(tag)
        tasks: list[ClaimedTask] = []
        for tag in list(lane):
            if len(tasks) < wanted:
                found, more = await self.claim_at(lane.lane_id, tag, wanted - len(tasks))
                tasks += found
                if more:
                    lane.rotate(tag)
        return tasks

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
                return await self.backend.claims.claim_execution(
                    grant, **identity, lease_ttl_ms=config.lease_ttl_ms, lane_id=lane_id
                )
            except ContentionError as error:
                if error.code != "use_claim_resumed_execution":
                    raise
                return await self.backend.claims.claim_resumed_execution(
                    grant, **identity, lease_ttl_ms=config.lease_ttl_ms, lane_id=lane_id
                )

        return await self._with_permit(consume)

    async def claim_from_resume_grant(self, grant: ResumeGrant) -> ClaimedTask:
        """Turn a resume grant into a task: the same attempt goes on here."""
        config = self.config
        return await self._with_permit(
            lambda: self.backend.claims.claim_from_resume_grant(
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
        since = time.monotonic()
        try:
            outcome = await self.backend.claims.reclaim_execution(
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
            self._found(outcome.handle.lane_id, outcome.handle.execution_id.tag)
            return self.adopt(outcome, since)
        self.unreserve(1)
        return outcome

    async def _with_permit(self, consume: Callable[[], Awaitable[Claim]]) -> ClaimedTask:
        if not self.reserve(1):
            raise WorkerAtCapacity
        since = time.monotonic()
        try:
            claim = await consume()
        except BaseException:
            self.unreserve(1)
            raise
        self._found(claim.handle.lane_id, claim.handle.execution_id.tag)
        return self.adopt(claim, since)

    # --- signals ----------------------------------------------------------------------------

    async def deliver_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        waitpoint_token: WaitpointToken | str,
        signal_name: str,
        **options: Any,
    ) -> SignalOutcome | TriggeredResume:
        """Answer a wait of another execution; takes the options of `Client.deliver_signal`."""
        outcome = await self.backend.signals.deliver_signal(
            execution_id, waitpoint_id, waitpoint_token, signal_name, **options
        )
        if isinstance(outcome, Accepted) and outcome.resumed:
            return TriggeredResume(outcome.signal_id)
        return outcome

    # --- ending -----------------------------------------------------------------------------

    async def _close(self) -> None:
        """Give held leases back, deregister, close every connection."""
        async with contextlib.AsyncExitStack() as closing:
            # The last first. Whatever breaks or is cut off, the next step is taken.
            closing.push_async_callback(self.backend.aclose)
            closing.push_async_callback(self._deregister)
            closing.push_async_callback(asyncio.to_thread, self.keeper.stop)
            closing.push_async_callback(self._discard)
            if self._heartbeat is not None:
                self._heartbeat.cancel()
                await asyncio.wait([self._heartbeat])

    async def _discard(self) -> None:
        tasks = [task for held in list(self._held) if (task := held.watcher()) is not None]
        await asyncio.gather(
            *(task.discard(pause_s=0) for task in tasks if isinstance(task, ClaimedTask)),
            *self._background,
        )

    async def _deregister(self) -> None:
        try:
            await self.backend.workers.mark_worker_dead(
                self.config.worker_instance_id, self.config.namespace, "shutdown"
            )
        except EngineError as error:
            log.debug("worker not deregistered: %s", error)
