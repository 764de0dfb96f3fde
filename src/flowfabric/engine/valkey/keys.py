"""Every key name. `lua/lib/20_keys.lua` builds the same ones; a test compares the two."""

from __future__ import annotations

from collections.abc import Callable

CONFIG_PARTITIONS = "ff:config:partitions"
LANES = "ff:idx:lanes"
LANES_TAG = f"{{{LANES}}}"
PLACES = f"ff:idx:{LANES_TAG}:places"
"""Which lanes are in use in which partitions; in the slot of the lane registry."""
NAMESPACES = "ff:idx:namespaces"
PARTITIONS = "ff:idx:partitions"
"""Flow partitions that hold or held work; scanners visit no others."""
LEADERS_TAG = "{scanners}"

_EVENTS = ("ff:part:", ":events")
_WAKE = "ff:wake:"


def lane_part(lane: str) -> str:
    """A lane name with `:` escaped, which separates the parts of a key."""
    return lane.replace("%", "%25").replace(":", "%3A") if ":" in lane or "%" in lane else lane


def lane_of(part: str) -> str:
    """The lane that `lane_part` escaped."""
    return part.replace("%3A", ":").replace("%25", "%")


def _of_execution(part: str) -> Callable[[str, str], str]:
    def name(tag: str, execution_id: str) -> str:
        return f"ff:exec:{tag}:{execution_id}:{part}"

    return name


core = _of_execution("core")
payload = _of_execution("payload")
result = _of_execution("result")
policy = _of_execution("policy")
"""The policy JSON frozen at creation."""
tags = _of_execution("tags")
history = _of_execution("history")
"""The newest unusual lease events."""
grant = _of_execution("claim_grant")
"""The one pending claim, resume or reclaim grant."""
steps = _of_execution("steps")
unresolved = _of_execution("deps:unresolved")
"""Edges this execution still waits for."""
suspension = _of_execution("suspension:current")
"""The current or the last suspension."""
marks = _of_execution("suspension:current:satisfied_set")
"""How far the condition of a suspension is met."""
satisfiers = _of_execution("suspension:current:satisfied_set:signals")
"""The signals that contributed to it."""
met = _of_execution("suspension:met")
"""The last suspension whose condition was met before it began."""
waitpoints = _of_execution("waitpoints")
pending_waitpoints = _of_execution("waitpoints:pending")
"""Those that no suspension has used yet."""
signals = _of_execution("signals")


def attempt(tag: str, execution_id: str, number: int | str) -> str:
    """An earlier attempt, kept once the record describes a later one."""
    return f"ff:attempt:{tag}:{execution_id}:{number}"


def summary(tag: str, execution_id: str, number: int | str) -> str:
    """The rolling summary of an attempt's output."""
    return f"{attempt(tag, execution_id, number)}:summary"


def stream(tag: str, execution_id: str, number: int | str) -> str:
    """The output frames of an attempt."""
    return f"ff:stream:{tag}:{execution_id}:{number}"


def stream_meta(tag: str, execution_id: str, number: int | str) -> str:
    """How much an attempt has written, and how its stream ended."""
    return f"{stream(tag, execution_id, number)}:meta"


def stream_closed(tag: str, execution_id: str, number: int | str) -> str:
    """Wakes the followers of a stream when it ends."""
    return f"{stream(tag, execution_id, number)}:closed"


def suspend_dedup(tag: str, execution_id: str) -> str:
    """The outcomes of an execution's suspensions, by idempotency key."""
    return f"ff:dedup:suspend:{tag}:{execution_id}"


def waitpoint(tag: str, waitpoint_id: str) -> str:
    """One waitpoint."""
    return f"ff:wp:{tag}:{waitpoint_id}"


def waitpoint_signals(tag: str, waitpoint_id: str) -> str:
    """The signals a waitpoint received."""
    return f"{waitpoint(tag, waitpoint_id)}:signals"


