"""What a run is asked to do, and how it tells how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

Aof = Literal["no", "everysec", "always"]

Figures = Mapping[str, float]
"""The measured values of one run by key."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one run of a scenario."""

    n: int
    aof: Aof = "no"
    unbatched: bool = False
    with_floor: bool = False
    workers: int = 100
    """How many idle workers make the crowd of `idle`, and tails that of `stream`."""
    seconds: float = 5.0
    """How long `idle` counts commands."""


class Progress(Protocol):
    """Shows a person what goes on."""

    def begin(self, what: str, total: int) -> None:
        """A phase of so many steps starts; it replaces the one before."""
        ...

    def advance(self, steps: int = 1) -> None:
        """So many steps of the phase are done."""
        ...
