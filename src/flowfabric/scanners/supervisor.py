"""Starting, watching and stopping all scanners of a process; the cycles of each never overlap."""

import asyncio
import logging
import random

import msgspec

from flowfabric.core.errors import NotFoundError, invalid_input
from flowfabric.core.text import shown
from flowfabric.engine import metrics
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.outage import Outage
from flowfabric.scanners import budget_jobs, flow_jobs, jobs, lane_jobs
from flowfabric.scanners.base import Cycle, Scanner, ScanResult, report, wait_until
from flowfabric.scanners.board import keep_board
from flowfabric.scanners.hints import DueHints
from flowfabric.scanners.index_reconciler import IndexReconciler
from flowfabric.scanners.leader import LeaderElection, duty_of
from flowfabric.scanners.quota_jobs import QuotaReconciler
from flowfabric.scanners.settings import FAMILIES, ScannerSettings
from flowfabric.scanners.unblock import UnblockScanner
from flowfabric.scanners.watch import DueWatch, TerritoryMap

log = logging.getLogger(__name__)

_MIN_PAUSE_S = 0.1
_CANCELLED_PAUSE_S = 1.0
_STUCK_INTERVALS = 5
_STUCK_AT_LEAST_S = 10.0


class ScannerStatus(msgspec.Struct, kw_only=True):
    """How one scanner is doing."""

    name: str
    interval_s: float
    cycles: int = 0
    processed: int = 0
    errors: int = 0
    restarts: int = 0
    last_duration_s: float = 0.0
    last_progress_at: float | None = None
    """When the server last answered it, on the loop's clock; None before the first answer."""
    scanning: bool = False
    stuck: bool = False
    """Whether it made no progress for several intervals although it should scan."""


class Shared(msgspec.Struct, frozen=True):
    """What the scanners of one process share."""

    backend: Backend
    settings: ScannerSettings
    territory: TerritoryMap
    watch: DueWatch
    leadership: LeaderElection
    stop: asyncio.Event
    outage: Outage


