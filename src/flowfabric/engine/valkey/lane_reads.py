"""Reads the indexes of all lanes of a deployment, with few commands per lane."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from flowfabric.core.errors import CorruptionError
from flowfabric.core.text import lossless
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, as_stored, at_once, places_of, split
from flowfabric.engine.valkey.pages import Damage
from flowfabric.engine.valkey.places import ValkeyPlaces

T = TypeVar("T")
Place = tuple[str, str]
"""The tag of a partition, and a lane."""
LANE_STATES = (
    *("eligible", "delayed", "active", "reclaimable", "suspended", "terminal"),
    *("blocked_dependencies", "blocked_budget", "blocked_quota"),
    *("blocked_route", "blocked_operator", "blocked_lane"),
)
"""The states by which a lane lists its executions, in the order in which they are counted."""
_LANES_PER_CALL = 32
_CALLS_AT_ONCE = 4


class LaneSizes(msgspec.Struct, frozen=True):
    """How many executions a lane has in one partition."""

    by_state: dict[str, int]
    by_signature: dict[str, tuple[int, int]]
    """By signature: how many are eligible, and how many reclaimable."""


class LaneReads:
    """Reads lanes in every partition that they use, many lanes in one call."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places

    async def count(self, wanted: Callable[[str], bool]) -> dict[Place, LaneSizes]:
        """The sizes of the indexes of wanted lanes. An unreadable index is logged and counts 0."""
        rows = await self._rows("ff_count_lanes", wanted, lambda reply: reply[2])
        damage = Damage("count_places")

        def size(place: Place, stored: int, index: str) -> int:
            if stored < 0:
                name = f"{keys.lane(*place, index)}: index"
                damage.note(CorruptionError("corruption", f"{name}: has the wrong type"))
            return max(0, stored)

        def sizes(place: Place, row: Sequence[Any]) -> LaneSizes:
            counted = zip(LANE_STATES, row[: len(LANE_STATES)], strict=True)
            by_state = {
                state: size(place, stored, state.replace("_", ":")) for state, stored in counted
            }
            apart = {one: both for one, *both in _tuples(row[len(LANE_STATES) :], 3)}
            by_signature = {
                one: (
                    size(place, eligible, f"eligible:{one}"),
                    size(place, reclaimable, f"reclaimable:{one}"),
                )
                for one, (eligible, reclaimable) in self._readable(place, apart).items()
            }
            return LaneSizes(by_state, by_signature)

        return {place: sizes(place, row) for place, row in rows.items()}

    async def oldest_eligible(self, wanted: Callable[[str], bool]) -> dict[Place, dict[str, int]]:
        """By signature, for how many ms the longest-waiting execution has been eligible."""

        def ages(reply: list[Any]) -> list[dict[bytes, int]]:
            now = int(reply[2])
            return [
                {one: now - int(since) for one, since in _tuples(row, 2) if since}
                for row in reply[3]
            ]

        rows = await self._rows("ff_oldest_eligible", wanted, ages)
        return {place: self._readable(place, row) for place, row in rows.items()}

    def _readable(self, place: Place, row: Mapping[bytes, T]) -> dict[str, T]:
        """The row's values by signature; malformed signatures are logged once and left out."""
        found: dict[str, T] = {}
        for stored, value in row.items():
            if (signature := lossless(stored)).isprintable():
                found[signature] = value
            else:
                self._calls.warn_of(keys.lane(*place, "sigs"), signature)
        return found

    async def _rows(
        self,
        function: str,
        wanted: Callable[[str], bool],
        decode: Callable[[list[Any]], Sequence[T]],
    ) -> dict[Place, T]:
        async def read(group: list[Place]) -> list[T]:
            rows: list[T] = []
            # One call may answer for only some of the lanes.
            while len(rows) < len(group):
                args = as_stored(places_of(group[len(rows) :]))
                rows += await self._calls.ask(function, group[0][0], args, decode)
            return rows

        used = (await self._places.lanes_by_partition()).items()
        places = [(tag, lane) for tag, lanes in used for lane in sorted(lanes) if wanted(lane)]
        groups = split(places, _LANES_PER_CALL, apart=self._calls.transport.is_cluster)
        found = await at_once(_CALLS_AT_ONCE, read, groups)
        return {
            place: row
            for group, rows in zip(groups, found, strict=True)
            for place, row in zip(group, rows, strict=True)
        }


def _tuples(flat: Sequence[Any], size: int) -> Iterator[tuple[Any, ...]]:
    return zip(*(flat[first::size] for first in range(size)), strict=True)
