"""How far the index reconciler has come in a partition."""

from __future__ import annotations

from collections.abc import Iterable

from flowfabric.engine.api.upkeep import ALL_EXECUTIONS, Index, Survey, SurveyRequest

_MAX_LANES_SEARCHED = 64
_WITHOUT_IDS = frozenset({"sigs", "config"})


class PartitionWalk:
    """Visits all executions of a partition, then the other indexes for entries nobody lists."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.indexes: tuple[Index, ...] = ()
        """Those that the last survey found."""
        self.lanes: tuple[str, ...] = ()
        """The lanes of these indexes."""
        self.named_lanes: set[str] = set()
        """Lanes that records named since the last survey."""
        self.rank = 0
        """Where the walk continues in the present index."""
        self._left: list[Index] = []
        self._fingerprint = ""
        # The fingerprints at the start of this walk, and of the last that was finished.
        self._begun: str | None = None
        self._clean: str | None = None

    def request(self, lanes: Iterable[str]) -> SurveyRequest:
        return SurveyRequest(self.tag, [*lanes, *self.named_lanes], self.indexes)

    def take(self, survey: Survey) -> None:
        self.indexes = survey.indexes
        self.lanes = tuple(sorted({index.lane for index in survey.indexes} - {""}))
        self.named_lanes.clear()
        self._fingerprint = survey.fingerprint

    @property
    def at_rest(self) -> bool:
        """Whether nothing changed since the last walk."""
        return self._clean == self._fingerprint

    @property
    def index(self) -> Index | None:
        """The index to read next; None at the end of the walk."""
        return self._left[0] if self._left else None

    @property
    def active(self) -> list[Index]:
        """The indexes of executions that workers hold."""
        return [index for index in self.indexes if index.name == "active"]

    @property
    def is_crowded(self) -> bool:
        """Whether there are too many lanes to search all of them at once."""
        return len(self.lanes) > _MAX_LANES_SEARCHED

    def lanes_to_search(self, index: Index) -> tuple[str, ...]:
        """Where an audit of this index's members looks for entries under a wrong lane.

        In a crowded partition only in the index's own lane: each lane has its turn.
        """
        if not self.is_crowded:
            return self.lanes
        return (index.lane,) if index.lane else ()

    def begin(self) -> None:
        """Start a walk, or continue the one under way.

        A walk that started at rest starts again if the partition has changed since.
        """
        if not self._left or (self._begun == self._clean and not self.at_rest):
            self._begun, self.rank = self._fingerprint, 0
            others = [index for index in self.indexes if index.name not in _WITHOUT_IDS]
            self._left = [Index(self.tag, ALL_EXECUTIONS), *others]

    def advance(self) -> None:
        """Continue with the next index."""
        self.rank = 0
        self._left.pop(0)
        if not self._left:
            self._clean = self._begun
