"""`flowfabric workers` and `lanes`."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from flowfabric.cli import options
from flowfabric.cli.options import Deployment, Target
from flowfabric.cli.session import NoDataYet, open_backend
from flowfabric.cli.views.screen import Row, Screen, print_json
from flowfabric.core.errors import NotFoundError
from flowfabric.core.text import age
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.places import LaneSettings
from flowfabric.engine.api.workers import WorkerEntry

_STATE_STYLES = {"active": "green", "paused": "yellow", "draining": "yellow", "disabled": "red"}


async def workers(target: Target, *, lane: options.Lane = None) -> None:
    """List live workers.

    With --json, prints one JSON object per line.
    """
    found, now = list[WorkerEntry](), 0
    with suppress(NoDataYet):
        async with open_backend(target) as backend:
            now = await backend.meta.server_time_ms()
            found = await backend.workers.list_workers(target.namespace, limit=None)
    found = [worker for worker in found if lane is None or lane in worker.lanes]
    _print(target, found, [_worker_row(worker, now) for worker in found], "No worker is running.")


def _worker_row(worker: WorkerEntry, now_ms: int) -> Row:
    return {
        "WORKER": (worker.worker_instance_id, "bold"),
        "NAMESPACE": worker.namespace,
        "UP": age(now_ms - worker.registered_at_ms),
        "SEEN": f"{age(now_ms - worker.last_heartbeat_ms)} ago",
        "CAPABILITIES": ", ".join(worker.capabilities) or "-",
        "LANES": ", ".join(worker.lanes),
        "TASKS": ", ".join(worker.tasks) or "-",
    }


class _LaneEntry(msgspec.Struct, frozen=True, kw_only=True):
    lane: str
    state: str
    reason: str
    waiting: int
    delayed: int
    active: int
    suspended: int
    blocked: int
    """Those that wait for dependencies, budgets, quotas, capabilities, an operator or the lane."""
    finished: int
    workers: int


async def lanes(target: Deployment) -> None:
    """List lanes with their work and their workers.

    With --json, prints one JSON object per line.
    """
    found: list[_LaneEntry] = []
    with suppress(NoDataYet):
        async with open_backend(target) as backend:
            names = await backend.places.lanes_in_use()
            settings, counts, live = await asyncio.gather(
                asyncio.gather(*(_settings(backend, name) for name in names)),
                backend.listings.count_lanes(names),
                backend.workers.list_workers(None, limit=None),
            )
        serving = Counter(lane for worker in live for lane in worker.lanes)
        found = [_lane(each, counts[each.lane_id], serving[each.lane_id]) for each in settings]
    _print(target, found, [_lane_row(entry) for entry in found], "No lanes yet.")


async def _settings(backend: Backend, lane: str) -> LaneSettings:
    """The lane's settings; those of a new lane if it was forgotten meanwhile."""
    try:
        return await backend.lanes.get_lane(lane)
    except NotFoundError:
        return LaneSettings(lane_id=lane)


def _lane(settings: LaneSettings, counts: Mapping[str, int], workers: int) -> _LaneEntry:
    return _LaneEntry(
        lane=settings.lane_id,
        state=settings.state,
        reason=settings.reason,
        # An execution that lost its worker waits for another one.
        waiting=counts["eligible"] + counts["reclaimable"],
        delayed=counts["delayed"],
        active=counts["active"],
        suspended=counts["suspended"],
        blocked=sum(count for name, count in counts.items() if name.startswith("blocked_")),
        finished=counts["terminal"],
        workers=workers,
    )


def _lane_row(entry: _LaneEntry) -> Row:
    names = ("waiting", "delayed", "active", "suspended", "blocked", "finished", "workers")
    numbers: Row = {name.upper(): f"{getattr(entry, name):,}" for name in names}
    if entry.waiting and not entry.workers:
        numbers["WORKERS"] = ("0", "bold red")
    state = f"{entry.state}: {entry.reason}" if entry.reason else entry.state
    head: Row = {"LANE": (entry.lane, "bold"), "STATE": (state, _STATE_STYLES.get(entry.state, ""))}
    return head | numbers


def _print(target: Target, found: Sequence[object], rows: Sequence[Row], nothing: str) -> None:
    if target.as_json:
        print_json(*found)
    elif rows:
        Screen().table(rows)
    else:
        Screen().line(nothing)
