"""Keeps executions in exactly the indexes that their records demand."""

import asyncio
import logging
from dataclasses import dataclass, field

from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.core.ids import stored_id, stored_lane
from flowfabric.core.text import shown
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import ALL_EXECUTIONS, Index, Survey, SurveyRequest
from flowfabric.scanners.base import Cycle, report
from flowfabric.scanners.watch import Territory

log = logging.getLogger(__name__)

_PAGE = 100
# Records of many lanes make an audit look into the indexes of each of them.
_CROWDED_PAGE = 20
_STRAYS_PAGE = 500
# Reading an entry costs about a tenth of reading a record.
_ENTRIES_PER_EXECUTION = 10
_MAX_PER_CYCLE = 10_000
_SURVEYED_AT_ONCE = 32
_AT_REST_PER_CYCLE = 64
_READ_AT_REST_PER_CYCLE = 20
_SOUGHT_PER_CYCLE = 64
_MAX_LANES_SEARCHED = 64
_WITHOUT_IDS = frozenset({"sigs", "config"})
_FIELDS = ("lifecycle_phase", "eligibility_state", "ownership_state")

Suspects = dict[tuple[str, tuple[str, ...]], dict[str, str]]
"""By partition and lanes that were searched: the verdict on each execution id."""


@dataclass
class PartitionWalk:
    """Visits all executions of a partition, then the other indexes for entries nobody lists."""

    tag: str
    indexes: tuple[Index, ...] = ()
    """Those that the last survey found."""
    lanes: tuple[str, ...] = ()
    named_lanes: set[str] = field(default_factory=set[str])
    """Lanes that records named since the last survey."""
    rank: int = 0
    """Where the walk continues in the present index."""
    _left: list[Index] = field(default_factory=list[Index])
    _fingerprint: str = ""
    # The fingerprints at the start of this walk, and of the last that was finished.
    _begun: str | None = None
    _clean: str | None = None

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
    def is_crowded(self) -> bool:
        """Whether there are too many lanes to search all of them at once."""
        return len(self.lanes) > _MAX_LANES_SEARCHED

    @property
    def page(self) -> int:
        return _CROWDED_PAGE if self.is_crowded else _PAGE

    def lanes_to_search(self, index: Index) -> tuple[str, ...]:
        """Where an audit of this index's members looks for entries under a wrong lane."""
        # In a crowded partition, each lane has its turn.
        if not self.is_crowded:
            return self.lanes
        return (index.lane,) if index.lane else ()

    def begin(self) -> None:
        """Start a walk, or continue the one under way."""
        # A walk that started at rest starts again if the partition has changed since.
        if not self._left or (self._begun == self._clean and not self.at_rest):
            self._begun, self.rank = self._fingerprint, 0
            others = [index for index in self.indexes if index.name not in _WITHOUT_IDS]
            self._left = [Index(self.tag, ALL_EXECUTIONS), *others]

    def advance(self) -> None:
        self.rank = 0
        self._left.pop(0)
        if not self._left:
            self._clean = self._begun


