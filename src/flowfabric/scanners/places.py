"""What the reconciler knows of each partition, and how far it has come there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flowfabric.core import keys
from flowfabric.engine.upkeep import Survey

__all__ = ["Place", "Places"]

# What one survey may cover, so that it never holds the server for long.
_AT_ONCE_EXECUTIONS = 600
_AT_ONCE_INDEXES = 4000
_AT_ONCE_PARTITIONS = 32
_AT_ONCE_LANES = 256
_INDEXES_OF_LANE = 14
# A survey looks no closer at more than this; a partition not yet seen counts as such.
_MANY = 500
# What a lane may have that holds no executions.
_NO_IDS = (":sigs", ":config")


class Place:
    """One partition. A walk visits all its executions, then the other indexes for strays."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.names: tuple[str, ...] = ()
        """The indexes that exist, after `ff:idx:T:`."""
        self.executions = _MANY
        self.looks = ""
        """Of the last survey."""
        self.cursor: str | None = None
        """The execution after which the walk goes on."""
        self.rank = 0
        """The rank in the present index at which the search for strays goes on."""
        self.lanes: tuple[str, ...] = ()
        """The lanes that have an index here."""
        self.named: set[str] = set()
        """Lanes that records named here, not too many."""
        # The indexes still to be searched; None while the executions are walked.
        self._left: list[str] | None = None
        # How it looked when the walk under way began, and before the last that came to its end.
        self._begun: str | None = None
        self._clean: str | None = None

    def take(self, survey: Survey) -> None:
        """Take over what a survey found."""
        self.names, self.executions, self.looks = survey.names, survey.executions, survey.looks
        parts = {name.split(":")[1] for name in self.names if name.startswith("lane:")}
        self.lanes = tuple(sorted(map(keys.lane_of, parts)))

    @property
    def at_rest(self) -> bool:
        """Whether it looks as before its last walk: what that found is known."""
        return self._clean == self.looks

    @property
    def under_way(self) -> bool:
        """Whether a walk is to go on."""
        return self._begun is not None

    @property
    def index(self) -> str | None:
        """The index that is searched for strays; None while the executions are walked."""
        return self._left[0] if self._left else None

    @property
    def live(self) -> list[str]:
        """Where the executions that workers hold stand."""
        return [name for name in self.names if name.endswith(":active")]

    def note(self, lane: str) -> None:
        """A record named this lane."""
        if len(self.named) < _AT_ONCE_LANES:
            self.named.add(lane)

    def begin(self) -> None:
        """Begin a walk, unless one is under way.

        One that began at rest does not count for a partition that has changed since.
        """
        if self._begun is None or (self._begun == self._clean and not self.at_rest):
            self._begun, self._left, self.cursor, self.rank = self.looks, None, None, 0

    def advance(self) -> None:
        """The executions, or the present index, are done."""
        self.rank, self.cursor = 0, None
        if self._left is None:
            self._left = [name for name in self.names if not name.endswith(_NO_IDS)]
        else:
            self._left.pop(0)
        if not self._left:
            self._left = None
            self._clean, self._begun = self._begun, None


class Places:
    """All partitions, each in its turn."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        # The partition that the next round begins with.
        self._next = ""
        # The lane after which those begin that the next round looks for.
        self._last_lane = ""

    def __getitem__(self, tag: str) -> Place:
        return self._places.setdefault(tag, Place(tag))

    def begin_with(self, tag: str) -> None:
        """Let the next round begin there."""
        self._next = tag

    def lanes(self, lanes: Iterable[str]) -> list[str]:
        """The lanes whose indexes this round looks for: all, or the next so many of very many."""
        order = sorted(set(lanes), key=lambda lane: (lane <= self._last_lane, lane))
        if len(order) <= _AT_ONCE_LANES:
            return order
        self._last_lane = order[_AT_ONCE_LANES - 1]
        return order[:_AT_ONCE_LANES]

    def round(self, tags: Iterable[str], lanes: int, *, apart: bool) -> Iterator[list[Place]]:
        """Every partition once, from where the last round stopped, in groups that one call covers.

        `apart` is for clusters, where no call covers two.
        """
        order = sorted(set(tags), key=lambda tag: (tag < self._next, tag))
        most = min(_AT_ONCE_PARTITIONS, _AT_ONCE_INDEXES // (_INDEXES_OF_LANE * (lanes + 1)))
        group: list[Place] = []
        size = 0
        for tag in order:
            if group and (apart or len(group) >= most or size >= _AT_ONCE_EXECUTIONS):
                yield group
                group, size = [], 0
            group.append(self[tag])
            size += min(self[tag].executions, _MANY)
        if group:
            yield group
