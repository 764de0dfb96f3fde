"""What every scanner is, what it is given, and what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.filter import ScannerFilter
from flowfabric.scanners.territory import Territory
from flowfabric.scanners.watch import DueWatch


class ScanResult(msgspec.Struct, frozen=True):
    """One cycle: subjects handled, failures, and whether the time budget ended it early."""

    processed: int = 0
    errors: int = 0
    more: bool = False


class Tally:
    """Counts while a cycle runs."""

    __slots__ = ("errors", "more", "processed")

    def __init__(self) -> None:
        self.processed = 0
        self.errors = 0
        self.more = False

    def result(self) -> ScanResult:
        """What the cycle amounts to."""
        return ScanResult(self.processed, self.errors, self.more)


def _never() -> bool:
    return False


def _ignore(*_: object) -> None:
    return None


class Scope:
    """Where one cycle may look, for how long, and whom it tells that it gets on."""

    __slots__ = (
        "_ends_at",
        "_on_progress",
        "_on_trouble",
        "_stopped",
        "filter",
        "territory",
        "thorough",
        "watch",
    )

    def __init__(
        self,
        territory: Territory,
        *,
        accept: ScannerFilter | None = None,
        budget_s: float = 10.0,
        stopped: Callable[[], bool] = _never,
        on_progress: Callable[[], None] = _ignore,
        on_trouble: Callable[[str, EngineError, Mapping[str, str]], None] = _ignore,
        watch: DueWatch | None = None,
        thorough: bool = False,
    ) -> None:
        self.territory = territory
        self.filter = accept or ScannerFilter()
        self.watch = watch
        self.thorough = thorough
        """Leave no shortcut: an operator asked for a full look."""
        self._ends_at = asyncio.get_running_loop().time() + budget_s
        self._stopped = stopped
        self._on_progress = on_progress
        self._on_trouble = on_trouble

    def spent(self) -> bool:
        """Whether the cycle must end: its time is over, or the process stops."""
        return self._stopped() or asyncio.get_running_loop().time() >= self._ends_at

    def progress(self) -> None:
        """Say that the server answered; a scanner that never does counts as stuck."""
        self._on_progress()

    def trouble(self, what: str, error: EngineError, **fields: str) -> None:
        """Say that the engine failed the scanner, which goes on with the rest."""
        self._on_trouble(what, error, fields)


class Scanner(Protocol):
    """One kind of periodic upkeep. Every change it makes is an atomic engine call."""

    @property
    def name(self) -> str:
        """The name used in settings, logs and status."""
        ...

    async def scan(self, backend: ValkeyBackend, scope: Scope) -> ScanResult:
        """One cycle over the scope."""
        ...
