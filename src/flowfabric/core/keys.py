"""Key names that Python reads or writes by itself; `lua/lib/20_keys.lua` builds the same ones."""

from __future__ import annotations

__all__ = [
    "CONFIG_PARTITIONS",
    "LANES",
    "NAMESPACES",
    "PARTITIONS",
    "attempt",
    "core",
    "eligible",
    "events",
    "grant",
    "history",
    "idem",
    "index",
    "lane",
    "lane_config",
    "lane_of",
    "lane_part",
    "last_claim",
    "payload",
    "policy",
    "result",
    "steps",
    "tags",
    "unresolved",
    "wake",
    "worker_leases",
]

CONFIG_PARTITIONS = "ff:config:partitions"
LANES = "ff:idx:lanes"
NAMESPACES = "ff:idx:namespaces"
PARTITIONS = "ff:idx:partitions"
"""Flow partitions that hold or held work; scanners visit no others."""


def lane_part(lane: str) -> str:
    """A lane name as one part of a key: `:` separates parts, so it is escaped."""
    return lane.replace("%", "%25").replace(":", "%3A") if ":" in lane or "%" in lane else lane


def lane_of(part: str) -> str:
    """The lane that `lane_part` made a part of a key."""
    return part.replace("%3A", ":").replace("%25", "%")


def _exec(tag: str, execution_id: str, part: str) -> str:
    return f"ff:exec:{tag}:{execution_id}:{part}"


def core(tag: str, execution_id: str) -> str:
    """The execution record."""
    return _exec(tag, execution_id, "core")


def payload(tag: str, execution_id: str) -> str:
    """The input bytes; absent when empty."""
    return _exec(tag, execution_id, "payload")


def result(tag: str, execution_id: str) -> str:
    """The result bytes; absent when the execution returned none."""
    return _exec(tag, execution_id, "result")


def policy(tag: str, execution_id: str) -> str:
    """The policy JSON frozen at creation."""
    return _exec(tag, execution_id, "policy")


def tags(tag: str, execution_id: str) -> str:
    """The user's tags."""
    return _exec(tag, execution_id, "tags")


def history(tag: str, execution_id: str) -> str:
    """The newest unusual lease events."""
    return _exec(tag, execution_id, "history")


def grant(tag: str, execution_id: str) -> str:
    """The one pending claim, resume or reclaim grant."""
    return _exec(tag, execution_id, "claim_grant")


def steps(tag: str, execution_id: str) -> str:
    """Durable step records."""
    return _exec(tag, execution_id, "steps")


def unresolved(tag: str, execution_id: str) -> str:
    """Edges this execution still waits for."""
    return _exec(tag, execution_id, "deps:unresolved")


def attempt(tag: str, execution_id: str, number: int | str) -> str:
    """An earlier attempt, kept once the record describes a later one."""
    return f"ff:attempt:{tag}:{execution_id}:{number}"


def idem(tag: str, namespace: str, key: str) -> str:
    """Which execution an idempotency key stands for."""
    return f"ff:idem:{tag}:{namespace}:{key}"


def index(tag: str, name: str) -> str:
    """A partition-wide index."""
    return f"ff:idx:{tag}:{name}"


def lane(tag: str, lane_id: str, name: str) -> str:
    """An index of one lane in one partition."""
    return f"ff:idx:{tag}:lane:{lane_part(lane_id)}:{name}"


def eligible(tag: str, lane_id: str, signature: str = "") -> str:
    """Claimable executions with one set of required capabilities."""
    return lane(tag, lane_id, f"eligible:{signature}" if signature else "eligible")


def worker_leases(tag: str, instance: str) -> str:
    """Executions leased by one worker process."""
    return f"ff:idx:{tag}:worker:{instance}:leases"


def last_claim(tag: str, lane_id: str, instance: str) -> str:
    """What a worker process claimed last, so that a repeated request finds its answer."""
    return lane(tag, lane_id, f"claimed:{instance}")


def events(tag: str) -> str:
    """The partition's event feed."""
    return f"ff:part:{tag}:events"


def wake(lane_id: str) -> str:
    """The doorbell of a lane on a single server."""
    return f"ff:wake:{lane_id}"


def lane_config(lane_id: str) -> str:
    """The lane's settings; each partition keeps a copy."""
    return f"ff:lane:{lane_id}:config"
