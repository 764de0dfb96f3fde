"""Key names that only the functions build, for tests that look into the store."""

from __future__ import annotations

from collections.abc import Callable

from flowfabric.engine.valkey import keys

BELLS = "ff:idx:bells"
LISTENERS = "ff:idx:listeners"


def _of_execution(part: str) -> Callable[[str, str], str]:
    def name(tag: str, execution_id: str) -> str:
        return f"ff:exec:{tag}:{execution_id}:{part}"

    return name


steps = _of_execution("steps")
marks = _of_execution("suspension:current:satisfied_set")
satisfiers = _of_execution("suspension:current:satisfied_set:signals")
waitpoints = _of_execution("waitpoints")
signals = _of_execution("signals")


def _of_flow(part: str) -> Callable[[str, str], str]:
    def name(tag: str, flow_id: str) -> str:
        return f"ff:flow:{tag}:{flow_id}:{part}"

    return name


members = _of_flow("members")
member_ids = _of_flow("member_ids")
held = _of_flow("held")
exits = _of_flow("exits")


def out(tag: str, flow_id: str, execution_id: str) -> str:
    return f"ff:flow:{tag}:{flow_id}:out:{execution_id}"


def ledger(tag: str, budget_id: str, execution_id: str) -> str:
    return keys.budget_part(tag, budget_id, f"by_exec:{execution_id}")


def usage_mark(tag: str, budget_id: str, key: str) -> str:
    return f"ff:usagededup:{tag}:{budget_id}:{key}"


def settled(tag: str, budget_id: str, reservation_id: str) -> str:
    return f"ff:settled:{tag}:{budget_id}:{reservation_id}"


def stream_meta(tag: str, execution_id: str, number: int | str) -> str:
    return f"{keys.stream(tag, execution_id, number)}:meta"


def suspend_dedup(tag: str, execution_id: str) -> str:
    return f"ff:dedup:suspend:{tag}:{execution_id}"


def waitpoint_signals(tag: str, waitpoint_id: str) -> str:
    return f"{keys.waitpoint(tag, waitpoint_id)}:signals"


def signal_dedup(tag: str, waitpoint_id: str, key: str) -> str:
    return f"ff:sigdedup:{tag}:{waitpoint_id}:{key}"


def approval_dedup(tag: str, waitpoint_id: str, key: str) -> str:
    return signal_dedup(tag, "approval", f"{waitpoint_id}:{key}")


def idem(tag: str, namespace: str, key: str) -> str:
    return f"ff:idem:{tag}:{namespace}:{key}"


def quota_window(tag: str, quota_policy_id: str) -> str:
    return f"{keys.quota(tag, quota_policy_id)}:window:requests_per_window"


def quota_guards(tag: str, quota_policy_id: str) -> str:
    return f"{keys.quota(tag, quota_policy_id)}:guards"


def last_claim(tag: str, lane_id: str, instance: str) -> str:
    return keys.lane(tag, lane_id, f"claimed:{instance}")


def group(tag: str, name: str) -> str:
    return f"ff:part:{tag}:sub:{name}"


def group_members(tag: str, name: str) -> str:
    return f"ff:part:{tag}:members:{name}"


def group_start(tag: str, name: str) -> str:
    return f"ff:part:{tag}:start:{name}"


def worker_alive(tag: str, instance: str) -> str:
    return f"ff:worker:{tag}:{instance}:alive"
