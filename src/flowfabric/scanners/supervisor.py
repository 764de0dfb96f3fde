"""Starting, watching and stopping all scanners of a process."""

import asyncio
import logging

from flowfabric.core.errors import EngineError, NotFoundError, invalid_input
from flowfabric.core.text import shown
from flowfabric.engine.api.backend import Backend
from flowfabric.scanners import jobs
from flowfabric.scanners.base import Scanner, ScanResult
from flowfabric.scanners.due import DueScanner
from flowfabric.scanners.hints import DueHints
from flowfabric.scanners.index_reconciler import IndexReconciler
from flowfabric.scanners.leader import LeaderElection, duty_of
from flowfabric.scanners.runner import Outage, Runner, ScannerStatus, Shared
from flowfabric.scanners.settings import ScannerFilter, ScannerSettings
from flowfabric.scanners.territory import TerritoryMap
from flowfabric.scanners.watch import DueWatch

log = logging.getLogger(__name__)


class ScannerSupervisor:
    """The scanners of one process. Of all processes that have them, one scans at a time.

    >>> supervisor = ScannerSupervisor(backend)  # doctest: +SKIP
    >>> supervisor.start()  # doctest: +SKIP
    >>> await supervisor.stop()  # doctest: +SKIP
    """

    def __init__(
        self,
        backend: Backend,
        settings: ScannerSettings | None = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the spec's name for it
    ) -> None:
        settings = ScannerSettings.from_env() if settings is None else settings
        where = settings.filter if filter is None else filter
        watched: list[DueScanner | jobs.DoorbellScanner] = [
            jobs.LeaseExpiry(),
            jobs.DelayedPromoter(),
            jobs.AttemptTimeout(),
            jobs.ExecutionDeadline(),
            jobs.SuspensionTimeout(),
            jobs.PendingWpExpiry(),
            jobs.DoorbellScanner(),
        ]
        watched = [scanner for scanner in watched if scanner.name not in settings.disabled]
        scanners: list[Scanner] = [
            *watched,
            IndexReconciler(),
            jobs.RetentionTrimmer(settings.events_retention_ms),
            jobs.WorkerSweeper(),
        ]
        self.hints = DueHints(backend)
        """Tell it the delays this process sets; they then end at their exact time."""
        self.leadership = LeaderElection(
            backend,
            duty=duty_of(where, settings.disabled),
            ttl_s=settings.leader_ttl_s,
            healthy=self._is_healthy,
        )
        self._stop = asyncio.Event()
        shared = Shared(
            backend,
            TerritoryMap(backend, settings.territory_refresh_s),
            DueWatch(backend, {s.name: s.indexes for s in watched}, settings.clock_trust_s),
            where,
            self.leadership,
            self._stop,
            settings.restart_backoff_s,
            Outage(),
        )
        self._runners = {
            scanner.name: Runner(scanner, settings.interval(scanner.name), shared)
            for scanner in scanners
            if scanner.name not in settings.disabled
        }
        self._backend = backend
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every scanner, once per object."""
        if self._tasks:
            return
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.leadership.run(self._stop), name="ff-scanner-leadership"),
            *(loop.create_task(runner.run()) for runner in self._runners.values()),
        ]
        self.hints.start()
        names = ", ".join(self._runners)
        log.info("scanners started: %s", names, extra={"action": "scanners_started"})

    async def stop(self, timeout: float = 15) -> None:
        """Stop every cycle at its next page and resign; abandon what runs after `timeout`."""
        self._stop.set()
        await self.hints.stop()
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout)
        if late:
            log.warning(
                "%d scanners did not stop within %g s and were abandoned",
                len(late),
                timeout,
                extra={"action": "scanners_abandoned"},
            )
            for task in late:
                task.cancel()
            await asyncio.wait(late)
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self.leadership.resign()
        except EngineError as error:
            # The lease expires; the next leader starts a few seconds later.
            log.debug("leader lease not released: %s", error)
        log.info("scanners stopped", extra={"action": "scanners_stopped"})

    async def scan_once(self, name: str, partition: int | None = None) -> ScanResult:
        """Run one full cycle of one scanner now, whichever process leads."""
        runner = self._runners.get(name)
        if runner is None:
            known = ", ".join(self._runners)
            raise NotFoundError("scanner_not_found", f"{shown(name)}; enabled are {known}")
        if partition is not None and not 0 <= partition < self._backend.counts.flow:
            raise invalid_input("partition", f"must be below {self._backend.counts.flow}")
        tag = None if partition is None else f"{{fp:{partition}}}"
        return await runner.cycle(tag, thorough=True)

    def status(self) -> dict[str, ScannerStatus]:
        """The status of each scanner, by name."""
        return {name: runner.status() for name, runner in self._runners.items()}

    def _is_healthy(self) -> bool:
        return not any(status.stuck for status in self.status().values())
