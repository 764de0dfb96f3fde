"""Poison items: what keeps failing is left alone for a while, so that it cannot use up a sweep."""

from __future__ import annotations

_STRIKES = 3
_BACKOFF_CYCLES = 10
_TIDY_EVERY = 50
_TIDY_ABOVE = 500


class FailureTracker:
    """Counts consecutive failures per item. Local to the process: losing it is harmless."""

    STRIKES = _STRIKES
    BACKOFF_CYCLES = _BACKOFF_CYCLES

    def __init__(self) -> None:
        self._cycle = 0
        self._strikes: dict[str, int] = {}
        # item → the first cycle in which it is tried again
        self._resting: dict[str, int] = {}

    def begin_cycle(self) -> None:
        """Count one more cycle; now and then forget what has stopped failing."""
        self._cycle += 1
        # What left its index meanwhile is never asked about again.
        over = [item for item, until in self._resting.items() if until <= self._cycle]
        for item in over:
            del self._resting[item]
        if self._cycle % _TIDY_EVERY == 0 and len(self) > _TIDY_ABOVE:
            self._strikes.clear()

    def skips(self, item: str) -> bool:
        """Whether the item rests in this cycle."""
        return item in self._resting

    def failed(self, item: str) -> bool:
        """Note a failure; True when the item rests from now on."""
        strikes = self._strikes.pop(item, 0) + 1
        if strikes < _STRIKES:
            self._strikes[item] = strikes
            return False
        # The cycles after this one are skipped, then the count starts from zero.
        self._resting[item] = self._cycle + _BACKOFF_CYCLES + 1
        return True

    def succeeded(self, item: str) -> None:
        """Forget the item's failures."""
        self._strikes.pop(item, None)

    def __len__(self) -> int:
        return len(self._strikes) + len(self._resting)