class Runner:
    """Runs one scanner at its interval while this process should scan."""

    def __init__(self, scanner: Scanner, shared: Shared) -> None:
        self.scanner = scanner
        self.name = scanner.name
        self.interval_s = shared.settings.interval(scanner.name)
        self._shared = shared
        self._watched = shared.watch.watches(scanner.name)
        self._one_cycle = asyncio.Lock()
        self._pause_s = self._draw_pause()
        # When, on the loop's clock, the last look at everything began; None before the first.
        self._last_look: float | None = None
        self._more = False
        self._cycle: Cycle | None = None
        self._failed_cycles = 0
        # When, on the loop's clock, the oldest entry was due that no cycle has handled yet.
        self._late_since: float | None = None
        self._status = ScannerStatus(name=scanner.name, interval_s=self.interval_s)

    def status(self) -> ScannerStatus:
        return msgspec.structs.replace(
            self._status,
            last_progress_at=self._progress_at,
            scanning=self._shared.leadership.scanning.is_set(),
            stuck=self._is_stuck(),
        )

    @property
    def _progress_at(self) -> float | None:
        return None if self._cycle is None else self._cycle.progress_at

    def _is_stuck(self) -> bool:
        leadership = self._shared.leadership
        if not leadership.scanning.is_set() or self._shared.stop.is_set():
            return False
        since = max(self._progress_at or 0.0, leadership.since or 0.0)
        silent_s = asyncio.get_running_loop().time() - since
        return silent_s > max(_STUCK_AT_LEAST_S, _STUCK_INTERVALS * self.interval_s)

    async def run(self) -> None:
        """Run cycles until stopped; after a crash, start again after a pause."""
        stop = self._shared.stop
        while not stop.is_set():
            cycles = asyncio.create_task(self._run_cycles(), name=f"ff-scanner-{self.name}")
            try:
                await asyncio.wait([cycles])
            except asyncio.CancelledError:
                cycles.cancel()
                await asyncio.wait([cycles])
                raise
            if cycles.cancelled():
                await wait_until(stop, _CANCELLED_PAUSE_S)
            elif (error := cycles.exception()) is not None:
                self._status.restarts = count = self._status.restarts + 1
                if (meter := metrics.active()) is not None:
                    meter.count("ff_scanner_restarts_total", self.name)
                pause = self._shared.settings.restart_backoff_s
                message = "scanner %s: crashed, restarting in %g s"
                extra = {"action": "scanner_crashed", "scanner": self.name, "restart_count": count}
                log.error(message, self.name, pause, exc_info=error, extra=extra)
                await wait_until(stop, pause)

    async def _run_cycles(self) -> None:
        stop, scanning = self._shared.stop, self._shared.leadership.scanning
        while not stop.is_set():
            if not scanning.is_set():
                self._forget_lag()
                await _first_of(stop, scanning)
            elif (pause := self._pause_left()) > 0:
                await wait_until(stop, pause)
            else:
                await self.cycle()
                # A cycle that ran out of time continues at once, but lets others run first.
                await asyncio.sleep(0)

    def _pause_left(self) -> float:
        if self._more or self._last_look is None:
            return 0.0
        due = self._last_look + self._pause_s
        exact = self._shared.watch.next_due(self.name) if self._watched else None
        if exact is not None:
            # One more millisecond: the server rounds its time down.
            due = min(due, max(exact + 0.001, self._last_look + _MIN_PAUSE_S))
        return due - asyncio.get_running_loop().time()

    def _draw_pause(self) -> float:
        # Jitter only shortens the pause, so that due work waits at most one interval.
        return max(_MIN_PAUSE_S, self.interval_s * random.uniform(0.9, 1.0))  # noqa: S311

    async def cycle(self, partition: str | None = None, *, thorough: bool = False) -> ScanResult:
        """One cycle, over one partition if given; `thorough` takes no shortcut."""
        async with self._one_cycle:
            loop, shared = asyncio.get_running_loop(), self._shared
            started = loop.time()
            meter = metrics.active()
            if meter is not None and self._watched and self._late_since is None:
                self._late_since = shared.watch.next_due(self.name)
            cycle = self._cycle = Cycle(
                shared.backend,
                {},
                where=shared.settings.filter,
                watch=shared.watch,
                stop=shared.stop,
                ends_at=started + max(1.0, self.interval_s),
                thorough=thorough,
                progress_at=self._progress_at,
            )
            with cycle.surviving("could not scan"):
                await self._scan(cycle, partition, started)
                if shared.outage.lasts:
                    # A cycle without any call does not prove that the server is back.
                    await shared.backend.meta.ping()
            if not cycle.failures:
                cycle.progress()
            status = self._status
            status.last_duration_s = loop.time() - started
            status.cycles += 1
            status.processed += cycle.processed
            status.errors += cycle.errors
            self._more = (self._more and partition is not None) or cycle.more
            if meter is not None:
                self._measure(meter, cycle, started)
            self._report(cycle)
            return cycle.result()

    async def _scan(self, cycle: Cycle, partition: str | None, started: float) -> None:
        last_look = self._last_look
        if partition is None:
            # Scanning one partition does not replace scanning all of them.
            self._last_look, self._pause_s = started, self._draw_pause()
        territory = await self._shared.territory.current(fresh=cycle.thorough)
        if partition is not None:
            territory = {partition: territory.get(partition, frozenset())}
        elif self._watched and not cycle.thorough:
            idle = await self._shared.watch.idle_since(self.name, territory, last_look)
            if idle is not None:
                self._last_look = idle
                return
        cycle.territory = territory
        await self.scanner.scan(cycle)

    def _measure(self, meter: metrics.Meter, cycle: Cycle, started: float) -> None:
        name, late = self.name, self._late_since
        meter.count("ff_scanner_cycle_total", name)
        meter.observe("ff_scanner_cycle_duration_seconds", self._status.last_duration_s, name)
        for result, count in (("processed", cycle.processed), ("error", cycle.errors)):
            if count:
                meter.count("ff_scanner_items_total", name, result, by=count)
        lag = 0.0 if late is None else max(0.0, started - late)
        meter.set("ff_scanner_lag_seconds", lag, name)
        if not self._more:
            self._late_since = None

    def _forget_lag(self) -> None:
        """Reset the lag, because another process now scans."""
        self._late_since = None
        if (meter := metrics.active()) is not None:
            meter.set("ff_scanner_lag_seconds", 0.0, self.name)

    def _report(self, cycle: Cycle) -> None:
        """Log what happened. A failure that lasts is logged when it begins and when it ends."""
        outage, what = self._shared.outage, f"scanner {self.name}"
        others = [f for f in cycle.failures if not outage.noticed(f.error, what)]
        outages = len(cycle.failures) - len(others)
        if not cycle.failures:
            outage.ended()
        for failure in others:
            is_new = not self._failed_cycles and failure is others[0]
            level = logging.WARNING if is_new else logging.DEBUG
            message, error = f"{failure.what}: {failure.error}", str(failure.error)
            report(level, self.name, "scanner_failure", message, error=error, **failure.fields)
        if others:
            self._failed_cycles += 1
        elif self._failed_cycles and not outages:
            failed, self._failed_cycles = self._failed_cycles, 0
            message = f"works again after {failed} failed cycles"
            report(logging.INFO, self.name, "scanner_recovered", message, failed_cycles=failed)
        level = logging.INFO if cycle.processed or cycle.errors > outages else logging.DEBUG
        message = f"{cycle.processed} processed, {cycle.errors} errors"
        counts = {"processed": cycle.processed, "errors": cycle.errors}
        counts["elapsed_ms"] = round(self._status.last_duration_s * 1000)
        report(level, self.name, "scanner_cycle", message, **counts)


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


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
        outage: Outage | None = None,
    ) -> None:
        settings = ScannerSettings.from_env() if settings is None else settings
        watched = [
            *jobs.due_scanners(backend),
            jobs.DoorbellScanner(),
            lane_jobs.LaneRescore(),
            UnblockScanner(),
            flow_jobs.CascadeDrain(),
            flow_jobs.CancelReconciler(backend),
            *flow_jobs.sibling_scanners(backend),
            budget_jobs.BudgetResets(backend),
        ]
        watched = [scanner for scanner in watched if scanner.name not in settings.disabled]
        trimmer = jobs.RetentionTrimmer(backend, settings.events_retention_ms)
        audits = [IndexReconciler(), flow_jobs.DependencyReconciler()]
        audits += [budget_jobs.BudgetReconciler(backend, settings.events_retention_ms)]
        projector = flow_jobs.FlowProjector(backend)
        sweeps = [trimmer, jobs.WorkerSweeper(), QuotaReconciler(), lane_jobs.WorkerDrain()]
        scanners: list[Scanner] = [*watched, *audits, projector, *sweeps]
        self.hints = DueHints(backend)
        """Delays set by this process; hinted ones end at their exact time."""
        duty = duty_of(settings.filter, settings.disabled)
        self.leadership = LeaderElection(
            backend, duty=duty, ttl_s=settings.leader_ttl_s, healthy=self._is_healthy
        )
        self._stop = asyncio.Event()
        shared = Shared(
            backend,
            settings,
            TerritoryMap(backend, settings.territory_refresh_s),
            DueWatch(backend, {s.name: s.indexes for s in watched}, settings.clock_trust_s),
            self.leadership,
            self._stop,
            outage or Outage(),
        )
        enabled = [scanner for scanner in scanners if scanner.name not in settings.disabled]
        self._runners = {scanner.name: Runner(scanner, shared) for scanner in enabled}
        self._backend = backend
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every scanner, once per object."""
        if self._tasks:
            return
        leading = asyncio.create_task(self.leadership.run(self._stop), name="ff-scanner-leadership")
        board = keep_board(self._backend, self.leadership, self.status, self._stop)
        self._tasks = [leading, asyncio.create_task(board, name="ff-scanner-board")]
        self._tasks += [asyncio.create_task(r.run()) for r in self._runners.values()]
        self.hints.start()
        names = ", ".join(self._runners)
        log.info("scanners started: %s", names, extra={"action": "scanners_started"})

    async def stop(self, timeout: float = 15) -> None:
        """Stop cycles at their next page, abandon them after `timeout`, and release the lease."""
        self._stop.set()
        await self.hints.stop()
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout)
        if late:
            message = "scanners abandoned: %d did not stop within %g s"
            log.warning(message, len(late), timeout, extra={"action": "scanners_abandoned"})
            for task in late:
                task.cancel()
            await asyncio.wait(late)
        await asyncio.gather(*tasks, return_exceptions=True)
        log.info("scanners stopped", extra={"action": "scanners_stopped"})

    async def scan_once(self, name: str, partition: int | None = None) -> ScanResult:
        """Run one full cycle of one scanner now, whichever process leads."""
        runner = self._runners.get(name)
        if runner is None:
            known = ", ".join(self._runners)
            raise NotFoundError("scanner_not_found", f"{shown(name)}; enabled are {known}")
        family = FAMILIES.get(name, "flow")
        count: int = getattr(self._backend.counts, family)
        if partition is not None and not 0 <= partition < count:
            raise invalid_input("partition", f"must be below {count}")
        letter = "fp" if family == "flow" else family[0]
        tag = None if partition is None else f"{{{letter}:{partition}}}"
        return await runner.cycle(tag, thorough=True)

    def status(self) -> dict[str, ScannerStatus]:
        return {name: runner.status() for name, runner in self._runners.items()}

    def _is_healthy(self) -> bool:
        return not any(status.stuck for status in self.status().values())
