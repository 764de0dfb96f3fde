"""One good call of every public coroutine method of the backend, to be spoiled one by one."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Unpack, get_args, get_origin, get_type_hints

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Candidate, Handle, ResumeGrant
from flowfabric.core.contracts.streams import BestEffort, Frame
from flowfabric.core.contracts.suspension import Accepted, FreshWaitpoint, ResumePolicy, Suspended
from flowfabric.core.ids import new_uuid
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.admission import AdmissionControl
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.events import EventFilter
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.api.reads import Filter
from flowfabric.engine.api.upkeep import Leadership, Upkeep
from tests.conformance.budget_calls import BUDGET_CALLS, BUDGET_UPKEEP
from tests.conformance.flow_calls import FLOW_CALLS
from tests.support.engine import LANE, TTL, Engine
from tests.support.leases import OTHER, WORKER, grant, lapsed, paused, reclaim_grant, running
from tests.support.suspension import SECRET

__all__ = ["CALLS", "SCANNERS", "methods", "methods_with", "operation", "parameters"]

Given = dict[str, Any]
Call = Callable[[Engine], Awaitable[Given]]

_CONCERNS = {
    noun: concern
    for noun, concern in get_type_hints(Backend).items()
    if concern is not PartitionCounts
}

# Upkeep that the contract names: a person may call it, too.
_OFFERED = {
    *("mark_lease_expired_if_due", "promote_delayed", "expire_execution", "trim_retention"),
    *("reconcile_execution_index", "used_partitions"),
}
_NO_ARGUMENTS = {"forget_idle_lanes", "get_report", "leaders", "list_drains"}
_INTERNAL = {*vars(Upkeep), *vars(Leadership), *vars(AdmissionControl)} - _OFFERED - _NO_ARGUMENTS
SCANNERS = {name for name in _INTERNAL if not name.startswith("_")} | {
    "follow",
    "wait_ready",
    "ring_waiting",
    "occupied_partitions",
    "drain_cascade",
    "wait_for",
    *BUDGET_UPKEEP,
    *("admit_many", "confirm_many", "release_many"),
    *("note_blocked", "move_blocked", "forget_blocked", "blocked"),
}
"""What the engine calls itself with what it has stored: no user's arguments get there."""


def methods() -> list[str]:
    """Every public coroutine method that takes arguments."""
    return [
        name
        for concern in _CONCERNS.values()
        for name, method in inspect.getmembers(concern, inspect.iscoroutinefunction)
        if not name.startswith("_") and set(inspect.signature(method).parameters) - {"self"}
    ]


def methods_with(parameter: str) -> list[str]:
    """Those of them that take this parameter."""
    return [
        name
        for concern in _CONCERNS.values()
        for name in methods()
        if hasattr(concern, name) and parameter in parameters(getattr(concern, name))
    ]


def parameters(method: Any) -> list[str]:
    """The names that a method takes, those of typed keyword arguments included."""
    names: list[str] = []
    for one in inspect.signature(method).parameters.values():
        if one.kind is not one.VAR_KEYWORD:
            names.append(one.name)
        elif get_origin(typed := get_type_hints(method)[one.name]) is Unpack:
            names += get_type_hints(get_args(typed)[0])
    return names


def operation(backend: Backend, name: str) -> Any:
    """The operation of this name, whatever its concern."""
    return next(
        getattr(getattr(backend, noun), name)
        for noun, concern in _CONCERNS.items()
        if hasattr(concern, name)
    )


def fixed(**given: Any) -> Call:
    async def make(engine: Engine) -> Given:
        return dict(given)

    return make


def scanned(**given: Any) -> Call:
    """A call of a scanner."""
    return fixed(tag="{fp:0}", ids=[], **given)


def about(**given: Any) -> Call:
    """A call about an execution that waits."""

    async def make(engine: Engine) -> Given:
        return {"execution_id": await engine.create(), **given}

    return make


def held(**given: Any) -> Call:
    """A call with a handle."""

    async def make(engine: Engine) -> Given:
        return {"handle": await running(engine), **given}

    return make


def fenced(**given: Any) -> Call:
    """A call with an execution and a fence."""

    async def make(engine: Engine) -> Given:
        handle = await running(engine)
        return {"execution_id": handle.execution_id, "fence": handle, **given}

    return make


