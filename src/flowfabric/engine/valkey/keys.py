"""The key names that Python reads. `lua/lib/20_keys.lua` builds them too; a test compares both."""

from collections.abc import Callable

CONFIG_PARTITIONS = "ff:config:partitions"
LANES = "ff:idx:lanes"
LANES_TAG = f"{{{LANES}}}"
PLACES = f"ff:idx:{LANES_TAG}:places"
PLACEMENTS = f"ff:idx:{LANES_TAG}:placements"
"""Which lanes are in use in which partitions; in the slot of the lane registry."""
NAMESPACES = "ff:idx:namespaces"
DRAINS = "ff:idx:drains"
"""Namespaces in which workers are being drained."""
PARTITIONS = "ff:idx:partitions"
"""Flow partitions that hold or held work; scanners only visit these."""
LEADERS_TAG = "{scanners}"
LEADER_REPORT = f"ff:leader:{LEADERS_TAG}:report"
"""The report of the process that runs all scanners."""
_WAKE = "ff:wake:"
_BELL_MARK = "\x1f"
"""Separates lane and signature; lane names have no control characters."""


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
suspension = _of_execution("suspension:current")
"""The current or the last suspension."""
met = _of_execution("suspension:met")
"""The last suspension whose condition was met before it began."""
pending_waitpoints = _of_execution("waitpoints:pending")
"""Waitpoints that no suspension has used yet."""


def _of_flow(part: str) -> Callable[[str, str], str]:
    def name(tag: str, flow_id: str) -> str:
        return f"ff:flow:{tag}:{flow_id}:{part}"

    return name


flow = _of_flow("core")
flow_tags = _of_flow("tags")
edges = _of_flow("edges")
"""The child of each edge."""


def into(tag: str, flow_id: str, execution_id: str) -> str:
    """The edges that lead to a member."""
    return f"ff:flow:{tag}:{flow_id}:in:{execution_id}"


def attempt(tag: str, execution_id: str, number: int | str) -> str:
    """An earlier attempt, kept when the record describes a later one."""
    return f"ff:attempt:{tag}:{execution_id}:{number}"


def summary(tag: str, execution_id: str, number: int | str) -> str:
    """The rolling summary of an attempt's output."""
    return f"{attempt(tag, execution_id, number)}:summary"


def stream(tag: str, execution_id: str, number: int | str) -> str:
    """The output frames of an attempt."""
    return f"ff:stream:{tag}:{execution_id}:{number}"


def stream_closed(tag: str, execution_id: str, number: int | str) -> str:
    """Wakes the followers of a stream when it ends."""
    return f"{stream(tag, execution_id, number)}:closed"


def waitpoint(tag: str, waitpoint_id: str) -> str:
    """One waitpoint."""
    return f"ff:wp:{tag}:{waitpoint_id}"


def signal(execution_id: str, signal_id: str) -> str:
    """One accepted signal; the execution id begins with the tag."""
    return f"ff:signal:{execution_id}:{signal_id}"


def signal_payload(execution_id: str, signal_id: str) -> str:
    """The payload of a signal."""
    return f"{signal(execution_id, signal_id)}:payload"


def secrets(tag: str) -> str:
    """The partition's copy of the secrets that sign waitpoint tokens."""
    return f"ff:sec:{tag}:waitpoint_hmac"


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


def budget(tag: str, budget_id: str) -> str:
    """The definition of a budget, whose tag is `{b:M}`."""
    return f"ff:budget:{tag}:{budget_id}"


def budget_part(tag: str, budget_id: str, part: str) -> str:
    """What a budget counts, and who holds or waits for it."""
    return f"{budget(tag, budget_id)}:{part}"


def events(tag: str) -> str:
    """The partition's event feed."""
    return f"ff:part:{tag}:events"


def quota(tag: str, quota_policy_id: str) -> str:
    """A quota policy; its tag is `{q:K}`."""
    return f"ff:quota:{tag}:{quota_policy_id}"


def quota_slots(tag: str, quota_policy_id: str) -> str:
    """Executions with a slot, and when it ends."""
    return f"{quota(tag, quota_policy_id)}:admitted_set"


def quota_blocked(tag: str, quota_policy_id: str) -> str:
    """Executions that may wait for the policy, by the time since when."""
    return f"{quota(tag, quota_policy_id)}:blocked"


def workers(tag: str) -> str:
    """The registered worker processes of a namespace, which is their tag."""
    return index(tag, "workers")


def drains(tag: str) -> str:
    """The worker processes of a namespace that are being drained, by the end of that."""
    return index(tag, "drains")


def worker_leases(tag: str, instance: str) -> str:
    """The executions of a partition that a worker process holds."""
    return index(tag, f"worker:{instance}:leases")


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


def bell(lane_id: str, signature: str = "") -> str:
    """The name of a bell: of a lane, or of its work with one signature."""
    return f"{lane_id}{_BELL_MARK}{signature}" if signature else lane_id


def bell_parts(name: str) -> tuple[str, str]:
    """The lane and the signature of a bell."""
    lane_id, _, signature = name.partition(_BELL_MARK)
    return lane_id, signature


def ear(listener: str) -> str:
    """The channel that announces new bells to a listener."""
    return f"{_WAKE}{_BELL_MARK}{listener}"


def wake(place: str) -> str:
    """The doorbell of a bell; in a cluster, of a partition's tag: it calls all listeners."""
    return f"{_WAKE}{place}"


def own_wake(tag: str, listener: str) -> str:
    """In a cluster: where a partition wakes one listener. The message is the bell."""
    return f"{_WAKE}{tag}:{listener}"


def wake_tag(channel: str) -> str:
    """The tag of the partition that rings on a channel."""
    return channel[len(_WAKE) : channel.index("}") + 1]


def lane_config(tag: str, lane_id: str) -> str:
    """The lane's settings, in the slot of the lane registry; each partition keeps a copy."""
    return f"ff:lane:{tag}:{lane_part(lane_id)}:config"


def note(name: str) -> str:
    """A small value that server processes share."""
    return f"ff:http:{name}"
