"""What a scanner is, and what it is given for one cycle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.engine.api.backend import Backend
from flowfabric.scanners.filter import ScannerFilter
from flowfabric.scanners.territory import Territory
from flowfabric.scanners.watch import DueWatch

log = logging.getLogger(__name__)


class ScanResult(msgspec.Struct, frozen=True):
    """What one cycle did, and whether it ran out of time."""

    processed: int = 0
    errors: int = 0
    more: bool = False


class Failure(NamedTuple):
    """An engine call that failed; the scanner went on with the rest."""

    what: str
    error: EngineError
    fields: dict[str, str]


class Cycle:
    """One pass of a scanner: where it may look, for how long, and what it has done so far."""

    def __init__(
        self,
        backend: Backend,
        territory: Territory,
        *,
        where: ScannerFilter | None = None,
        budget_s: float = 10.0,
        stop: asyncio.Event | None = None,
        watch: DueWatch | None = None,
        thorough: bool = False,
        progress_at: float | None = None,
    ) -> None:
        self.backend = backend
        self.territory = territory
        self.where = where or ScannerFilter()
        self.watch = watch
        self.thorough = thorough
        """Take no shortcut: an operator asked for this cycle."""
        self.progress_at = progress_at
        """When the server last answered, on the loop's clock."""
        self.processed = 0
        self.errors = 0
        self.more = False
        self.failures: list[Failure] = []
        self._stop = stop
        self._ends_at = asyncio.get_running_loop().time() + budget_s

    def out_of_time(self) -> bool:
        """Whether the cycle must end now; the next one then starts at once."""
        stopped = self._stop is not None and self._stop.is_set()
        if stopped or asyncio.get_running_loop().time() >= self._ends_at:
            self.more = True
        return self.more

    def progress(self) -> None:
        """Note that the server answered; a scanner without progress counts as stuck."""
        self.progress_at = asyncio.get_running_loop().time()

    def failed(self, what: str, error: EngineError, **fields: str) -> None:
        self.errors += 1
        self.failures.append(Failure(what, error, fields))

    @contextmanager
    def surviving(self, what: str, **fields: str) -> Generator[None]:
        """Count an engine error in the block and continue after it."""
        try:
            yield
        except EngineError as error:
            self.failed(what, error, **fields)

    def result(self) -> ScanResult:
        return ScanResult(self.processed, self.errors, self.more)


class Scanner(Protocol):
    """A background job. Every change it makes is an atomic engine call."""

    @property
    def name(self) -> str:
        """The name used in settings, logs and status."""
        ...

    async def scan(self, cycle: Cycle) -> None:
        """Do what is due in the cycle's territory."""
        ...


def report(
    level: int,
    scanner: str,
    action: str,
    message: str,
    fields: Mapping[str, object],
    crash: BaseException | None = None,
) -> None:
    """Log what a scanner did, with the fields that all such records have."""
    if log.isEnabledFor(level):
        extra = {"action": action, "scanner": scanner, **fields}
        log.log(level, "scanner %s: %s", scanner, message, exc_info=crash, extra=extra)


async def wait_until(event: asyncio.Event, seconds: float) -> None:
    """Sleep, but wake at once when the event is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
