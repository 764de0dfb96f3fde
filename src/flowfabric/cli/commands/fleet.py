"""`flowfabric workers` and `drain-worker`, `lanes`, and the commands of `lane`."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from flowfabric.cli import options
from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import (
    Deployment,
    Namespaced,
    Target,
    argument,
    duration,
    flag,
    value,
)
from flowfabric.cli.session import NoDataYet, open_backend
from flowfabric.cli.views.lanes import OPTIONAL_COLUMNS, STATE_STYLES, lane_row
from flowfabric.cli.views.screen import Row, Screen, print_json, print_result
from flowfabric.core import text
from flowfabric.core.text import age, plural
from flowfabric.engine.api.places import PLACEMENTS, LaneDetail, PartitionLoad
from flowfabric.engine.api.workers import Draining, WorkerEntry
from flowfabric.engine.lane_overview import LaneOverview, read_lanes

_LANES_SHOWN = 3
_STRICT_MS = 10**12
"""The default weight of priorities, with which no waiting time makes up for a priority."""
_OPTIONAL_COLUMNS = ("UP", "NAMESPACE", "CAPABILITIES", "SEEN", "TASKS")
"""Columns to drop, in this order, if the terminal is too narrow."""


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
    rows = [_worker_row(worker, now) for worker in found]
    which = "worker" if lane is None and target.namespace is None else "matching worker"
    _print(target, found, rows, f"No {which} is running.", _OPTIONAL_COLUMNS)


def _worker_row(worker: WorkerEntry, now_ms: int) -> Row:
    state = ("draining", "yellow") if worker.draining else ("active", "green")
    return {
        "WORKER": (worker.worker_instance_id, "bold"),
        "NAMESPACE": _namespaces(worker),
        "STATE": state,
        "UP": age(now_ms - worker.registered_at_ms),
        "SEEN": f"{age(now_ms - worker.last_heartbeat_ms)} ago",
        "CAPABILITIES": ", ".join(worker.capabilities) or "-",
        "LANES": ", ".join(worker.lanes),
        "TASKS": ", ".join(worker.tasks) or "-",
    }


def _namespaces(worker: WorkerEntry) -> str:
    """Where it is registered, and which namespaces it serves if those are others."""
    if worker.namespaces in ((), (worker.namespace,)):
        return worker.namespace
    served = "all" if "*" in worker.namespaces else ", ".join(worker.namespaces)
    return f"{worker.namespace} (serves {served})"


_Partitions = Annotated[
    bool, flag("--partitions", "List the 20 busiest partitions instead, with their lanes.")
]


async def lanes(target: Deployment, *, partitions: _Partitions = False) -> None:
    """List lanes with their work and their workers.

    With --json, prints one JSON object per line.
    """
    if partitions:
        await _partitions(target)
        return
    found: list[LaneOverview] = []
    with suppress(NoDataYet):
        async with open_backend(target) as backend:
            found = await read_lanes(backend)
    rows = [lane_row(entry) for entry in found]
    _print(target, found, rows, "No lanes yet.", OPTIONAL_COLUMNS)


async def _partitions(target: Deployment) -> None:
    found: list[PartitionLoad] = []
    with suppress(NoDataYet):
        async with open_backend(target) as backend:
            found = await backend.lanes.busiest_partitions()
    rows = [_partition_row(load) for load in found]
    _print(target, found, rows, "No partition holds waiting or running work.")


def _partition_row(load: PartitionLoad) -> Row:
    listed = [f"{lane.lane_id} ({lane.waiting + lane.active:,})" for lane in load.lanes]
    if len(listed) > _LANES_SHOWN:
        listed[_LANES_SHOWN:] = [f"{len(listed) - _LANES_SHOWN:,} more"]
    return {
        "PARTITION": (str(load.partition), "bold"),
        "WAITING": f"{load.waiting:,}",
        "ACTIVE": f"{load.active:,}",
        "LANES": ", ".join(listed),
    }


_Lane = Annotated[str, argument("LANE", "The lane.", parser=options.parse_lane)]
_Reason = Annotated[str, value("TEXT", "The reason, shown with the lane.")]


async def _show(target: Deployment, lane: _Lane) -> None:
    """Show the settings of a lane and how many executions it holds."""
    async with open_backend(target) as backend:
        found = await backend.lanes.get_lane(lane)
    if target.as_json:
        print_json(found)
    else:
        _print_lane(found)


def _print_lane(found: LaneDetail) -> None:
    screen = Screen()
    screen.line((found.lane_id, "bold"), "  ", (found.state, STATE_STYLES[found.state]))
    spread = f"spread over {plural(found.shards, 'partition')}"
    rows: dict[str, str] = {
        "reason": found.reason,
        "placement": spread if found.placement == "spread" else "pinned to one partition",
        "priority weight": _priority_weight(found.priority_weight_ms),
        "reclaim grace": text.duration(found.reclaim_grace_ms),
        "renewal events": "yes" if found.emit_renewals else "no",
    }
    rows |= {name: f"{count:,}" for name, count in found.counts.items() if count}
    for name, shown in rows.items():
        if shown:
            screen.line((f"  {name:<18}", "bright_black"), shown)


def _priority_weight(weight_ms: int) -> str:
    if weight_ms >= _STRICT_MS:
        return "a higher priority always starts first"
    return f"one point is worth {text.duration(weight_ms)} of waiting"


async def _set_state(target: Deployment, lane: str, state: str, reason: str = "") -> None:
    async with open_backend(target) as backend:
        is_new = lane not in await backend.places.lanes_in_use()
        before = await backend.lanes.set_lane_state(lane, state, reason)
    change = {"lane": lane, "state": state, "previous": before}
    told = f"Lane {lane} is {state}; it was {before}."
    if is_new:
        told += " Nothing has been submitted to it yet; check the name."
    print_result(change, told, as_json=target.as_json)


async def _pause(target: Deployment, lane: _Lane, *, reason: _Reason = "") -> None:
    """Pause a lane: accept submissions, but start none of its work."""
    await _set_state(target, lane, "paused", reason)


async def _resume(target: Deployment, lane: _Lane) -> None:
    """Resume a lane: run its work and accept submissions."""
    await _set_state(target, lane, "active")


async def _drain(target: Deployment, lane: _Lane, *, reason: _Reason = "") -> None:
    """Drain a lane: refuse submissions and finish its work."""
    await _set_state(target, lane, "draining", reason)


async def _disable(target: Deployment, lane: _Lane, *, reason: _Reason = "") -> None:
    """Disable a lane: refuse submissions and start none of its work."""
    await _set_state(target, lane, "disabled", reason)


_PLACEMENT = "pinned: one partition, in order. spread: many partitions, for a busy lane."


async def _set(
    target: Deployment,
    lane: _Lane,
    *,
    placement: Annotated[
        str | None, value("NAME", _PLACEMENT, autocompletion=lambda: list(PLACEMENTS))
    ] = None,
    shards: Annotated[
        int | None, value("N", "How many partitions to spread the lane over.", min=1)
    ] = None,
    weight: Annotated[
        float | None, duration("How much waiting time one point of priority is worth.")
    ] = None,
    grace: Annotated[
        float | None,
        duration("How long to wait before another worker takes over after a lost lease."),
    ] = None,
    renewals: Annotated[
        bool | None,
        typer.Option("--renewals/--no-renewals", help="Emit an event for every lease renewal."),
    ] = None,
) -> None:
    """Change settings of a lane. Settings that you do not pass stay unchanged."""
    given: dict[str, Any] = {
        "placement": placement,
        "shards": shards,
        "priority_weight_ms": None if weight is None else round(weight * 1000),
        "reclaim_grace_ms": None if grace is None else round(grace * 1000),
        "emit_renewals": renewals,
    }
    changed = {name: setting for name, setting in given.items() if setting is not None}
    if not changed:
        raise UsageError("usage", "nothing to change: pass at least one setting")
    async with open_backend(target) as backend:
        await backend.lanes.set_lane_config(lane, **changed)
    told = f"Changed the settings of lane {lane}."
    print_result({"lane": lane, **changed}, told, as_json=target.as_json)


lane = {
    "show": _show,
    "pause": _pause,
    "resume": _resume,
    "drain": _drain,
    "disable": _disable,
    "set": _set,
}
"""The commands of `flowfabric lane`."""


async def drain_worker(
    target: Namespaced,
    instance: Annotated[str, argument("WORKER", "The worker, as `flowfabric workers` lists it.")],
    *,
    timeout: Annotated[
        float, duration("How long the worker may take to finish before its leases are revoked.")
    ] = "30s",  # pyright: ignore[reportArgumentType] - parsed like given ones
) -> None:
    """Stop giving work to a worker.

    The worker finishes the tasks that it runs. Use this before you stop its machine.
    """
    namespace = target.namespace or "default"
    async with open_backend(target) as backend:
        outcome = await backend.workers.drain_worker(instance, namespace, round(timeout * 1000))
    if not isinstance(outcome, Draining):
        advice = "`flowfabric workers` lists live workers"
        raise CliError("not_found", f"namespace {namespace} has no live worker {instance}", advice)
    runs = f"still runs {plural(outcome.leases, 'task')}" if outcome.leases else "runs no task"
    told = f"Worker {instance} gets no more work. It {runs}."
    result = {"worker": instance, "leases": outcome.leases}
    print_result(result, told, as_json=target.as_json)


def _print(
    target: Target,
    found: Sequence[object],
    rows: Sequence[Row],
    nothing: str,
    optional: Sequence[str] = (),
) -> None:
    if target.as_json:
        print_json(*found)
    elif rows:
        Screen().table(rows, optional)
    else:
        Screen().line(nothing)