def signal(execution_id: str, signal_id: str) -> str:
    """One accepted signal; the execution id begins with the tag."""
    return f"ff:signal:{execution_id}:{signal_id}"


def signal_payload(execution_id: str, signal_id: str) -> str:
    """The payload of a signal."""
    return f"{signal(execution_id, signal_id)}:payload"


def signal_dedup(tag: str, waitpoint_id: str, key: str) -> str:
    """The signal of a waitpoint that an idempotency key stands for."""
    return f"ff:sigdedup:{tag}:{waitpoint_id}:{key}"


def approval_dedup(tag: str, waitpoint_id: str, key: str) -> str:
    """The same for approvals; token holders cannot reach it."""
    return signal_dedup(tag, "approval", f"{waitpoint_id}:{key}")


def secrets(tag: str) -> str:
    """The partition's copy of the secrets that sign waitpoint tokens."""
    return f"ff:sec:{tag}:waitpoint_hmac"


def idem(tag: str, namespace: str, key: str) -> str:
    """The execution that an idempotency key stands for."""
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


def reclaimable(tag: str, lane_id: str, signature: str = "") -> str:
    """Executions that lost their worker, with one set of required capabilities."""
    return lane(tag, lane_id, f"reclaimable:{signature}" if signature else "reclaimable")


def worker_leases(tag: str, instance: str) -> str:
    """Executions leased by one worker process."""
    return f"ff:idx:{tag}:worker:{instance}:leases"


def last_claim(tag: str, lane_id: str, instance: str) -> str:
    """The last claim of a worker process, for the repeat of a lost reply."""
    return lane(tag, lane_id, f"claimed:{instance}")


def events(tag: str) -> str:
    """The partition's event feed."""
    return tag.join(_EVENTS)


def events_tag(feed: str) -> str:
    """The tag of a partition's event feed."""
    before, after = _EVENTS
    return feed.removeprefix(before).removesuffix(after)


def group(tag: str, name: str) -> str:
    """What a subscription group has processed of the partition's feed, and who reads it."""
    return f"ff:part:{tag}:sub:{name}"


def group_members(tag: str, name: str) -> str:
    """The live members of a subscription group."""
    return f"ff:part:{tag}:members:{name}"


def group_start(tag: str, name: str) -> str:
    """The cursor that a subscription group started from."""
    return f"ff:part:{tag}:start:{name}"


def workers(tag: str) -> str:
    """The registered worker processes of a namespace, which is their tag."""
    return index(tag, "workers")


def worker_alive(tag: str, instance: str) -> str:
    """Exists while a worker process sends heartbeats."""
    return f"ff:worker:{tag}:{instance}:alive"


def worker_record(tag: str, instance: str) -> str:
    """What a worker process serves and offers."""
    return f"ff:worker:{tag}:{instance}:caps"


def worker_events(tag: str) -> str:
    """Which worker processes came and went."""
    return f"ff:worker:{tag}:events"


def leader(tag: str, duty: str) -> str:
    """The lease of the process that runs scanners; `duty` is empty if it runs all of them."""
    return f"ff:leader:{tag}:{duty}" if duty else f"ff:leader:{tag}"


def leaders(tag: str) -> str:
    """The duties of processes that run only some scanners, or scan only some executions."""
    return f"ff:leader:{tag}:duties"


def wake(lane_id: str) -> str:
    """The doorbell of a lane on a single server."""
    return f"{_WAKE}{lane_id}"


def wake_channel(tag: str) -> str:
    """The doorbell of a partition in a cluster; the message is the lane."""
    return f"{_WAKE}{tag}"


def wake_tag(channel: str) -> str:
    """The tag of a partition's doorbell."""
    return channel.removeprefix(_WAKE)


def lane_config(lane_id: str) -> str:
    """The lane's settings; each partition keeps a copy."""
    return f"ff:lane:{lane_id}:config"
