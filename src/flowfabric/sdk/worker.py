"""A worker process: claims within its permits, and keeps its leases and registration alive."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self, TypedDict, Unpack

from flowfabric.core.capabilities import log_digest
from flowfabric.core.closing import ClosedOnce
from flowfabric.core.contracts import leases, suspension
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import ConfigError, ContentionError, EngineError
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.waitpoints import SentSignal
from flowfabric.engine.connect import Place, open_backend
from flowfabric.engine.layers import tracing
from flowfabric.engine.outage import Outage
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scheduler.giving_back import give_back
from flowfabric.scheduler.permits import ClaimPermits
from flowfabric.sdk.attempt import DROP_PAUSE_S, warn_dropped
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.lease_keeper import HeldLease, LeaseKeeper
from flowfabric.sdk.loop_thread import Connect, opened
from flowfabric.sdk.scanner_thread import ScannerThread
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.work_source import StoreSource, WorkSource

log = logging.getLogger(__name__)


class _LeaseTerms(TypedDict):
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int


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
        backend: Backend,
        keeper: LeaseKeeper,
        new_scanners: Callable[[], ScannerThread | None],
        outage: Outage,
    ) -> None:
        self.config = config
        self.backend = backend
        self.keeper = keeper
        self.new_scanners = new_scanners
        """Makes the scanners for one run, not yet started; None if this process runs none."""
        self._terms: _LeaseTerms = {
            "worker_id": config.worker_id,
            "worker_instance_id": config.worker_instance_id,
            "lease_ttl_ms": config.lease_ttl_ms,
        }
        requests = {
            lane: ClaimRequest(
                lane,
                capabilities=config.capabilities_csv,
                namespaces=config.served,
                **self._terms,
            )
            for lane in config.lanes
        }
        source: Callable[..., WorkSource] = StoreSource
        if backend.remote:
            # Workers on Valkey do not load the client of a server.
            from flowfabric.sdk.server_source import ServerSource as source  # noqa: PLC0415, N813
        self.source: WorkSource = source(config, backend, requests, self._adopt, outage)
        """Where the worker gets its tasks."""
        self.claims: ClaimPermits[ClaimedTask] = self.source.claims
        """Permits and claims of this process."""
        self._registered = False
        self.killed = False
        """Set by tests: acts as if the process had been killed."""
        self.outage = outage
        """Shared by all threads of this worker."""
        self.caps_hash = log_digest(config.capabilities_csv)
        self._held: set[HeldLease] = set()
        self._loop = asyncio.get_running_loop()
        self._tracing = tracing.active()
        self._heartbeat: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        config: WorkerConfig,
        place: Connect | Place,
        *,
        tasks: Iterable[str] = (),
        no_others: bool = False,
    ) -> Self:
        """Open connections, register the process, start the lease keeper and the heartbeat.

        `place` is a url, an address, or a function that opens a backend. `tasks`: see
        `offer_tasks`.
        """
        connect = place if callable(place) else partial(open_backend, place)
        # Check local settings first, so that a typo does not register a worker that never serves.
        settings = ScannerSettings.from_env() if config.scanners else None
        backend = await opened(connect)
        outage = Outage("the server" if backend.remote else "Valkey")
        # A server runs the scanners itself.
        remote = backend.remote
        keeper = LeaseKeeper(connect, config.lease_ttl_ms, outage, by_partition=not remote)

        def new_scanners() -> ScannerThread | None:
            if settings is None or remote:
                return None
            return ScannerThread(connect, settings, backend, outage)

        worker = cls(config, backend, keeper, new_scanners, outage)
        worker.claims.offer(config.capabilities, tasks, no_others=no_others)
        try:
            # Repeat the warnings about the server: those of its first client may be long gone.
            await asyncio.gather(worker._register(only_if_absent=True), backend.meta.log_findings())
        except BaseException:
            await backend.aclose()
            raise
        try:
            await asyncio.to_thread(keeper.start)
        except BaseException:
            await worker.aclose()
            raise
        worker._heartbeat = asyncio.create_task(worker._heartbeats())
        extra: dict[str, object] = {"action": "worker_connected", "lanes": list(config.lanes)}
        extra |= {"worker_id": config.worker_id, "instance_id": config.worker_instance_id}
        extra |= {"capabilities": config.capabilities_csv, "worker_caps_hash": worker.caps_hash}
        lanes = ", ".join(config.lanes)
        log.info("worker %s serves %s", config.worker_instance_id, lanes, extra=extra)
        return worker

    async def _register(self, *, only_if_absent: bool) -> None:
        try:
            await self.source.register(only_if_absent=only_if_absent)
        except EngineError as error:
            if error.code != "invalid_input":
                raise
            raise ConfigError("worker", error.detail, "worker_instance_id") from error
        self._registered = True

    def offer_tasks(self, tasks: Iterable[str], *, no_others: bool = False) -> None:
        """Declare the tasks that this process knows, so that it gets executions that need them.

        With `no_others`, it claims only those and leaves other tasks to workers that know them.
        """
        known, offered = (self.claims.tasks, self.claims.no_others), (tuple(tasks), no_others)
        if offered != known:
            self.claims.offer(self.config.capabilities, offered[0], no_others=no_others)
            self._registered = False
            self.claims.in_background(self._announce)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self.config.liveness_ttl_ms / 3000)
            await self._announce()

    async def _announce(self) -> None:
        """Renew the registration, or register again. The next heartbeat retries a failure."""
        try:
            draining = await self.source.beat() if self._registered else None
            if draining is None:
                await self._register(only_if_absent=False)
            else:
                self.claims.drain(draining=draining)
            self.outage.ended()
        except (EngineError, ConfigError) as error:
            if not self.outage.noticed(error, "heartbeat failed"):
                log.warning("heartbeat failed: %s", error, extra={"action": "heartbeat_failed"})

    @property
    def free(self) -> int:
        """How many more tasks may run now."""
        return self.claims.free

    def _adopt(self, claim: leases.Claim, since: float) -> ClaimedTask:
        task = ClaimedTask(self, claim, since)
        if self._tracing is not None:
            task.trace = tracing.AttemptTrace(self._tracing, claim, since)
        self._held.add(task.held)
        return task

    def release(self, held: HeldLease) -> None:
        """Return the permit of a task that ended."""
        self._held.discard(held)
        self.claims.release()

    def task_dropped(self, held: HeldLease) -> None:
        """Release the permit and lease of a task that was garbage collected. Thread-safe."""
        self.keeper.release(held)
        # The loop is closed if the whole worker was dropped.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._release_dropped, held)

    def _release_dropped(self, held: HeldLease) -> None:
        warn_dropped(held.handle.execution_id)
        self.release(held)
        if held.alive and not self.closed:
            self.claims.in_background(give_back, self.backend, [held.handle], DROP_PAUSE_S)

    async def claim_many(self, max_n: int | None = None) -> list[ClaimedTask]:
        """Claim up to `max_n` tasks of the configured lanes; empty without work or permits."""
        return await self.claims.claim_many(self.free if max_n is None else max_n)

    async def claim(self, max_wait: Duration = 0) -> ClaimedTask | None:
        """Claim one task of the configured lanes, in turn; None without work or permits.

        Waits up to `max_wait` for work.

        >>> task = await worker.claim(max_wait="30s")
        """
        wait_s = to_ms(max_wait, "max_wait") / 1000
        tasks = await self.claim_many(1) or await self.claims.claim_when_rung(1, wait_s)
        if not tasks:
            # Without a free permit it did not wait. Let the running tasks proceed.
            await asyncio.sleep(0)
        return tasks[0] if tasks else None

    claim_next = claim

    async def claim_from_grant(self, lane_id: str, grant: leases.ClaimGrant) -> ClaimedTask:
        """Turn a scheduler's grant into a task.

        A paused attempt resumes; an execution whose worker lost its lease is taken over.
        """
        return await self.claims.claim_with(lambda: self._use_grant(lane_id, grant))

    async def claim_via_server(
        self, admin: Backend, lane_id: str, grant_ttl_ms: int = 5_000
    ) -> ClaimedTask | None:
        """Claim one task that a server's scheduler reserves for this worker; None without work.

        `admin` is a backend that is connected to the server. Raises `WorkerAtCapacity`, without
        asking the server, while no permit is free.

        >>> task = await worker.claim_via_server(server, "default")
        """
        claims: Any = admin.claims

        async def consume() -> leases.Claim | None:
            grant = await claims.claim_for_worker(
                lane_id,
                self.config.worker_id,
                self.config.worker_instance_id,
                worker_capabilities=self.config.capabilities,
                worker_tasks=self.claims.tasks,
                grant_ttl_ms=grant_ttl_ms,
                namespaces=self.config.served,
            )
            if isinstance(grant, leases.NoWork):
                return None
            return await self._use_grant(lane_id, grant)

        return await self.claims.claim_with(consume)

    async def _use_grant(self, lane_id: str, grant: leases.ClaimGrant) -> leases.Claim:
        claims, terms = self.backend.claims, self._terms
        try:
            return await claims.claim_execution(grant, lane_id=lane_id, **terms)
        except ContentionError as error:
            if error.code == "use_claim_resumed_execution":
                return await claims.claim_resumed_execution(grant, lane_id=lane_id, **terms)
            if error.code != "execution_not_leaseable":
                raise
            # The grant may be for an execution whose lease was lost.
            outcome = await claims.reclaim_execution(grant.to_reclaim(lane_id), **terms)
            if not isinstance(outcome, leases.Claim):
                raise
            return outcome

    async def claim_from_resume_grant(self, grant: leases.ResumeGrant) -> ClaimedTask:
        """Turn a resume grant into a task: the same attempt resumes here."""
        return await self.claims.claim_with(
            lambda: self.backend.claims.claim_from_resume_grant(grant, **self._terms)
        )

    async def claim_from_reclaim_grant(
        self, grant: leases.ReclaimGrant, *, max_reclaim_count: int | None = None
    ) -> ClaimedTask | leases.ReclaimOutcome:
        """Take over an execution whose lease was lost."""
        return await self.claims.claim_with(
            lambda: self.backend.claims.reclaim_execution(
                grant, max_reclaim_count=max_reclaim_count, **self._terms
            )
        )

    async def deliver_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        waitpoint_token: WaitpointToken | str,
        signal_name: str,
        source_identity: str = "",
        **options: Unpack[SentSignal],
    ) -> suspension.SignalOutcome | suspension.TriggeredResume:
        """Answer a wait of another execution; takes the options of `Client.deliver_signal`."""
        outcome = await self.backend.signals.deliver_signal(
            execution_id,
            waitpoint_id,
            waitpoint_token,
            signal_name,
            source_identity=source_identity,
            **options,
        )
        if isinstance(outcome, suspension.Accepted) and outcome.resumed:
            return suspension.TriggeredResume(outcome.signal_id)
        return outcome

    async def _close(self) -> None:
        """Release held leases, deregister, and close every connection."""
        async with contextlib.AsyncExitStack() as closing:
            # Runs in reverse order, and continues if a step fails.
            closing.push_async_callback(self.backend.aclose)
            closing.push_async_callback(self._deregister)
            closing.push_async_callback(asyncio.to_thread, self.keeper.stop)
            closing.push_async_callback(self.claims.aclose)
            closing.push_async_callback(self._discard_held)
            if self._heartbeat is not None:
                self._heartbeat.cancel()
                await asyncio.wait([self._heartbeat])

    async def _discard_held(self) -> None:
        tasks = [task for held in list(self._held) if (task := held.watcher()) is not None]
        await asyncio.gather(
            *(task.discard(pause_s=0) for task in tasks if isinstance(task, ClaimedTask))
        )

    async def _deregister(self) -> None:
        if self.killed:
            return
        try:
            await self.source.leave()
        except EngineError as error:
            log.debug("cannot deregister the worker: %s", error)
