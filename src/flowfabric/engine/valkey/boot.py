"""Preparing a deployment, and checking that a client can use one."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flowfabric.core.environment import flag, invalid, whole_number
from flowfabric.core.errors import ConfigError, ValidationError
from flowfabric.core.ids import validate_lanes
from flowfabric.core.partition import (
    CollisionGrade,
    LaneCollisions,
    PartitionCounts,
    lane_collisions,
)
from flowfabric.engine.api.secrets import SECRET_VARIABLE, check_secret
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.health import log_findings
from flowfabric.engine.valkey.library import ensure_library, read_primaries
from flowfabric.engine.valkey.places import keep_lanes
from flowfabric.engine.valkey.secrets import ValkeySecrets
from flowfabric.valkey.connect import check_server
from flowfabric.valkey.transport import Transport

log = logging.getLogger(__name__)
_LANES_VARIABLE = "FF_LANES"
MintSecret = Callable[[], str]
"""Makes a waitpoint secret for a deployment without a configured one."""
_FIELDS = ("num_flow_partitions", "num_budget_partitions", "num_quota_partitions")
# Creates all three counts atomically if absent, so that two first boots cannot mix theirs.
_CREATE_COUNTS = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[4], ARGV[2], ARGV[5], ARGV[3], ARGV[6])
end
return redis.call('HMGET', KEYS[1], ARGV[1], ARGV[2], ARGV[3])
"""
_LEVELS = {CollisionGrade.CLEAN: logging.DEBUG, CollisionGrade.WATCH: logging.INFO}
_SHOWN_GROUPS = 16


def configured_counts() -> PartitionCounts:
    return PartitionCounts(
        flow=whole_number(os.environ, "FF_FLOW_PARTITIONS", 256, 1, 65535),
        budget=whole_number(os.environ, "FF_BUDGET_PARTITIONS", 32, 1, 65535),
        quota=whole_number(os.environ, "FF_QUOTA_PARTITIONS", 32, 1, 65535),
    )


def configured_secret() -> str | None:
    if not (value := os.environ.get(SECRET_VARIABLE)):
        return None
    try:
        return check_secret(value)
    except ValidationError as error:
        # The detail names the rule; the value itself is never shown.
        raise invalid(SECRET_VARIABLE, error.detail) from None


def configured_dev_mode() -> bool:
    """Whether `FF_DEV_MODE` accepts a deployment that is not prepared."""
    return flag(os.environ, "FF_DEV_MODE")


def configured_lanes() -> list[str]:
    """The lanes that `FF_LANES` declares; they stay registered when empty."""
    if not (text := os.environ.get(_LANES_VARIABLE)):
        return ["default"]
    lanes = [lane for name in text.split(",") if (lane := name.strip())]
    if not lanes:
        raise invalid(_LANES_VARIABLE, "name at least one lane")
    if twice := sorted({lane for lane in lanes if lanes.count(lane) > 1}):
        raise invalid(_LANES_VARIABLE, f"{', '.join(twice)} is listed more than once")
    try:
        return list(validate_lanes(lanes))
    except ValidationError as error:
        raise invalid(_LANES_VARIABLE, error.detail) from None


def _stored(values: Sequence[Any]) -> tuple[int, ...]:
    """The stored counts; 0, which no configuration has, where one is missing or malformed."""
    return tuple(int(value) if value and value.isdigit() else 0 for value in values)


