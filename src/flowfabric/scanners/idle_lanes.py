"""Lanes of which nothing is stored leave the registry."""

from __future__ import annotations

from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.places import ANYWHERE, KEPT
from flowfabric.scanners.base import Scope
from flowfabric.scanners.watch import grouped

# Whoever creates an execution has registered its place at most 10 s before.
_UNUSED_MS = 60_000
_LANES_PER_CALL = 200


async def forget_idle_lanes(backend: ValkeyBackend, scope: Scope) -> None:
    """Forget places that nobody registered for a while and that are empty, then such lanes.

    A place is only forgotten while its stamp is the one that was read before it was found empty:
    a process that begins to use it stamps it first.
    """
    places = await backend.places.places_in_use()
    lanes = places.pop(ANYWHERE, {})
    edge = await backend.meta.server_time_ms() - _UNUSED_MS
    unused = [
        (tag, lane)
        for tag, stamps in places.items()
        for lane, stamp in stamps.items()
        if _is_before(stamp, edge)
    ]
    for group in grouped(unused, _LANES_PER_CALL, apart=True):
        if scope.spent():
            return
        tag = group[0][0]
        idle = await backend.upkeep.idle_lanes(tag, [lane for _, lane in group])
        if idle:
            await backend.upkeep.forget_places(tag, {lane: places[tag].pop(lane) for lane in idle})
        scope.progress()
    used = {lane for stamps in places.values() for lane in stamps}
    empty = {
        lane: stamp
        for lane, stamp in lanes.items()
        if stamp != KEPT and lane not in used and _is_before(stamp, edge)
    }
    for group in grouped([(ANYWHERE, lane) for lane in empty], _LANES_PER_CALL, apart=False):
        await backend.upkeep.forget_places(ANYWHERE, {lane: empty[lane] for _, lane in group})


def _is_before(stamp: str, edge: int) -> bool:
    """Whether a place was last registered before a time; an unreadable stamp counts as old."""
    return not stamp.isdecimal() or int(stamp) < edge
