"""What the reconciler knows of each partition, and how far it has come there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from flowfabric.engine.api.upkeep import Survey, SurveyPart
from flowfabric.engine.valkey import keys

# What one survey may cover, so that it never holds the server for long.
_AT_ONCE_EXECUTIONS = 600
_AT_ONCE_PARTITIONS = 32
_AT_ONCE_LANES = 64
_LANES_PER_PART = 4
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
        """Lanes that records named here since the last survey."""
        # The indexes still to be searched; None while the executions are walked.
        self._left: list[str] | None = None
        # How it looked when the walk under way began, and before the last that came to its end.
        self._begun: str | None = None
        self._clean: str | None = None

    def parts(self, lanes: Iterable[str]) -> list[SurveyPart]:
        """What to survey, in parts of which one call can cover each."""
        known: dict[str, list[str]] = {}
        for name in self.names:
            known.setdefault(_lane_of(name), []).append(name)
        order = sorted({*lanes, *self.named, *known} - {""})
        parts: list[SurveyPart] = []
        # The first part covers the partition's own indexes, too.
        for start in range(0, max(1, len(order)), _LANES_PER_PART):
            chunk = order[start : start + _LANES_PER_PART]
            names = [n for lane in ("", *chunk) if lane or not start for n in known.get(lane, ())]
            parts.append(SurveyPart(self.tag, chunk, names, whole=not start))
        return parts

    def take(self, surveys: Sequence[Survey]) -> None:
        """Take over what the surveys of all parts found."""
        self.names = tuple(name for survey in surveys for name in survey.names)
        self.executions = sum(survey.executions for survey in surveys)
        self.looks = " ".join(survey.looks for survey in surveys)
        self.lanes = tuple(sorted({_lane_of(name) for name in self.names} - {""}))
        self.named.clear()

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

    def searched(self, index: str | None = None) -> tuple[str, ...]:
        """The lanes in which an audit looks for entries that do not belong there.

        Of very many only that of the index whose entries are audited: all have their turn.
        """
        if len(self.lanes) <= _AT_ONCE_LANES:
            return self.lanes
        lane = _lane_of(index or "")
        return (lane,) if lane else ()

    @property
    def crowded(self) -> bool:
        """Whether audits cannot look into all lanes at once."""
        return len(self.lanes) > _AT_ONCE_LANES

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

    def __getitem__(self, tag: str) -> Place:
        return self._places.setdefault(tag, Place(tag))

    def begin_with(self, tag: str) -> None:
        """Let the next round begin there."""
        self._next = tag

    def round(self, lanes: Mapping[str, Collection[str]], *, apart: bool) -> Iterator[list[Place]]:
        """Every partition once, from where the last round stopped, in groups that one call covers.

        One with very many lanes is a group of its own and takes several calls. `apart` is for
        clusters, where no call covers two.
        """
        group: list[Place] = []
        executions = named = 0
        for tag in sorted(lanes, key=lambda tag: (tag < self._next, tag)):
            named += len(lanes[tag])
            full = len(group) >= _AT_ONCE_PARTITIONS or executions >= _AT_ONCE_EXECUTIONS
            if group and (apart or full or named > _AT_ONCE_LANES):
                yield group
                group, executions, named = [], 0, len(lanes[tag])
            group.append(self[tag])
            executions += min(self[tag].executions, _MANY)
        if group:
            yield group


def calls(parts: Sequence[SurveyPart]) -> list[list[SurveyPart]]:
    """The parts that one call covers together."""
    groups: list[list[SurveyPart]] = []
    lanes = 0
    for part in parts:
        lanes += len(part.lanes)
        if not groups or lanes > _AT_ONCE_LANES:
            groups.append([])
            lanes = len(part.lanes)
        groups[-1].append(part)
    return groups


def _lane_of(index: str) -> str:
    """The lane of an index, empty for those of the partition."""
    return keys.lane_of(index.split(":")[1]) if index.startswith("lane:") else ""