class IndexReconciler:
    """Compares executions with their indexes, and repairs drift seen in two consecutive cycles.

    A cheap survey tells whether the indexes of a partition changed since the last walk over it.
    Only partitions that changed are walked again: reading every finished execution over and over
    would cost more than an idle worker may. In the others it reads what workers hold in every
    cycle, and the rest slowly, in case a record changed and no index did.

    A walk that does not fit into a cycle continues in the next, as does the round over partitions.
    It also registers forgotten partitions and lanes that hold work: no scanner visits them.
    """

    name = "index_reconciler"

    def __init__(self) -> None:
        self.repaired = 0
        self._suspects: Suspects = {}
        self._walks: dict[str, PartitionWalk] = {}
        self._surveyed: list[PartitionWalk] = []
        # The partitions with which the next round, slow read and search begin.
        self._next_tag = ""
        self._next_at_rest = 0
        self._next_sought = 0

    async def scan(self, cycle: Cycle) -> None:
        suspects, self._suspects, self._surveyed = self._suspects, {}, []
        await self._settle(cycle, suspects)
        found = await self._register_partitions(cycle)
        await self._round(cycle, {**cycle.territory, **dict.fromkeys(found, frozenset[str]())})
        await self._register_lanes(cycle)

    async def _register_partitions(self, cycle: Cycle) -> list[str]:
        """Register partitions that hold work and that a failover forgot, some in each cycle."""
        places, count = cycle.backend.places, cycle.backend.counts.flow
        first = 0 if cycle.thorough else self._next_sought
        end = count if cycle.thorough else min(count, first + _SOUGHT_PER_CYCLE)
        tags = [tag for i in range(first, end) if (tag := f"{{fp:{i}}}") not in cycle.territory]
        lost: list[str] = []
        with cycle.surviving("could not search for partitions"):
            found = await places.occupied_partitions(tags)
            if found:
                # One may have been registered a moment ago.
                registered = await places.used_partitions()
                found = [tag for tag in found if tag not in registered]
                await places.register_places(dict.fromkeys(found, ()))
            lost, self._next_sought = found, end % count
        for tag in lost:
            self._registered(cycle, "partition", tag)
        return lost

    async def _register_lanes(self, cycle: Cycle) -> None:
        """Register lanes that have an index, or that records name."""
        places, lost = cycle.backend.places, dict[str, set[str]]()
        for walk in self._surveyed:
            lanes = {*walk.lanes, *walk.named_lanes}.difference(cycle.territory.get(walk.tag, ()))
            if lanes:
                lost[walk.tag] = lanes
        if not lost:
            return
        with cycle.surviving("could not register lanes"):
            registered = await places.lanes_by_partition()
            lost = {tag: lanes.difference(registered.get(tag, ())) for tag, lanes in lost.items()}
            await places.register_places(lost)
            for lane in sorted(set[str]().union(*lost.values())):
                self._registered(cycle, "lane", lane)

    def _registered(self, cycle: Cycle, what: str, name: str) -> None:
        cycle.processed += 1
        message = f"registered {what} {name} again: it holds work"
        report(logging.WARNING, self.name, f"{what}_registered", message, **{what: name})

    async def _round(self, cycle: Cycle, territory: Territory) -> None:
        """Look at partitions until all had their turn, or the cycle has done enough."""
        order = sorted(territory, key=lambda tag: (tag < self._next_tag, tag))
        budget, resting = _MAX_PER_CYCLE, list[PartitionWalk]()
        for start in range(0, len(order), _SURVEYED_AT_ONCE):
            tags = order[start : start + _SURVEYED_AT_ONCE]
            if len(resting) >= _AT_REST_PER_CYCLE or cycle.out_of_time():
                self._next_tag = tags[0]
                break
            for walk in await self._survey(cycle, territory, tags):
                if budget <= 0 or cycle.out_of_time():
                    self._next_tag = walk.tag
                    return
                if cycle.thorough or not walk.at_rest:
                    budget -= await self._walk(cycle, walk, budget)
                else:
                    resting.append(walk)
                    budget -= await self._audit_active(cycle, walk, budget)
        if resting and not cycle.out_of_time():
            self._next_at_rest += 1
            walk = resting[self._next_at_rest % len(resting)]
            await self._walk(cycle, walk, _READ_AT_REST_PER_CYCLE)

    async def _survey(
        self, cycle: Cycle, territory: Territory, tags: list[str]
    ) -> list[PartitionWalk]:
        walks = [self._walks.setdefault(tag, PartitionWalk(tag)) for tag in tags]
        with cycle.surviving("could not survey partitions", partition=",".join(tags)):
            requests = [
                SurveyRequest(walk.tag, [*territory[walk.tag], *walk.named_lanes], walk.indexes)
                for walk in walks
            ]
            surveys = await cycle.backend.upkeep.survey_indexes(requests)
            cycle.progress()
            for walk, survey in zip(walks, surveys, strict=True):
                walk.take(survey)
            self._surveyed += walks
            return walks
        return []

    async def _walk(self, cycle: Cycle, walk: PartitionWalk, budget: int) -> int:
        """Continue with a partition for up to `budget` executions; returns how many it read."""
        walk.begin()
        done, loop = 0, asyncio.get_running_loop()
        while walk.index is not None and done < budget and not cycle.out_of_time():
            began = loop.time()
            try:
                done += await self._walk_page(cycle, walk, walk.index, budget - done)
            except EngineError as error:
                cycle.failed("could not audit the partition", error, partition=walk.tag)
                if error.retryable:
                    break
                # What is damaged must not hide the rest.
                walk.advance()
            cycle.progress()
            await cycle.rest(loop.time() - began)
        return max(done, 1)

    async def _walk_page(self, cycle: Cycle, walk: PartitionWalk, index: Index, room: int) -> int:
        """Audit the next executions of a partition, or the next strays in one of its indexes."""
        upkeep, listed = cycle.backend.upkeep, index.name == ALL_EXECUTIONS
        size = min(walk.page, room) if listed else _STRAYS_PAGE
        ids = found = await upkeep.list_index(index, walk.rank, size)
        # A crowded partition is searched for entries under a wrong lane here.
        if not listed and not walk.is_crowded:
            ids = await upkeep.unlisted(walk.tag, found)
        for start in range(0, len(ids), _PAGE):
            await self._audit(cycle, walk, index, ids[start : start + _PAGE])
        walk.rank += len(found)
        if len(found) < size:
            walk.advance()
        return len(found) if listed else -(-len(found) // _ENTRIES_PER_EXECUTION)

    async def _audit_active(self, cycle: Cycle, walk: PartitionWalk, budget: int) -> int:
        """Audit what workers hold: renewals change those entries, but not the fingerprint."""
        done = 0
        with cycle.surviving("could not audit the partition", partition=walk.tag):
            for index in (index for index in walk.indexes if index.name == "active"):
                rank, more = 0, True
                while more and done < budget and not cycle.out_of_time():
                    ids = await cycle.backend.upkeep.list_index(index, rank, _PAGE)
                    await self._audit(cycle, walk, index, ids)
                    rank += _PAGE
                    done += len(ids)
                    more = len(ids) == _PAGE
        return done

    async def _audit(self, cycle: Cycle, walk: PartitionWalk, index: Index, ids: list[str]) -> None:
        upkeep = cycle.backend.upkeep
        accepted = await cycle.where.accepted(cycle.backend, ids)
        if not accepted:
            return
        lanes = walk.lanes_to_search(index)
        audit = await upkeep.audit_indexes(walk.tag, accepted, lanes, "check")
        for lane in audit.lanes:
            try:
                walk.named_lanes.add(stored_lane(lane, self.name))
            except CorruptionError:
                log.debug("%s is not a lane", shown(lane))
        for member, verdict in zip(accepted, audit.verdicts, strict=True):
            if _is_drift(verdict):
                self._suspects.setdefault((walk.tag, lanes), {}).setdefault(member, verdict)
            elif verdict != "consistent":
                self._item_failed(cycle, "could not audit", walk.tag, member, verdict)

    async def _settle(self, cycle: Cycle, suspects: Suspects) -> None:
        """Repair what the last cycle saw too."""
        for (tag, lanes), verdicts in suspects.items():
            found, page = list(verdicts.items()), self._walks[tag].page
            for start in range(0, len(found), page):
                left = before = dict(found[start : start + page])
                if tag in cycle.territory and not cycle.out_of_time():
                    with cycle.surviving("could not repair", partition=tag):
                        left = await self._settle_some(cycle, tag, lanes, before)
                self._suspects.setdefault((tag, lanes), {}).update(left)

    async def _settle_some(
        self, cycle: Cycle, tag: str, lanes: tuple[str, ...], before: dict[str, str]
    ) -> dict[str, str]:
        """Repair what drifted as before; returns what drifted in another way."""
        upkeep = cycle.backend.upkeep
        audit = await upkeep.audit_indexes(tag, before, lanes, "check")
        now = dict(zip(before, audit.verdicts, strict=True))
        drifted = [member for member, verdict in now.items() if verdict == before[member]]
        left = {m: v for m, v in now.items() if v != before[m] and _is_drift(v)}
        if not drifted:
            return left
        states = await asyncio.gather(*(_state(cycle.backend, member) for member in drifted))
        repair = await upkeep.audit_indexes(tag, drifted, lanes, "repair")
        for member, state, answer in zip(drifted, states, repair.verdicts, strict=True):
            if answer == "orphan_removed" or answer.startswith("repaired:"):
                self.repaired += 1
                cycle.processed += 1
                expected = before[member].removeprefix("drifted:").partition(" ")[0]
                message = f"repaired the index of {shown(member)}: {answer}"
                fields = {"execution_id": shown(member), "expected_index": expected, **state}
                fields |= {"partition": tag, "repair": answer}
                report(logging.WARNING, self.name, "index_repaired", message, **fields)
            elif answer != "consistent":
                self._item_failed(cycle, "could not repair", tag, member, answer)
        return left

    def _item_failed(self, cycle: Cycle, what: str, tag: str, member: str, error: str) -> None:
        cycle.errors += 1
        fields = {"partition": tag, "execution_id": shown(member), "error": error}
        report(logging.WARNING, self.name, "scanner_failure", f"{what}: {error}", **fields)


def _is_drift(verdict: str) -> bool:
    return verdict == "orphan" or verdict.startswith("drifted:")


async def _state(backend: Backend, member: str) -> dict[str, str | None]:
    """The state of an execution, as log fields."""
    try:
        found = await backend.reads.read_exec_core_fields(stored_id(member, "index"), _FIELDS)
    except EngineError:
        found = dict.fromkeys(_FIELDS)
    return {name.partition("_")[0]: found[name] for name in _FIELDS}
