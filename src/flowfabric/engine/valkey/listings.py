"""Listing executions, page by page."""

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from flowfabric.core.capabilities import signature_parts
from flowfabric.core.contracts.executions import ExecutionPage, ExecutionSummary
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import ExecutionId, is_execution_id, validate_lane, validate_lanes
from flowfabric.core.text import lossless, raw
from flowfabric.engine.api import check
from flowfabric.engine.api.reads import Filter, Listings
from flowfabric.engine.api.workers import Workers, no_worker_for
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.lane_reads import LANE_STATES, LaneReads, Place
from flowfabric.engine.valkey.pages import Damage, given_cursor, opened, reading_cursor, sealed
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.engine.valkey.record import Record
from flowfabric.engine.valkey.score_indexes import ScoreIndexes
from flowfabric.valkey.transport import Arg

_MAX_PAGE = 1000
# These have one index per set of required capabilities. Executions that no live worker can take are
# in `eligible` indexes like the rest, but are listed and counted as blocked by their route.
_BY_SIGNATURE = {
    "eligible": keys.eligible,
    "reclaimable": keys.reclaimable,
    "blocked_route": keys.eligible,
}
_ROUTE = "blocked_route"
_CHUNK = 200
_MAX_EXAMINED = 10_000

LaneSignature = tuple[str, str]


