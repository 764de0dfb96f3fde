"""Where work waits: lanes with their settings, what is in use, and doorbells that ring for it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from flowfabric.core.capabilities import Offer
from flowfabric.engine.api.concern import Concern

WorkPlace = tuple[str, str]
"""A lane and the tag of a partition that may hold work of it."""


LANE_STATES = ("active", "paused", "draining", "disabled")
CLOSED_STATES = ("paused", "disabled")
"""A lane in one of these gives out nothing."""
PLACEMENTS = ("pinned", "spread")


class LaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a lane; the defaults are those of a new lane."""

    lane_id: str
    state: str = "active"
    reason: str = ""
    changed_at: int | None = None
    """When the state was last set, in ms."""
    placement: str = "pinned"
    """`pinned`: all executions outside flows are created on the lane's home partition. `spread`:
    on `shards` partitions."""
    shards: int = 256
    priority_weight_ms: int = 10**12
    """How much waiting time one point of priority is worth."""
    reclaim_grace_ms: int = 0
    emit_renewals: bool = False


class LaneDetail(LaneSettings, frozen=True, kw_only=True):
    """A lane's settings, and how many executions it has in each state."""

    counts: dict[str, int]
    """By `eligible`, `delayed`, `active`, `reclaimable`, `suspended`, `terminal`, `blocked_…`.

    What no live worker can take counts as `blocked_route`, not as `eligible`."""


class LaneLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a lane that one partition holds."""

    lane_id: str
    waiting: int
    """Executions that a worker may take now."""
    active: int


class PartitionLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The work that a partition holds."""

    partition: int
    waiting: int
    active: int
    lanes: tuple[LaneLoad, ...]
    """The lanes with work there, busiest first."""


class Lanes(Concern, Protocol):
    """Lanes and their settings."""

    async def list_lanes(self, cursor: str = "", limit: int = 1000) -> tuple[list[str], str | None]:
        """Registered lanes by name after `cursor`, and the next cursor if more follow."""
        ...

    async def get_lane(self, lane_id: str) -> LaneDetail:
        """Settings and counts; raises `lane_not_found` for a name that was never used."""
        ...

    async def read_settings(self, lanes: Iterable[str]) -> list[LaneSettings]:
        """The settings of each lane; the defaults for a name that was never used."""
        ...

    async def busiest_partitions(self, limit: int = 20) -> list[PartitionLoad]:
        """The partitions with the most waiting and running work, busiest first; none without."""
        ...

    async def set_lane_state(self, lane_id: str, state: str, reason: str = "") -> str:
        """Pause, drain, disable or re-activate a lane; returns the state it had."""
        ...

    async def set_lane_config(
        self,
        lane_id: str,
        *,
        placement: str | None = None,
        shards: int | None = None,
        priority_weight_ms: int | None = None,
        reclaim_grace_ms: int | None = None,
        emit_renewals: bool | None = None,
    ) -> None:
        """Change a lane's settings. Without any, raises `invalid_input`.

        A new placement applies to new executions. A new weight changes the order of what waits in
        the background.
        """
        ...


class Places(Concern, Protocol):
    """Which lanes, partitions and namespaces are in use. Malformed entries are logged once."""

    known_places: dict[str, set[str]]
    """The lanes of each partition that this process uses or has seen in use."""
    known_namespaces: set[str]

    async def register_places(self, places: Mapping[str, Iterable[str]]) -> None:
        """Make sure that scanners visit these lanes of these partitions.

        Raises `lane_limit_exceeded` for new lanes when the registry is full; registers the others.
        """
        ...

    async def learn_lane(self, lane_id: str) -> None:
        """Make sure that `shards` is known; registers a lane that this process has not used."""
        ...

    def shards(self, lane_id: str) -> int:
        """Over how many partitions new executions of the lane are spread, as far as known; or 1."""
        ...

    async def register_again(self) -> None:
        """Register everything this process uses, even what the server still has."""
        ...

    async def lanes_by_partition(self) -> dict[str, frozenset[str]]:
        """The tag of every registered partition with the lanes registered there, in order."""
        ...

    async def used_partitions(self) -> list[str]:
        """The tags of partitions that hold or held work."""
        ...

    async def occupied_partitions(self, tags: Sequence[str]) -> list[str]:
        """The given partitions that hold executions, registered or not."""
        ...

    async def lanes_in_use(self) -> list[str]:
        """Registered lanes, in order."""
        ...

    async def namespaces_in_use(self) -> list[str]:
        """Registered namespaces, in order."""
        ...


class Doorbell(Protocol):
    """Hears the rings of some lanes. Rings may be lost, so listeners also sweep now and then.

    One listener hears a ring. If it cannot take the work, it rings again for others.
    """

    sweep_width: int
    """How many partitions per lane to look at when it stays silent, so that idling is cheap."""
    many_servers: bool
    """Whether a partition may be out of reach while others are not."""

    def hear(self, offer: Offer) -> None:
        """From the next wait on, hear only the rings for work that a worker may take."""
        ...

    async def wait(self, timeout_s: float) -> list[WorkPlace]: ...  # Empty: nothing in time.
    async def peek(self) -> list[WorkPlace]: ...  # What rings now, left ringing for others.
    async def aclose(self) -> None: ...


class Wakeups(Protocol):
    """Doorbells: waiting for work, looking for it, and ringing."""

    def listen(self, lanes: Iterable[str]) -> Doorbell: ...  # It connects at the first wait.

    async def find_work(self, places: Sequence[WorkPlace], likely: int = 1) -> list[WorkPlace]:
        """Those that may hold claimable work.

        One command tells that none does; in a cluster, it takes one for each. `likely`: how many of
        the first to ask about apart.
        """
        ...

    async def ring_waiting(self, lanes: Mapping[str, Sequence[str]]) -> int:
        """Ring for the lanes that hold claimable work, then raise what failed; returns how many."""
        ...
