"""One scanner's task: cycles that never overlap, restarted after a crash."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping

import msgspec

from flowfabric.core.errors import EngineError, TransportError
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.base import Scanner, ScanResult, Scope
from flowfabric.scanners.filter import ScannerFilter
from flowfabric.scanners.leader import Leadership
from flowfabric.scanners.territory import Territory, TerritoryMap
from flowfabric.scanners.trouble import UNREACHABLE, Outage
from flowfabric.scanners.watch import DueWatch

log = logging.getLogger(__name__)

_MIN_PAUSE_S = 0.1
_CANCELLED_PAUSE_S = 1.0
_STUCK_INTERVALS = 5
_STUCK_AT_LEAST_S = 10.0


class ScannerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one scanner is doing."""

    name: str
    interval_s: float
    cycles: int
    processed: int
    errors: int
    restarts: int
    last_duration_s: float
    last_progress_at: float | None
    """When the server last answered it, on the loop's clock; None before the first answer."""
    scanning: bool
    stuck: bool
    """No progress for several intervals, although it should scan."""


class Shared(msgspec.Struct, frozen=True):
    """What the scanners of one process have in common."""

    backend: ValkeyBackend
    territory: TerritoryMap
    watch: DueWatch
    accept: ScannerFilter
    leadership: Leadership
    stop: asyncio.Event
    restart_backoff_s: float
    outage: Outage