async def prepare(
    transport: Transport,
    counts: PartitionCounts,
    *,
    owned: bool = False,
    mint_secret: MintSecret | None = None,
) -> bool:
    """Set up a deployment: server version, counts, library, waitpoint secret, lanes.

    Returns whether the library was loaded. `mint_secret` makes a secret if there is none. `owned`:
    only processes of this project use the server, so a library of the same version with other
    content is replaced; it has the same calls and replies, so running processes go on.
    """
    secret, lanes = configured_secret(), configured_lanes()
    version = "{}.{}".format(*await check_server(transport))
    extra: dict[str, Any] = {"action": "version_accepted", "version": version}
    log.debug("Valkey %s is new enough", version, extra=extra)
    if secret is None and mint_secret is not None and not await _has_secret(transport):
        secret = check_secret(mint_secret())
    wanted = (counts.flow, counts.budget, counts.quota)
    key = keys.CONFIG_PARTITIONS
    command = ("EVAL", _CREATE_COUNTS, 1, key, *_FIELDS, *wanted)
    values: Any = await transport.call(*command, key=key, replay_safe=True)
    for field, stored, configured in zip(_FIELDS, _stored(values), wanted, strict=True):
        if stored != configured:
            difference = f"{field}: stored={stored}, config={configured}"
            raise ValidationError("partition_mismatch", difference)
    extra = {"action": "counts_validated", **dict(zip(_FIELDS, wanted, strict=True))}
    log.debug("the partition counts are those of the deployment", extra=extra)
    loaded = await ensure_library(transport, owned=owned)
    calls = FunctionCalls(transport, counts)
    if secret is not None:
        # Compare at every boot; a stored secret wins, and a difference is logged.
        await ValkeySecrets(calls).seed_at_boot(secret)
    await keep_lanes(calls, lanes)
    await log_findings(transport)
    return loaded


async def _has_secret(transport: Transport) -> bool:
    # By a plain command: the library may not be loaded yet.
    store = keys.secrets("{fp:0}")
    return await transport.call("HGET", store, "current_kid", key=store) is not None


async def join(transport: Transport, *, owned: bool = False) -> PartitionCounts:
    """Check the server's version, the counts and the library together, before a client uses them.

    A missing library is loaded, and an older one replaced if ours serves its callers too.
    """
    gate, counts, found = await asyncio.gather(
        # A client starts without its replicas; `prepare` checks them.
        check_server(transport, budget=0.0, replicas=False),
        read_counts(transport),
        read_primaries(transport),
        return_exceptions=True,
    )
    # Await in this order, because with another product the later errors would mislead.
    if isinstance(gate, BaseException):
        raise gate
    if isinstance(counts, BaseException):
        raise counts
    if isinstance(found, BaseException):
        raise found
    await ensure_library(transport, owned=owned, only_joining=True, found=found)
    return counts


async def read_counts(transport: Transport) -> PartitionCounts:
    """The counts of the deployment; raises when none are stored."""
    key = keys.CONFIG_PARTITIONS
    values: Any = await transport.call("HMGET", key, *_FIELDS, key=key)
    flow, budget, quota = _stored(values)
    unprepared_is_fine = configured_dev_mode()
    if 0 not in (flow, budget, quota):
        return PartitionCounts(flow=flow, budget=budget, quota=quota)
    if unprepared_is_fine:
        text = "partition counts are not stored, using the defaults (FF_DEV_MODE=1)"
        log.warning(text, extra={"action": "counts_not_stored"})
        return PartitionCounts()
    advice = "prepare it once with `flowfabric doctor --prepare`"
    problem = f"this Valkey holds no partition counts: {advice}"
    raise ConfigError("connect", problem, "partition_config")


async def find_collisions(
    transport: Transport, counts: PartitionCounts, lanes: Iterable[str]
) -> LaneCollisions:
    """Which of the lanes that are not spread share a partition."""
    stored: Any = await transport.call("HGETALL", keys.PLACEMENTS, key=keys.PLACEMENTS)
    # A pinned lane has one shard, even if it was spread before.
    spread = {
        name.decode(errors="replace")
        for name, placement in stored.items()
        if placement.split(b" ")[1:2] != [b"1"]
    }
    return lane_collisions(lanes, counts, spread)


async def report_collisions(transport: Transport, counts: PartitionCounts) -> None:
    members: Any = await transport.call("SMEMBERS", keys.LANES, key=keys.LANES)
    lanes = [member.decode(errors="replace") for member in members]
    found = await find_collisions(transport, counts, lanes)
    groups = list(found.shared.values())[:_SHOWN_GROUPS]
    shown = "; ".join(", ".join(group) for group in groups) or "none"
    numbers = {"grade": found.grade.value, "lanes": found.lanes, "affected": found.affected}
    log.log(
        _LEVELS.get(found.grade, logging.WARNING),
        *("%d of %d pinned lanes share a partition: %s", found.affected, found.lanes, shown),
        extra={"action": "lane_collisions", **numbers, "shared": groups},
    )
