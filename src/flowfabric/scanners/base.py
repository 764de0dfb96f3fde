"""The base class of scanners, and the context of one cycle."""

import asyncio
import logging
import math
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.engine.api.backend import Backend
from flowfabric.scanners.settings import ScannerFilter
from flowfabric.scanners.watch import DueWatch, Territory

log = logging.getLogger(__name__)

_REST_PER_WORK = 20
_WORK_AT_A_TIME_S = 0.005


class ScanResult(msgspec.Struct, frozen=True):
    """What one cycle did, and whether it ran out of time."""

    processed: int = 0
    errors: int = 0
    more: bool = False


class Failure(NamedTuple):
    """An engine call that failed; the scanner continued with the rest."""

    what: str
    error: EngineError
    fields: dict[str, str]


@dataclass
class Cycle:
    """One pass of a scanner: where it may look, for how long, and what it has done so far."""

    backend: Backend
    territory: Territory
    where: ScannerFilter = field(default_factory=ScannerFilter)
    watch: DueWatch | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ends_at: float = math.inf
    thorough: bool = False
    """Take no shortcut: an operator asked for this cycle."""
    progress_at: float | None = None
    """When the server last answered, on the loop's clock."""
    processed: int = 0
    errors: int = 0
    more: bool = False
    failures: list[Failure] = field(default_factory=list[Failure])
    _worked_s: float = 0.0

    def out_of_time(self) -> bool:
        """Whether the cycle must end now; the next one then starts at once."""
        if self.stop.is_set() or asyncio.get_running_loop().time() >= self.ends_at:
            self.more = True
        return self.more

    def progress(self) -> None:
        """Record that the server answered; a scanner without progress counts as stuck."""
        self.progress_at = asyncio.get_running_loop().time()

    async def rest(self, worked_s: float) -> None:
        """Pause after a call, so that an audit takes at most about 5 % of the server's time."""
        self._worked_s += worked_s
        if self._worked_s > _WORK_AT_A_TIME_S and not self.thorough:
            worked_s, self._worked_s = self._worked_s, 0.0
            await wait_until(self.stop, _REST_PER_WORK * worked_s)

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
    def name(self) -> str: ...

    async def scan(self, cycle: Cycle) -> None:
        """Do what is due in the cycle's territory."""
        ...


def report(level: int, scanner: str, action: str, message: str, /, **fields: object) -> None:
    """Log what a scanner did, with the fields that all such records have."""
    if log.isEnabledFor(level):
        extra = {"action": action, "scanner": scanner, **fields}
        log.log(level, "scanner %s: %s", scanner, message, extra=extra)


async def wait_until(event: asyncio.Event, seconds: float) -> None:
    """Sleep until the time is up or the event is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
