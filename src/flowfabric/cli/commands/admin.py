"""`flowfabric admin`: questions about a deployment that need no connection."""

import msgspec

from flowfabric.cli import options
from flowfabric.cli.errors import UsageError
from flowfabric.cli.views.screen import Row, Screen, print_json
from flowfabric.core.errors import ConfigError
from flowfabric.core.partition import CollisionGrade, lane_collisions, solo_partition
from flowfabric.core.text import plural
from flowfabric.engine.connect import configured_layout

_STYLES = {
    CollisionGrade.CLEAN: "green",
    CollisionGrade.WATCH: "yellow",
    CollisionGrade.ELEVATED: "yellow",
    CollisionGrade.REMEDIATE: "bold red",
}


class _LanePlace(msgspec.Struct, frozen=True):
    partition: int
    lane: str
    collides_with: list[str]


def _partition_collisions(*, as_json: options.Json = False) -> None:
    """Show which lanes share a partition.

    Reads only FF_LANES and FF_FLOW_PARTITIONS, and assumes that every lane is pinned. Lanes on the
    same partition share one Valkey thread.
    """
    try:
        lanes, counts = configured_layout()
    except ConfigError as error:
        raise UsageError("config", error.message) from error
    found = lane_collisions(lanes, counts)
    places = sorted((solo_partition(lane, counts), lane) for lane in lanes)
    rows = [
        _LanePlace(where, lane, [other for other in found.shared.get(where, ()) if other != lane])
        for where, lane in places
    ]
    grade = found.grade
    share = 100 * found.affected / found.lanes
    if as_json:
        totals = {"partitions": counts.flow, "lanes": found.lanes, "colliding": found.affected}
        print_json({**totals, "severity": grade.value, "places": rows})
        return
    screen = Screen()
    screen.table([_row(row) for row in rows])
    screen.line()
    total = f"{found.affected} of {plural(found.lanes, 'lane')} ({share:.1f} %) share a partition"
    among = f" ({plural(counts.flow, 'partition')}): "
    screen.line(f"{total}{among}", (grade.title(), _STYLES[grade]))
    if grade is not CollisionGrade.CLEAN:
        screen.line("Spread a busy lane with `flowfabric lane set LANE --placement spread`, rename")
        screen.line("it, or start a new deployment with more FF_FLOW_PARTITIONS.")


def _row(place: _LanePlace) -> Row:
    return {
        "PARTITION": str(place.partition),
        "LANE": (place.lane, "bold"),
        "COLLIDES WITH": ", ".join(place.collides_with) or "-",
    }


admin = {"partition-collisions": _partition_collisions}
