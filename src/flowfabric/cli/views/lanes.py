"""A lane in the tables of `flowfabric lanes` and `flowfabric top`."""

from flowfabric.cli.views.screen import Row
from flowfabric.core.text import age
from flowfabric.engine.lane_overview import LaneOverview

OPTIONAL_COLUMNS = ("FINISHED", "WORKERS", "BLOCKED", "DELAYED", "SUSPENDED", "OLDEST")
"""What a narrow terminal does not show, the least important one first."""
STATE_STYLES = {"active": "green", "paused": "yellow", "draining": "yellow", "disabled": "red"}


def lane_row(entry: LaneOverview) -> Row:
    """A lane in a table."""
    names = ("waiting", "delayed", "active", "suspended", "blocked", "finished", "workers")
    numbers: Row = {name.upper(): f"{getattr(entry, name):,}" for name in names}
    if entry.waiting and not entry.workers:
        numbers["WORKERS"] = ("0", "bold red")
    if entry.no_worker:
        numbers["BLOCKED"] = (f"{entry.blocked:,}", "bold red")
    state = f"{entry.state}: {entry.reason}" if entry.reason else entry.state
    head: Row = {"LANE": (entry.lane, "bold"), "STATE": (state, STATE_STYLES.get(entry.state, ""))}
    oldest = "-" if entry.oldest_ms is None else age(entry.oldest_ms)
    return head | numbers | {"OLDEST": oldest}