class Runner:
    """Runs one scanner at its interval for as long as this process should scan."""

    def __init__(self, scanner: Scanner, interval_s: float, shared: Shared) -> None:
        self.scanner = scanner
        self.name = scanner.name
        self.interval_s = interval_s
        self._shared = shared
        self._watched = shared.watch.watches(scanner.name)
        self._one_cycle = asyncio.Lock()
        self._pause_s = self._draw_pause()
        # Times on the loop's clock; None before the first, because any number may be a time.
        self._last_start: float | None = None
        self._last_covered: float | None = None
        self._progress_at: float | None = None
        self._more = False
        self._troubles = self._failed_cycles = 0
        self._begun_at = 0.0
        self._cut_off = False
        self._cycles = self._processed = self._errors = self._restarts = 0
        self._last_duration_s = 0.0

    # --- status ---------------------------------------------------------------------

    def status(self) -> ScannerStatus:
        """A picture of now."""
        progress = _latest(self._progress_at, self._shared.watch.covered_at(self.name))
        return ScannerStatus(
            name=self.name,
            interval_s=self.interval_s,
            cycles=self._cycles,
            processed=self._processed,
            errors=self._errors,
            restarts=self._restarts,
            last_duration_s=self._last_duration_s,
            last_progress_at=progress,
            scanning=self._shared.leadership.scanning.is_set(),
            stuck=self._stuck(progress),
        )

    def _stuck(self, progress: float | None) -> bool:
        leadership = self._shared.leadership
        since = _latest(progress, leadership.since)
        if not leadership.scanning.is_set() or self._shared.stop.is_set() or since is None:
            return False
        silent = asyncio.get_running_loop().time() - since
        return silent > max(_STUCK_AT_LEAST_S, _STUCK_INTERVALS * self.interval_s)

    def _progress(self) -> None:
        self._progress_at = asyncio.get_running_loop().time()

    # --- the supervised task --------------------------------------------------------

    async def run(self) -> None:
        """Until stopped: whatever ends the cycles, they begin again after a pause."""
        stop = self._shared.stop
        while not stop.is_set():
            cycles = asyncio.get_running_loop().create_task(
                self._cycle_for_ever(), name=f"ff-scanner-{self.name}"
            )
            try:
                await asyncio.wait([cycles])
            except asyncio.CancelledError:
                cycles.cancel()
                await asyncio.wait([cycles])
                raise
            if cycles.cancelled():
                await self._sleep(_CANCELLED_PAUSE_S)
            elif (error := cycles.exception()) is not None:
                self._restarts += 1
                log.error(
                    "scanner %s crashed, restarting in %g s",
                    self.name,
                    self._shared.restart_backoff_s,
                    exc_info=error,
                    extra={
                        "action": "scanner_crashed",
                        "scanner": self.name,
                        "restart_count": self._restarts,
                    },
                )
                await self._sleep(self._shared.restart_backoff_s)

    async def _cycle_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        stop, scanning = self._shared.stop, self._shared.leadership.scanning
        while not stop.is_set():
            if not scanning.is_set():
                await _either(stop, scanning)
                continue
            due = self._due_at()
            if due is not None and (pause := due - loop.time()) > 0:
                await self._sleep(pause)
                continue
            await self.cycle()
            # A cycle that had to stop early goes on at once, but lets others in between.
            await asyncio.sleep(0)

    def _due_at(self) -> float | None:
        """When the next cycle should start; None: now."""
        covered = self._shared.watch.covered_at(self.name)
        last = _latest(self._last_start, covered)
        if self._more or last is None:
            return None
        # A look by another scanner counts as a cycle of ours.
        if covered == last and covered not in (self._last_start, self._last_covered):
            self._last_covered = covered
            self._cycles += 1
        due = last + self._pause_s
        exact = self._shared.watch.next_due(self.name) if self._watched else None
        if exact is not None:
            # One more millisecond: the server rounds its time down.
            soonest = last if self._last_start is None else self._last_start + _MIN_PAUSE_S
            due = min(due, max(exact + 0.001, soonest))
        return due

    def _draw_pause(self) -> float:
        # Jitter only shortens: the interval is the longest that due work may wait.
        return max(_MIN_PAUSE_S, self.interval_s * random.uniform(0.9, 1.0))  # noqa: S311

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._shared.stop.wait()
        except TimeoutError:
            pass

    # --- one cycle ------------------------------------------------------------------

    async def cycle(self, partition: str | None = None, *, thorough: bool = False) -> ScanResult:
        """One cycle, over one partition where given; `thorough` takes no shortcut."""
        async with self._one_cycle:
            loop = asyncio.get_running_loop()
            started = loop.time()
            if partition is None:
                # A look at one partition does not stand for one at all of them.
                self._last_start = started
                self._pause_s = self._draw_pause()
                self._more = False
            self._begun_at, self._cut_off = started, False
            try:
                result = await self._scan(partition, thorough=thorough)
            except EngineError as error:
                result = ScanResult(errors=1)
                self._trouble("could not scan", error, {})
            if not self._troubles and not self._cut_off:
                self._shared.outage.over()
            self._settle()
            self._last_duration_s = loop.time() - started
            self._cycles += 1
            self._processed += result.processed
            self._errors += result.errors
            self._more = self._more or result.more
            self._log(result)
            return result

    async def _scan(self, partition: str | None, *, thorough: bool) -> ScanResult:
        shared = self._shared
        territory = await shared.territory.current(fresh=thorough)
        if partition is not None:
            territory = Territory({partition: territory.lanes.get(partition, frozenset())})
        elif self._watched and not thorough and await shared.watch.quiet(self.name, territory):
            self._progress()
            return ScanResult()
        scope = Scope(
            territory,
            accept=shared.accept,
            budget_s=max(1.0, self.interval_s),
            stopped=shared.stop.is_set,
            on_progress=self._progress,
            on_trouble=self._trouble,
            watch=shared.watch,
            thorough=thorough,
        )
        return await self.scanner.scan(shared.backend, scope)

    def _trouble(self, what: str, error: EngineError, fields: Mapping[str, str]) -> None:
        """The engine failed the scanner. Told once: it says the same at every cycle."""
        if isinstance(error, TransportError) and error.kind in UNREACHABLE:
            # An outage is everybody's, wherever in its cycle it catches a scanner.
            if not self._cut_off:
                self._cut_off = True
                self._shared.outage.noticed(error, self._begun_at)
            return
        first = not self._troubles and not self._failed_cycles
        self._troubles += 1
        log.log(
            logging.WARNING if first else logging.DEBUG,
            "scanner %s: %s: %s",
            self.name,
            what,
            error,
            extra={
                "action": "scanner_failure",
                "scanner": self.name,
                "error": str(error),
                **fields,
            },
        )

    def _settle(self) -> None:
        troubles, self._troubles = self._troubles, 0
        if troubles:
            self._failed_cycles += 1
        elif self._failed_cycles:
            failed, self._failed_cycles = self._failed_cycles, 0
            log.info(
                "scanner %s works again after %d failed cycles",
                self.name,
                failed,
                extra={
                    "action": "scanner_recovered",
                    "scanner": self.name,
                    "failed_cycles": failed,
                },
            )

    def _log(self, result: ScanResult) -> None:
        level = logging.INFO if result.processed or result.errors else logging.DEBUG
        if log.isEnabledFor(level):
            log.log(
                level,
                "%s: %d processed, %d errors",
                self.name,
                result.processed,
                result.errors,
                extra={
                    "action": "scanner_cycle",
                    "scanner": self.name,
                    "processed": result.processed,
                    "errors": result.errors,
                    "elapsed_ms": round(self._last_duration_s * 1000),
                },
            )


def _latest(*times: float | None) -> float | None:
    return max((time for time in times if time is not None), default=None)


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