def streamed(**given: Any) -> Call:
    async def make(engine: Engine) -> Given:
        handle = await running(engine)
        await engine.backend.streams.append_frame(handle, Frame(payload=b"x"))
        return {"execution_id": handle.execution_id, "attempt_index": 0, **given}

    return make


async def parked(engine: Engine) -> Suspended:
    outcome = await engine.backend.suspensions.suspend(await running(engine), condition=Single("k"))
    assert isinstance(outcome, Suspended)
    return outcome


def waiting(*, token: str = "", **given: Any) -> Call:
    """A call about a waitpoint, with its token under this name."""

    async def make(engine: Engine) -> Given:
        wait = await parked(engine)
        known: Given = {
            "execution_id": wait.handle.execution_id,
            "waitpoint_id": wait.details.waitpoint_id,
        }
        return known | ({token: wait.details.waitpoint_token} if token else {}) | given

    return make


async def suspended(engine: Engine) -> Given:
    return {"execution_id": (await parked(engine)).handle.execution_id}


async def in_lane(engine: Engine) -> Given:
    return {"lane_id": LANE, "tag": (await engine.create()).tag}


async def claim(engine: Engine) -> Given:
    held_grant = await grant(engine, await engine.create())
    return {"grant": held_grant, **WORKER, "lease_ttl_ms": TTL}


async def unused(engine: Engine) -> Given:
    return {"grant": await grant(engine, await engine.create())}


async def resumed(engine: Engine) -> Given:
    handle = await paused(engine)
    return {"grant": await grant(engine, handle.execution_id), **WORKER, "lease_ttl_ms": TTL}


async def resume_grant(engine: Engine) -> Given:
    given = await resumed(engine)
    taken = given["grant"]
    return given | {
        "grant": ResumeGrant(
            execution_id=taken.execution_id,
            partition_key=taken.partition_key,
            grant_key=taken.grant_key,
            expires_at_ms=taken.expires_at_ms,
            lane_id=LANE,
        )
    }


async def reclaim(engine: Engine) -> Given:
    lost = (await lapsed(engine)).execution_id
    return {"grant": await reclaim_grant(engine, lost), **OTHER, "lease_ttl_ms": TTL}


async def lost(engine: Engine) -> Given:
    return {"execution_id": (await lapsed(engine)).execution_id, **OTHER}


async def many(engine: Engine) -> Given:
    return {"request": engine.want(), "tag": (await engine.create()).tag, "max_n": 1}


async def admitted(engine: Engine) -> Given:
    execution_id = await engine.create()
    asked = [Candidate(execution_id)]
    return {"request": engine.want(), "tag": execution_id.tag, "candidates": asked}


async def fused(engine: Engine) -> Given:
    handle = await running(engine)
    items = [Completion(handle, b"r", "json")]
    return {"tag": handle.execution_id.tag, "items": items, "request": engine.want(), "max_n": 1}


async def a_worker(engine: Engine) -> Given:
    return {"worker_id": "w", "worker_instance_id": new_uuid(), "lanes": [LANE]}


async def replayed(engine: Engine) -> Given:
    handle = await running(engine)
    await engine.backend.executions.complete(handle)
    return {"execution_id": handle.execution_id}


def new(engine: Engine) -> NewExecution:
    return NewExecution(execution_id=engine.new_id(), execution_kind="job")


async def waits(engine: Engine) -> Given:
    return {"execution_id": (await parked(engine)).handle.execution_id, "wanted": ("k",)}


async def past_wait(engine: Engine) -> Given:
    wait = await parked(engine)
    execution_id = wait.handle.execution_id
    await engine.backend.signals.deliver_approval_signal(
        execution_id, wait.details.waitpoint_id, "go"
    )
    (past,) = await engine.backend.waitpoints.read_waits(execution_id)
    return {"execution_id": execution_id, "wait": past}


async def signal(engine: Engine) -> Given:
    wait = await parked(engine)
    execution_id = wait.handle.execution_id
    outcome = await engine.backend.signals.deliver_approval_signal(
        execution_id, wait.details.waitpoint_id, "go"
    )
    assert isinstance(outcome, Accepted)
    return {"execution_id": execution_id, "signal_id": outcome.signal_id}


def suspending(handle: Handle) -> Given:
    return {
        "condition": Single("k"),
        "waitpoints": [FreshWaitpoint(new_uuid(), "k")],
        "resume_policy": ResumePolicy(),
        "timeout_at": 2**52,
        "timeout_behavior": "fail",
    }


