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


def worker_leases(tag: str, instance: str) -> str:
    return f"ff:idx:{tag}:worker:{instance}:leases"


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
