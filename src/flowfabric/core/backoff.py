"""How long to wait before repeating a failed call."""

import random


def jittered(seconds: float) -> float:
    """The pause, reduced by up to half at random, so that clients do not retry all at once."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret


class Backoff:
    """Pauses between tries: each is twice as long as the one before, up to a limit."""

    __slots__ = ("_first_s", "_last_s", "_next_s")

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._last_s = last_s

    def next_s(self) -> float:
        """The next pause."""
        pause_s = self._next_s
        self._next_s = min(pause_s * 2, self._last_s)
        return pause_s

    def jittered_s(self) -> float:
        """The next pause, reduced by up to half at random."""
        return jittered(self.next_s())

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._next_s = self._first_s
