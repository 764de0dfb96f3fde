"""Every execution stands in exactly the indexes that its record demands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.core.ids import ExecutionId, stored_lane
from flowfabric.core.text import lossless, raw, shown
from flowfabric.engine.api.upkeep import Survey
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.calls import as_stored
from flowfabric.scanners.base import ScanResult, Scope, Tally
from flowfabric.scanners.places import Place, Places, calls

log = logging.getLogger(__name__)

_PAGE = 100
# Records of as many lanes make an audit look into the indexes of all of them.
_CROWDED_PAGE = 20
_STRAYS_PAGE = 500
# Reading an entry costs about a tenth of reading a record.
_ENTRIES_PER_EXECUTION = 10
_MAX_PER_CYCLE = 10_000
_AT_REST_PER_CYCLE = 64
_AT_REST_PER_CYCLE_CLUSTER = 32
_READ_AT_REST_PER_CYCLE = 20
_SOUGHT_PER_CYCLE = 512
_SOUGHT_PER_CYCLE_CLUSTER = 32
_FIELDS = ("lifecycle_phase", "eligibility_state", "ownership_state")


class IndexReconciler:
    """Compares executions with their indexes, and repairs drift seen in two cycles running.

    A cheap survey tells whether the indexes of a partition changed since a walk of all of it. Those
    that did are walked again: reading every finished execution over and over would cost more than
    an idle worker may. Of the others, what workers hold is read in every cycle, and the rest
    slowly, in case a record changed and no index did.

    A walk that does not fit into a cycle goes on in the next, and so does the round.

    It also registers partitions and lanes that hold work and were forgotten, because no scanner
    would visit them.
    """

    name = "index_reconciler"

    def __init__(self) -> None:
        self.repaired = 0
        # tag and execution id → the verdict of the last cycle, and the lanes it searched
        self._suspects: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {}
        self._places = Places()
        # whose turn it is among the partitions at rest
        self._turn = 0
        # the first partition of the next part that is searched for unregistered work
        self._sought = 0
        # the partitions surveyed in this cycle
        self._surveyed: list[Place] = []

    async def scan(self, backend: ValkeyBackend, scope: Scope) -> ScanResult:
        """Repair what drifted before and still does, then look at the next part."""
        tally = Tally()
        before, self._suspects, self._surveyed = self._suspects, {}, []
        await self._settle(backend, scope, before, tally)
        found = await self._seek(backend, scope, tally)
        places = {**scope.territory.lanes, **{tag: frozenset[str]() for tag in found}}
        await self._round(backend, scope, places, tally)
        await self._register_lanes(backend, scope, tally)
        return tally.result()

    # --- forgotten places -----------------------------------------------------------

    async def _seek(self, backend: ValkeyBackend, scope: Scope, tally: Tally) -> list[str]:
        """Register what a failover forgot, in the next part of all partitions."""
        cluster = backend.transport.is_cluster
        first, count = self._sought, backend.counts.flow
        end = min(count, first + (_SOUGHT_PER_CYCLE_CLUSTER if cluster else _SOUGHT_PER_CYCLE))
        known = set(scope.territory.tags)
        tags = [tag for i in range(first, end) if (tag := f"{{fp:{i}}}") not in known]
        try:
            lost = await backend.places.occupied_partitions(tags)
            if lost:
                # One that was registered a moment ago is not lost.
                registered = set(await backend.places.used_partitions())
                lost = [tag for tag in lost if tag not in registered]
                await backend.places.register_places(dict.fromkeys(lost, ()))
        except EngineError as error:
            tally.errors += 1
            scope.trouble("partitions not searched", error)
            return []
        self._sought = end % count
        for tag in lost:
            tally.processed += 1
            log.warning(
                "partition %s holds work but was not registered: registered again",
                tag,
                extra={"action": "partition_registered", "scanner": self.name, "partition": tag},
            )
        return lost

    async def _register_lanes(self, backend: ValkeyBackend, scope: Scope, tally: Tally) -> None:
        """Register lanes that have an index, or that records name, and no registry does."""
        here = scope.territory.lanes
        lost = {
            place.tag: lanes
            for place in self._surveyed
            if (lanes := {*place.lanes, *place.named}.difference(here.get(place.tag, ())))
        }
        if not lost:
            return
        try:
            registered = await backend.places.places_in_use()
            lost = {tag: lanes.difference(registered.get(tag, ())) for tag, lanes in lost.items()}
            await backend.places.register_places(lost)
        except EngineError as error:
            tally.errors += 1
            scope.trouble("lanes not registered", error)
            return
        for lane in sorted(set[str]().union(*lost.values())):
            tally.processed += 1
            log.warning(
                "lane %s holds work but was not registered: registered again",
                lane,
                extra={"action": "lane_registered", "scanner": self.name, "lane": lane},
            )

    def _note_lanes(self, place: Place, lanes: Iterable[str]) -> None:
        for lane in lanes:
            try:
                place.named.add(stored_lane(lane, self.name))
            except CorruptionError:
                log.debug("%s is no lane", shown(lane))

    # --- the round ------------------------------------------------------------------

    async def _round(
        self,
        backend: ValkeyBackend,
        scope: Scope,
        lanes: Mapping[str, frozenset[str]],
        tally: Tally,
    ) -> None:
        """Look at partitions until all had their turn, or the cycle has done enough."""
        cluster = backend.transport.is_cluster
        budget = _MAX_PER_CYCLE
        resting: list[Place] = []
        most = _AT_REST_PER_CYCLE_CLUSTER if cluster else _AT_REST_PER_CYCLE
        for group in self._places.round(lanes, apart=cluster):
            if scope.spent() or len(resting) >= most:
                tally.more = len(resting) < most
                self._places.begin_with(group[0].tag)
                break
            surveyed = await self._survey(backend, scope, lanes, group, tally)
            for place in surveyed:
                if scope.spent() or budget <= 0:
                    tally.more = budget > 0
                    self._places.begin_with(place.tag)
                    return
                if scope.thorough or not place.at_rest:
                    budget -= await self._walk(backend, scope, place, budget, tally)
                else:
                    resting.append(place)
                    budget -= await self._audit_live(backend, scope, place, budget, tally)
        if resting and not scope.spent():
            place = resting[self._turn % len(resting)]
            self._turn += 1
            await self._walk(backend, scope, place, _READ_AT_REST_PER_CYCLE, tally)

    async def _survey(
        self,
        backend: ValkeyBackend,
        scope: Scope,
        lanes: Mapping[str, frozenset[str]],
        group: list[Place],
        tally: Tally,
    ) -> list[Place]:
        found: dict[str, list[Survey]] = {}
        try:
            parts = [part for place in group for part in place.parts(lanes[place.tag])]
            for some in calls(parts):
                for survey in await backend.upkeep.survey_indexes(some):
                    found.setdefault(survey.tag, []).append(survey)
                scope.progress()
        except EngineError as error:
            tally.errors += 1
            tags = ",".join(place.tag for place in group)
            scope.trouble("partition not readable", error, partition=tags)
            return []
        for place in group:
            place.take(found[place.tag])
        self._surveyed += group
        return group

    async def _walk(
        self, backend: ValkeyBackend, scope: Scope, place: Place, budget: int, tally: Tally
    ) -> int:
        """Go on with a partition for up to `budget` executions; how many it came to."""
        place.begin()
        done = 0
        while place.under_way and done < budget and not scope.spent():
            try:
                if place.index is None:
                    done += await self._walk_page(backend, scope, place, budget - done, tally)
                else:
                    done += await self._search_page(backend, scope, place, tally)
            except EngineError as error:
                tally.errors += 1
                scope.trouble("partition not audited", error, partition=place.tag)
                if error.retryable:
                    break
                # What is damaged must not hide the rest.
                place.advance()
            scope.progress()
        return max(done, 1)

    async def _walk_page(
        self, backend: ValkeyBackend, scope: Scope, place: Place, room: int, tally: Tally
    ) -> int:
        """Audit the next executions of a partition."""
        size = min(_CROWDED_PAGE if place.crowded else _PAGE, room)
        first = "-" if place.cursor is None else f"({place.cursor}"
        key = keys.index(place.tag, "all_executions")
        ids = await _members(backend, key, first, "+", "BYLEX", "LIMIT", 0, size)
        await self._audit(backend, scope, place, ids, tally)
        if len(ids) < size:
            place.advance()
        else:
            place.cursor = ids[-1]
        return len(ids)

    async def _search_page(
        self, backend: ValkeyBackend, scope: Scope, place: Place, tally: Tally
    ) -> int:
        """Audit the next entries of an index that the list of all executions lacks."""
        key = keys.index(place.tag, place.index or "")
        ids = await _members(backend, key, place.rank, place.rank + _STRAYS_PAGE - 1)
        if ids:
            listed = keys.index(place.tag, "all_executions")
            scores: Any = await backend.transport.call(
                "ZMSCORE", listed, *as_stored(ids), key=listed
            )
            # A crowded partition is searched for entries under wrong lanes here, too.
            strays = [
                each for each, score in zip(ids, scores, strict=True) if score != 0 or place.crowded
            ]
            for start in range(0, len(strays), _PAGE):
                some = strays[start : start + _PAGE]
                await self._audit(backend, scope, place, some, tally, place.index)
        if len(ids) < _STRAYS_PAGE:
            place.advance()
        else:
            place.rank += _STRAYS_PAGE
        return -(-len(ids) // _ENTRIES_PER_EXECUTION)

    async def _audit_live(
        self, backend: ValkeyBackend, scope: Scope, place: Place, budget: int, tally: Tally
    ) -> int:
        """Audit what workers hold: renewals change their entries, and no survey tells."""
        done = 0
        try:
            for name in place.live:
                rank, ids = 0, [""]
                while ids and done < budget and not scope.spent():
                    ids = await _members(
                        backend, keys.index(place.tag, name), rank, rank + _PAGE - 1
                    )
                    await self._audit(backend, scope, place, ids, tally, name)
                    rank += _PAGE
                    done += len(ids)
                    if len(ids) < _PAGE:
                        break
        except EngineError as error:
            tally.errors += 1
            scope.trouble("partition not audited", error, partition=place.tag)
        return done

    # --- verdicts -------------------------------------------------------------------

    async def _audit(
        self,
        backend: ValkeyBackend,
        scope: Scope,
        place: Place,
        ids: list[str],
        tally: Tally,
        index: str | None = None,
    ) -> None:
        accepted = await scope.filter.accepted(backend, ids)
        if not accepted:
            return
        lanes = place.searched(index)
        audit = await backend.upkeep.audit_indexes(place.tag, accepted, lanes, "check")
        self._note_lanes(place, audit.lanes)
        for member, verdict in zip(accepted, audit.verdicts, strict=True):
            if verdict == "orphan" or verdict.startswith("drifted:"):
                self._suspects.setdefault((place.tag, member), (verdict, lanes))
            elif verdict != "consistent":
                tally.errors += 1
                self._warn("audit failed", member, place.tag, verdict)

    async def _settle(
        self,
        backend: ValkeyBackend,
        scope: Scope,
        suspects: dict[tuple[str, str], tuple[str, tuple[str, ...]]],
        tally: Tally,
    ) -> None:
        """Repair what the last cycle saw too."""
        groups: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
        for (tag, member), (verdict, lanes) in suspects.items():
            groups.setdefault((tag, lanes), {})[member] = verdict
        for (tag, lanes), members in groups.items():
            page = _CROWDED_PAGE if self._places[tag].crowded else _PAGE
            for start in range(0, len(members), page):
                part = dict(list(members.items())[start : start + page])
                if tag in scope.territory.lanes and not scope.spent():
                    await self._settle_some(backend, scope, tag, lanes, part, tally)
                else:
                    self._suspect(tag, lanes, part)

    def _suspect(self, tag: str, lanes: tuple[str, ...], verdicts: dict[str, str]) -> None:
        for member, verdict in verdicts.items():
            self._suspects[tag, member] = verdict, lanes

    async def _settle_some(
        self,
        backend: ValkeyBackend,
        scope: Scope,
        tag: str,
        lanes: tuple[str, ...],
        part: dict[str, str],
        tally: Tally,
    ) -> None:
        try:
            audit = await backend.upkeep.audit_indexes(tag, part, lanes, "check")
            drifted: list[str] = []
            for (member, before), now in zip(part.items(), audit.verdicts, strict=True):
                if now == before:
                    drifted.append(member)
                elif now == "orphan" or now.startswith("drifted:"):
                    self._suspect(tag, lanes, {member: now})
            if not drifted:
                return
            states = await asyncio.gather(*(_state(backend, member) for member in drifted))
            repair = await backend.upkeep.audit_indexes(tag, drifted, lanes, "repair")
        except EngineError as error:
            tally.errors += 1
            scope.trouble("repair failed", error, partition=tag)
            self._suspect(tag, lanes, part)
            return
        for member, state, answer in zip(drifted, states, repair.verdicts, strict=True):
            self._repaired(tag, member, part[member], answer, state, tally)

    def _repaired(
        self,
        tag: str,
        member: str,
        verdict: str,
        answer: str,
        state: dict[str, str | None],
        tally: Tally,
    ) -> None:
        if answer == "consistent":
            return
        if answer != "orphan_removed" and not answer.startswith("repaired:"):
            tally.errors += 1
            self._warn("repair failed", member, tag, answer)
            return
        self.repaired += 1
        tally.processed += 1
        log.warning(
            "index of %s repaired: %s",
            shown(member),
            answer,
            extra={
                "action": "index_repaired",
                "scanner": self.name,
                "partition": tag,
                "execution_id": shown(member),
                "expected_index": verdict.removeprefix("drifted:").partition(" ")[0],
                "repair": answer,
                "lifecycle": state["lifecycle_phase"],
                "eligibility": state["eligibility_state"],
                "ownership": state["ownership_state"],
            },
        )

    def _warn(self, what: str, member: str, tag: str, error: str) -> None:
        log.warning(
            "%s: %s: %s",
            self.name,
            what,
            error,
            extra={
                "action": "scanner_failure",
                "scanner": self.name,
                "execution_id": shown(member),
                "partition": tag,
                "error": error,
            },
        )


async def _members(backend: ValkeyBackend, key: str, *span: str | int) -> list[str]:
    """Part of an index, malformed members as they are."""
    name = raw(key)
    found: Any = await backend.transport.call("ZRANGE", name, *as_stored(span), key=name)
    return [lossless(member) for member in found]


async def _state(backend: ValkeyBackend, member: str) -> dict[str, str | None]:
    try:
        return await backend.reads.read_exec_core_fields(ExecutionId.parse(member), _FIELDS)
    except EngineError:
        return dict.fromkeys(_FIELDS)
