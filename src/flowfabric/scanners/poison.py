"""Skips members of an index that keep failing."""

from __future__ import annotations

_TIDY_EVERY = 50
_TIDY_ABOVE = 500


class PoisonList:
    """Counts consecutive failures per member. Local to the process: losing it is harmless."""

    MAX_FAILURES = 3
    SKIPPED_CYCLES = 10

    def __init__(self) -> None:
        self._cycle = 0
        self._failures: dict[str, int] = {}
        # The first cycle in which a skipped member is tried again.
        self._skipped_until: dict[str, int] = {}

    def begin_cycle(self) -> None:
        self._cycle += 1
        over = [item for item, until in self._skipped_until.items() if until <= self._cycle]
        for item in over:
            del self._skipped_until[item]
        if self._cycle % _TIDY_EVERY == 0 and len(self) > _TIDY_ABOVE:
            self._failures.clear()

    def skips(self, item: str) -> bool:
        return item in self._skipped_until

    def failed(self, item: str) -> bool:
        """Count a failure; returns whether the item is skipped from now on."""
        failures = self._failures.pop(item, 0) + 1
        if failures < self.MAX_FAILURES:
            self._failures[item] = failures
            return False
        self._skipped_until[item] = self._cycle + self.SKIPPED_CYCLES + 1
        return True

    def succeeded(self, item: str) -> None:
        self._failures.pop(item, None)

    def __len__(self) -> int:
        return len(self._failures) + len(self._skipped_until)