async def suspend(engine: Engine) -> Given:
    handle = await running(engine)
    return {"handle": handle, **suspending(handle)}


async def suspend_by_triple(engine: Engine) -> Given:
    handle = await running(engine)
    return {
        "execution_id": handle.execution_id,
        "fence": handle.fence,
        "arguments": suspending(handle),
    }


async def _awaited(given: Given) -> Given:
    return given


async def _items(engine: Engine) -> Given:
    return {"items": [Completion(await running(engine), b"r")]}


async def _handles(engine: Engine) -> Given:
    return {"handles": [await running(engine)]}


async def _named(engine: Engine) -> Given:
    return {"execution_id": (await running(engine)).execution_id}


async def _limited(engine: Engine) -> Given:
    return await in_lane(engine) | {"limit": 5}


async def _ended(engine: Engine) -> Given:
    handle = await running(engine)
    await engine.backend.executions.complete(handle)
    return {"execution_id": handle.execution_id}


async def _held_back(engine: Engine) -> Given:
    execution_id = await engine.create()
    await engine.backend.claims.block_execution_for_admission(execution_id, "paused_by_policy")
    return {"execution_id": execution_id, "expected_blocking_reason": "paused_by_policy"}


async def _quota(engine: Engine) -> Given:
    policy = new_uuid()
    await engine.backend.quotas.create_quota_policy(policy, max_requests_per_window=5)
    return {"quota_policy_id": policy}


async def _quota_update(engine: Engine) -> Given:
    return {**await _quota(engine), "jitter_ms": 5}


async def _admission(engine: Engine) -> Given:
    return {**await _quota(engine), "execution_id": engine.new_id()}


READ = about()

