"""Starting, watching and stopping all scanners of a process."""

from __future__ import annotations

import asyncio
import hashlib
import logging

from flowfabric.core.errors import EngineError, NotFoundError, invalid_input
from flowfabric.core.text import shown
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.attempt_timeout import AttemptTimeout
from flowfabric.scanners.base import Scanner, ScanResult
from flowfabric.scanners.delayed_promoter import DelayedPromoter
from flowfabric.scanners.doorbell import Doorbell
from flowfabric.scanners.due import DueScanner
from flowfabric.scanners.execution_deadline import ExecutionDeadline
from flowfabric.scanners.filter import ScannerFilter
from flowfabric.scanners.hints import DueHints
from flowfabric.scanners.index_reconciler import IndexReconciler
from flowfabric.scanners.leader import Leadership
from flowfabric.scanners.lease_expiry import LeaseExpiry
from flowfabric.scanners.pending_wp_expiry import PendingWpExpiry
from flowfabric.scanners.retention_trimmer import RetentionTrimmer
from flowfabric.scanners.runner import Runner, ScannerStatus, Shared
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scanners.suspension_timeout import SuspensionTimeout
from flowfabric.scanners.territory import TerritoryMap
from flowfabric.scanners.trouble import Outage
from flowfabric.scanners.watch import DueWatch, Indexes
from flowfabric.scanners.worker_sweeper import WorkerSweeper

log = logging.getLogger(__name__)


class ScannerSupervisor:
    """The scanners of one process. Any number of processes may run one; one of them scans.

    >>> supervisor = ScannerSupervisor(backend)  # doctest: +SKIP
    >>> supervisor.start()  # doctest: +SKIP
    >>> await supervisor.stop()  # doctest: +SKIP
    """

    def __init__(
        self,
        backend: ValkeyBackend,
        settings: ScannerSettings | None = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the spec's name for it
    ) -> None:
        settings = ScannerSettings.from_env() if settings is None else settings
        accept = settings.filter if filter is None else filter
        due: list[DueScanner] = [
            LeaseExpiry(),
            DelayedPromoter(),
            AttemptTimeout(),
            ExecutionDeadline(),
            SuspensionTimeout(),
            PendingWpExpiry(),
        ]
        due = [scanner for scanner in due if scanner.name not in settings.disabled]
        doorbell = Doorbell()
        others: list[Scanner] = [
            doorbell,
            IndexReconciler(),
            RetentionTrimmer(settings.events_retention_ms),
            WorkerSweeper(),
        ]
        watched: dict[str, Indexes] = {s.name: s.indexes for s in (*due, doorbell)}
        enabled = [*due, *(s for s in others if s.name not in settings.disabled)]
        self.hints = DueHints(backend)
        """Feed it the delays this process sets; they then end at their exact time."""
        self.leadership = Leadership(
            backend,
            key=_leader_key(settings, accept),
            ttl_s=settings.leader_ttl_s,
            healthy=self._healthy,
        )
        self._stop = asyncio.Event()
        shared = Shared(
            backend,
            TerritoryMap(backend, settings.territory_refresh_s),
            DueWatch(backend, watched, settings.clock_trust_s),
            accept,
            self.leadership,
            self._stop,
            settings.restart_backoff_s,
            Outage(),
        )
        self._runners = {s.name: Runner(s, settings.interval(s.name), shared) for s in enabled}
        self._backend = backend
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin. Once per object."""
        if self._tasks:
            return
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.leadership.run(self._stop), name="ff-scanner-leadership"),
            *(loop.create_task(runner.run()) for runner in self._runners.values()),
        ]
        self.hints.start()
        log.info(
            "scanners started: %s",
            ", ".join(self._runners),
            extra={"action": "scanners_started"},
        )

    async def stop(self, timeout: float = 15) -> None:
        """End every cycle at its next page and hand the lease over; abandons after `timeout`."""
        self._stop.set()
        await self.hints.stop()
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout)
        if late:
            log.warning(
                "%d scanners did not stop in %g s and are abandoned",
                len(late),
                timeout,
                extra={"action": "scanners_abandoned"},
            )
            for task in late:
                task.cancel()
            await asyncio.wait(late)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.leadership.holds:
            try:
                await self.leadership.release()
            except EngineError as error:
                # It lapses by itself; the next leader starts a few seconds later.
                log.debug("leader lease not released: %s", error)
        log.info("scanners stopped", extra={"action": "scanners_stopped"})

    async def scan_once(self, name: str, partition: int | None = None) -> ScanResult:
        """One full cycle of one scanner now, whoever leads; for tests and operators."""
        runner = self._runners.get(name)
        if runner is None:
            known = ", ".join(self._runners)
            raise NotFoundError("scanner_not_found", f"{shown(name)}: there are {known}")
        if partition is not None and not 0 <= partition < self._backend.counts.flow:
            raise invalid_input("partition", f"must be below {self._backend.counts.flow}")
        tag = None if partition is None else f"{{fp:{partition}}}"
        return await runner.cycle(tag, thorough=True)

    def status(self) -> dict[str, ScannerStatus]:
        """How each scanner is doing, by name."""
        return {name: runner.status() for name, runner in self._runners.items()}

    def _healthy(self) -> bool:
        return not any(status.stuck for status in self.status().values())


def _leader_key(settings: ScannerSettings, accept: ScannerFilter) -> str:
    """Processes share a leader only when its scanners would do exactly their work."""
    if accept.is_empty and not settings.disabled:
        return keys.LEADER
    what = repr((accept.namespace, accept.instance_tag, sorted(settings.disabled)))
    return f"{keys.LEADER}:{hashlib.sha256(what.encode()).hexdigest()[:16]}"