class ValkeyListings(Listings):
    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces, workers: Workers) -> None:
        self._calls = calls
        self._places = places
        self._workers = workers
        self._lane_reads = LaneReads(calls, places)
        self._scores = ScoreIndexes(calls)

    async def list_executions(
        self,
        *,
        partition: int | None = None,
        cursor: str = "",
        limit: int = 50,
        where: Filter | None = None,
    ) -> ExecutionPage:
        if partition is not None:
            check.partition(partition, self._calls.counts)
        limit = min(check.whole(limit, "limit"), _MAX_PAGE)
        given_cursor(cursor)
        if where is not None:
            check.instance(where, Filter, "where").validate()
        position, after = self._start(partition, cursor)
        if limit <= 0:
            return ExecutionPage(())
        chunk = _CHUNK if where else min(limit + 1, _CHUNK)
        damage = Damage("list_executions")
        rows: list[ExecutionSummary] = []
        examined = 0
        used = await self._places.partitions_in_use() if partition is None else [partition]
        for index in (each for each in used if each >= position):
            start: str | None = after
            while start is not None:
                ids, start = await self._ids(index, start, chunk, damage)
                found = await damage.keep_all(self._row(each, where) for each in ids)
                for member, row in zip(ids, found, strict=True):
                    if len(rows) == limit or examined == _MAX_EXAMINED:
                        more = after if partition is not None else sealed(index, after)
                        return ExecutionPage(tuple(rows), more, tuple(damage.found))
                    examined += 1
                    after = member
                    if row is not None:
                        rows.append(row)
            after = ""
        return ExecutionPage(tuple(rows), None, tuple(damage.found))

    def _start(self, partition: int | None, cursor: str) -> tuple[int, str]:
        if not cursor:
            return (partition or 0), ""
        with reading_cursor():
            index, after = (partition, cursor) if partition is not None else opened(cursor, 2)
            position, unstarted = int(index), not after and partition is None
            member = None if unstarted else ExecutionId.parse(after)
        if member is not None and member.partition != position:
            raise ValidationError("invalid_cursor", "belongs to another partition")
        return position, member or ""

    async def _ids(
        self, partition: int, after: str, count: int, damage: Damage
    ) -> tuple[list[ExecutionId], str | None]:
        """The next ids, and the member after which more may follow."""
        first = b"(" + raw(after) if after else b"-"
        members = await self._listed(f"{{fp:{partition}}}", first, "+", count)
        more = lossless(members[-1]) if len(members) == count else None
        return damage.ids(members), more

    async def _row(
        self, execution_id: ExecutionId, where: Filter | None = None
    ) -> ExecutionSummary | None:
        """The row of a record that can be read and matches the filter."""
        record = await Record.read(self._calls, execution_id)
        row = None if record is None else record.summary()
        if row is None or where is None:
            return row
        fits = where.accepts(row) and await self._tags_match(execution_id, where.tags)
        return row if fits else None

    async def _tags_match(self, execution_id: ExecutionId, wanted: Mapping[str, str]) -> bool:
        if not wanted:
            return True
        key = keys.tags(execution_id.tag, execution_id)
        stored = await self._calls.read(f"{execution_id}: tags", "HMGET", key, *wanted)
        return list(stored) == [value.encode() for value in wanted.values()]

    async def list_lane(
        self, lane_id: str, state: str, *, partition: int, cursor: str = "", limit: int = 50
    ) -> ExecutionPage:
        check.one_of(state, "state", LANE_STATES)
        tag = f"{{fp:{check.partition(partition, self._calls.counts)}}}"
        given_cursor(cursor)
        validate_lane(lane_id)
        apart = await self._calls.signatures(tag, lane_id) if state in _BY_SIGNATURE else []
        untaken = await self._untaken({(tag, lane_id): apart})
        names = _indexes(tag, lane_id, state, apart, untaken)
        limit = min(check.whole(limit, "limit"), _MAX_PAGE)
        after = _lane_position(cursor, tag) if cursor else None
        if limit <= 0:
            return ExecutionPage(())
        damage = Damage("list_lane")
        found = await asyncio.gather(
            *(self._scores.page(name, after, limit + 1, damage) for name in names)
        )
        entries = sorted(entry for entries in found for entry in entries)
        rows = await damage.keep_all(self._row(member) for _, member in entries[:limit])
        more = sealed(*entries[limit - 1]) if len(entries) > limit else None
        return ExecutionPage(tuple(filter(None, rows)), more, tuple(damage.found))

    async def count_lanes(self, lanes: Sequence[str]) -> dict[str, dict[str, int]]:
        found = {lane: dict.fromkeys(LANE_STATES, 0) for lane in validate_lanes(lanes)}
        for (_, lane), counts in (await self.count_places(lambda lane: lane in found)).items():
            for state, count in counts.items():
                found[lane][state] += count
        return found

    async def count_places(
        self, wanted: Callable[[str], bool] = lambda _: True, *, by_route: bool = True
    ) -> dict[Place, dict[str, int]]:
        """By partition and lane: how many executions of a wanted lane are in each state there.

        Without `by_route`, executions that no live worker can take count as eligible.
        """
        counted = await self._lane_reads.count(wanted)
        apart = {place: each.by_signature for place, each in counted.items()}
        untaken = await self._untaken(apart if by_route else {})
        found: dict[Place, dict[str, int]] = {}
        for place, sizes in counted.items():
            counts = found[place] = dict(sizes.by_state)
            for signature, (eligible, reclaimable) in sizes.by_signature.items():
                counts[_ROUTE if (place[1], signature) in untaken else "eligible"] += eligible
                counts["reclaimable"] += reclaimable
        return found

    async def oldest_eligible(self, lanes: Sequence[str]) -> dict[str, int]:
        ages = dict.fromkeys(validate_lanes(lanes), 0)
        times = await self._lane_reads.oldest_eligible(lambda lane: lane in ages)
        untaken = await self._untaken(times)
        for (_, lane), by_signature in times.items():
            waiting = (age for one, age in by_signature.items() if (lane, one) not in untaken)
            ages[lane] = max(ages[lane], *waiting, 0)
        return ages

    async def _untaken(self, signatures: Mapping[Place, Iterable[str]]) -> frozenset[LaneSignature]:
        """The signatures of each lane that no live worker covers."""
        used = {
            (lane, each)
            for (_, lane), some in signatures.items()
            for each in some
            if signature_parts(each)[1]
        }
        if not used:
            return frozenset()
        fleet = await self._workers.list_workers(None, limit=None)
        return frozenset(each for each in used if no_worker_for(*each, fleet))

    async def find_executions(
        self, uuid_prefix: str, limit: int = 10, *, partition: int | None = None
    ) -> list[ExecutionId]:
        check.text(uuid_prefix, "uuid_prefix")
        if partition is not None:
            check.partition(partition, self._calls.counts)
        limit = min(check.whole(limit, "limit"), check.MAX_EXACT)
        if limit < 1:
            return []
        used = await self._places.partitions_in_use() if partition is None else [partition]
        tags = [f"{{fp:{index}}}" for index in used]
        # `~` sorts after all characters of a UUID.
        bounds = {tag: (f"[{tag}:{uuid_prefix}", f"({tag}:{uuid_prefix}~") for tag in tags}
        found = await asyncio.gather(*(self._listed(tag, *bounds[tag], limit) for tag in tags))
        return [
            ExecutionId.trusted(member)
            for tag, page in zip(tags, found, strict=True)
            for member in map(lossless, page)
            if is_execution_id(member, tag)
        ][:limit]

    async def _listed(self, tag: str, first: Arg, last: Arg, limit: int) -> Any:
        """Members of the partition's list of all executions, in the order of their ids."""
        key = keys.index(tag, "all_executions")
        bounds = (first, last, "BYLEX", "LIMIT", 0, limit)
        return await self._calls.read(f"{tag}: all_executions", "ZRANGE", key, *bounds)


def _indexes(
    tag: str,
    lane: str,
    state: str,
    signatures: Sequence[str],
    untaken: Collection[LaneSignature] = (),
) -> list[str]:
    """The keys that list a lane's executions in one state.

    `untaken`: lanes with signatures that no live worker covers.
    """
    apart = _BY_SIGNATURE.get(state)
    if apart is keys.eligible:
        signatures = [each for each in signatures if ((lane, each) in untaken) == (state == _ROUTE)]
    more = [] if apart is None else [apart(tag, lane, each) for each in signatures]
    return [keys.lane(tag, lane, state.replace("_", ":")), *more]


def _lane_position(cursor: str, tag: str) -> tuple[float, str]:
    with reading_cursor():
        score, member = opened(cursor, 2)
        known = ExecutionId.parse(member)
        position = (float(score), known)
    if known.tag != tag or not math.isfinite(position[0]):
        raise ValidationError("invalid_cursor", "belongs to another partition")
    return position
