"""Doorbells: how an idle worker learns that there is work, and how to ring for it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

WorkPlace = tuple[str, str]
"""A lane and the tag of a partition that may hold work of it."""


class Doorbell(Protocol):
    """Hears the rings of some lanes. Rings may be lost, so listeners also sweep now and then."""

    heard_by_all: bool
    """Whether every listener hears a ring. Otherwise one does, and rings again for others."""

    async def wait(self, timeout_s: float) -> list[WorkPlace]: ...  # Empty: nothing in time.
    async def peek(self) -> list[WorkPlace]: ...  # What rings now, left ringing for others.
    async def aclose(self) -> None: ...


class Wakeups(Protocol):
    """Doorbells: waiting for work, looking for it, and ringing."""

    def listen(self, lanes: Iterable[str]) -> Doorbell: ...  # It connects at the first wait.

    async def find_work(self, lane_id: str, tags: Sequence[str]) -> list[str]:
        """Those that may hold claimable work of the lane; all of them in a cluster."""
        ...

    async def ring_waiting(self, lanes: Mapping[str, Sequence[str]]) -> int:
        """Ring for the lanes that hold claimable work, then raise what failed; returns how many."""
        ...