CALLS: Mapping[str, Call] = {
    "find_work": fixed(places=[(LANE, "{fp:0}")]),
    "append_frame": held(frame=Frame(payload=b"{}"), best_effort=BestEffort(), mode="best_effort"),
    "append_frames": held(frames=[Frame(payload=b"{}")], mode="summary"),
    "block_execution_for_admission": about(reason="waiting_for_budget", retry_at=5),
    "block_route": about(),
    "cancel": held(),
    "cancel_execution": fenced(source="worker"),
    "change_priority": about(new_priority=5),
    "claim_admitted": admitted,
    "claim_execution": claim,
    "claim_from_resume_grant": resume_grant,
    "claim_many": many,
    "claim_resumed_execution": resumed,
    "release_grant": unused,
    "close_waitpoint": waiting(),
    "complete": held(result_payload=b"r", result_encoding="json"),
    "complete_and_claim": fused,
    "complete_execution": fenced(result_payload=b"r"),
    "complete_many": _items,
    "busiest_partitions": fixed(limit=5),
    "count_lanes": fixed(lanes=[LANE]),
    "oldest_eligible": fixed(lanes=[LANE]),
    "create_execution": lambda engine: _awaited({"new": new(engine)}),
    "create_many": lambda engine: _awaited({"items": [new(engine)]}),
    "create_waitpoint": held(waitpoint_key="k", expires_in_ms=1000),
    "delay": held(delay_until=1),
    "delay_execution": fenced(delay_until=1),
    "deliver_approval_signal": waiting(signal_name="go"),
    "deliver_signal": waiting(token="waitpoint_token", signal_name="go"),
    "expire_suspension": scanned(),
    "expire_waitpoints": scanned(),
    "expire_execution": scanned(reason=ExpireReason.ATTEMPT_TIMEOUT),
    "mark_lease_expired_if_due": scanned(),
    "promote_delayed": scanned(lane_id=LANE),
    "reconcile_execution_index": scanned(mode="check"),
    "trim_retention": scanned(lane_id=LANE),
    "fail": held(reason="boom", category="transient"),
    "fail_execution": fenced(failure_reason="boom", failure_category="transient"),
    "find_executions": fixed(uuid_prefix="0"),
    "get_execution_tag": about(key="app.x"),
    "get_lane": fixed(lane_id=LANE),
    "read_settings": fixed(lanes=[LANE]),
    "learn_lane": fixed(lane_id=LANE),
    "heartbeat_worker": fixed(worker_instance_id="w-1"),
    "issue_claim_grant": about(**WORKER),
    "issue_grant_and_claim": about(lease_duration_ms=TTL),
    "issue_reclaim_grant": lost,
    "list_executions": fixed(where=Filter(lane=LANE), partition=0),
    "list_expired_leases": fixed(),
    "list_lane": fixed(lane_id=LANE, state="eligible", partition=0),
    "list_lanes": fixed(),
    "list_pending_waitpoints": suspended,
    "list_suspended": fixed(partition=0),
    "list_waitpoint_hmac_kids": fixed(),
    "feed_size": fixed(partition=0),
    "list_workers": fixed(),
    "mark_worker_dead": fixed(worker_instance_id="w-1", revoke_leases=True),
    "drain_worker": fixed(worker_instance_id="w-1"),
    "list_worker_leases": fixed(worker_instance_id="w-1"),
    "move_to_waiting_children": fenced(),
    "observe_signals": held(),
    "progress": held(pct=5, message="half"),
    "read_exec_core_fields": about(names=["priority"]),
    "read_signal": signal,
    "read_steps": about(after_seq=0, limit=10),
    "record_step": fenced(step_key="s", result=b"r"),
    "read_stream": streamed(),
    "read_summary": streamed(),
    "read_wait_signals": past_wait,
    "read_waitpoint_token": waiting(),
    "read_waits": waits,
    "reclaim_execution": reclaim,
    "check_admission": _admission,
    "confirm_admission": _admission,
    "release_admission": _admission,
    "create_quota_policy": lambda _: _awaited({"quota_policy_id": new_uuid()}),
    "update_quota_policy": _quota_update,
    "get_quota_status": _quota,
    "read_quota_policy_limits": _quota,
    "list_quota_policies": fixed(),
    "reconcile_quota_counters": fixed(partition=0),
    "register_places": fixed(places={"{fp:0}": [LANE]}),
    "register_worker": a_worker,
    "release_unknown": held(kind="job"),
    "renew": held(),
    "renew_lease": fenced(lease_ttl_ms=TTL),
    "renew_many": _handles,
    "purge_execution": replayed,
    "replay_execution": replayed,
    "resume_execution": suspended,
    "revoke_lease": _named,
    "rotate_waitpoint_hmac_secret": fixed(partition=0, new_kid="k2", new_secret_hex=SECRET),
    "rotate_waitpoint_hmac_secret_all": fixed(new_kid="k2", new_secret_hex=SECRET),
    "scan_eligible_executions": _limited,
    "seed_at_boot": fixed(secret_hex=SECRET),
    "seed_waitpoint_hmac_secret": fixed(kid="k1", secret_hex=SECRET),
    "set_execution_tag": about(key="app.x", value="y"),
    "set_execution_tags": about(tags={"app.x": "y"}),
    "set_lane_config": fixed(lane_id=LANE, priority_weight_ms=5, placement="spread", shards=2),
    "set_lane_state": fixed(lane_id=LANE, state="active"),
    "diagnose": fixed(namespace="default"),
    "shutdown_prepare": fixed(grace_s=0.0),
    "subscribe": fixed(families=["completion"], options={}),
    **dict.fromkeys(
        (
            *("subscribe_completion", "subscribe_lease_history", "subscribe_signal_delivery"),
            *("subscribe_operator_events", "subscribe_flow_events"),
        ),
        fixed(options={"where": EventFilter(), "partitions": [0], "group": "g", "member": "m"}),
    ),
    "subscribe_worker_events": fixed(namespace="default"),
    "wait_ended": _ended,
    "wait_suspended": _ended,
    "suspend": suspend,
    "suspend_by_triple": suspend_by_triple,
    "tail_stream": streamed(),
    "unblock_execution": _held_back,
    "update_progress": fenced(progress_pct=5),
    "verify_and_deliver": waiting(token="presented", signal_name="go", options={}),
    "wait_children": held(),
    **dict.fromkeys(
        (
            *(
                "describe_execution",
                "explain_execution",
                "get_execution_namespace",
                "read_last_wait",
            ),
            *("get_execution_result", "get_execution_tags", "read_attempts", "read_outcome"),
            *("read_current_attempt_index", "read_execution_context", "read_execution_history"),
            *("read_execution_info", "read_execution_policy", "read_execution_state"),
            "read_total_attempt_count",
        ),
        READ,
    ),
    **dict.fromkeys(("claim_note", "put_note"), fixed(name="n", value=b"v", ttl_ms=TTL)),
    "extend_note": fixed(name="n", ttl_ms=TTL),
    **dict.fromkeys(("get_note", "drop_note"), fixed(name="n")),
    **BUDGET_CALLS,
    **FLOW_CALLS,
}
