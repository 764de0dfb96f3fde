"""Checks of a prepared deployment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sized
from typing import Any

from flowfabric.cli.checks.server import server_seconds
from flowfabric.cli.reads.workers import read_live_workers
from flowfabric.cli.views.text import plural
from flowfabric.core.partition import CollisionGrade, PartitionCounts, lane_collisions
from flowfabric.core.text import lossless, shown
from flowfabric.engine.api.workers import WorkerEntry
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.boot import configured_counts
from flowfabric.engine.valkey.health import Finding, Grade

_SAMPLE = 1000
_COUNT_VARIABLES = ("FF_FLOW_PARTITIONS", "FF_BUDGET_PARTITIONS", "FF_QUOTA_PARTITIONS")


async def check_deployment(backend: ValkeyBackend, namespace: str | None) -> list[Finding]:
    """Run the checks that need the partition counts."""
    now = round(1000 * await server_seconds(backend.transport))
    lanes = await backend.places.lanes_in_use()
    workers = await read_live_workers(backend, now, namespace)
    leader = await _leader(backend)
    return [
        await _partitions(backend),
        await _tokens(backend),
        await _lanes(backend, lanes),
        _collisions(lanes, backend.counts),
        await _workers(backend, lanes, workers),
        leader,
        await _indexes(backend),
    ]


async def _malformed(
    backend: ValkeyBackend, registry: str, read: Callable[[], Awaitable[Sized]]
) -> Finding | None:
    """A finding if a registry holds names that it cannot hold; scanners and listings skip them."""
    stored: Any = await backend.transport.call("SCARD", registry, key=registry)
    # Read second, so that a name registered in between does not count as malformed.
    odd = stored - len(await read())
    if odd <= 0:
        return None
    return Finding(
        registry.rpartition(":")[2],
        Grade.BROKEN,
        f"{registry} holds {plural(odd, 'malformed name')}",
        f"list them with SMEMBERS {registry} and remove them with SREM",
    )


async def _partitions(backend: ValkeyBackend) -> Finding:
    counts = backend.counts
    stored = f"{counts.flow} flow, {counts.budget} budget, {counts.quota} quota"
    if any(os.environ.get(name) for name in _COUNT_VARIABLES):
        configured = configured_counts()
        if configured != counts:
            wanted = f"{configured.flow}, {configured.budget}, {configured.quota}"
            return Finding(
                "partitions",
                Grade.BROKEN,
                f"{stored} are stored, but the environment sets {wanted}",
                f"unset {', '.join(_COUNT_VARIABLES)}: the stored counts cannot change",
            )
    odd = await _malformed(backend, keys.PARTITIONS, backend.places.partitions_in_use)
    return odd or Finding("partitions", Grade.OK, stored)


async def _tokens(backend: ValkeyBackend) -> Finding:
    names = [keys.secrets(f"{{fp:{index}}}") for index in range(backend.counts.flow)]
    found: list[Any] = await asyncio.gather(
        *(backend.transport.call("HGET", name, "current_kid", key=name) for name in names)
    )
    kids = sorted({kid.decode(errors="replace") for kid in found if kid is not None})
    missing = found.count(None)
    if not missing:
        return Finding("tokens", Grade.OK, f"signed with {', '.join(kids)}")
    where = "the server" if missing == len(found) else plural(missing, "partition")
    return Finding(
        "tokens",
        Grade.WARNING,
        f"no secret to sign tokens on {where}: handlers there cannot wait for answers",
        "set FF_WAITPOINT_HMAC_SECRET, for example to the output of `openssl rand -hex 32`, and "
        "run `flowfabric doctor --prepare`",
    )


async def _lanes(backend: ValkeyBackend, lanes: list[str]) -> Finding:
    odd = await _malformed(backend, keys.LANES, backend.places.lanes_in_use)
    if odd is not None:
        return odd
    stopped: list[str] = []
    for lane in lanes:
        settings = await backend.lanes.get_lane(lane)
        if settings.state != "active":
            reason = f" ({settings.reason})" if settings.reason else ""
            stopped.append(f"{lane} is {settings.state}{reason}")
    shown = ", ".join(lane for lane in lanes[:8]) + (", …" if len(lanes) > 8 else "")
    if stopped:
        detail = f"{plural(len(lanes), 'lane')}; {', '.join(stopped)}"
        return Finding(
            "lanes", Grade.WARNING, detail, "reactivate them when their work may continue"
        )
    return Finding("lanes", Grade.OK, f"{plural(len(lanes), 'lane')}: {shown}")


def _collisions(lanes: list[str], counts: PartitionCounts) -> Finding:
    found = lane_collisions(lanes, counts)
    if found.grade is CollisionGrade.CLEAN:
        return Finding("lane placement", Grade.OK, "no two lanes share a partition")
    groups = "; ".join(" + ".join(group) for group in found.shared.values())
    serious = found.grade in (CollisionGrade.ELEVATED, CollisionGrade.REMEDIATE)
    return Finding(
        "lane placement",
        Grade.WARNING if serious else Grade.OK,
        f"{found.grade.value}: {found.affected} of {found.lanes} lanes share one ({groups})",
        "rename one lane of each group if they carry much work" if serious else "",
    )


async def _workers(backend: ValkeyBackend, lanes: list[str], workers: list[WorkerEntry]) -> Finding:
    served = {lane for worker in workers for lane in worker.lanes}
    waiting = [lane for lane in lanes if lane not in served and await _holds_work(backend, lane)]
    if waiting:
        return Finding(
            "workers",
            Grade.WARNING,
            f"{plural(len(workers), 'live worker')}; no worker serves "
            f"{', '.join(waiting)}, where work waits",
            f"run `flowfabric worker module:app --lanes {','.join(waiting)}`",
        )
    if not workers:
        advice = "run `flowfabric worker module:app`"
        return Finding("workers", Grade.WARNING, "no live worker: nothing runs", advice)
    return Finding("workers", Grade.OK, plural(len(workers), "live worker"))


async def _holds_work(backend: ValkeyBackend, lane: str) -> bool:
    tags = await backend.places.used_partitions()
    # In a cluster this is expensive to find out, and `find_work` names every partition.
    return (
        bool(tags)
        and not backend.transport.is_cluster
        and await backend.wakeups.find_work(lane, tags) != []
    )


async def _leader(backend: ValkeyBackend) -> Finding:
    leaders = await backend.leadership.leaders()
    if leaders:
        who = ", ".join(
            f"{leader.process}{' for its part' if leader.partial else ''}" for leader in leaders
        )
        return Finding("scanners", Grade.OK, f"run by {who} (host:pid)")
    return Finding(
        "scanners",
        Grade.WARNING,
        "none run: expired leases, retries and deadlines are not handled",
        "run a worker without --no-scanners",
    )


async def _indexes(backend: ValkeyBackend) -> Finding:
    examined = 0
    drifted: list[str] = []
    for tag in await backend.places.used_partitions():
        key = keys.index(tag, "all_executions")
        members: Any = await backend.transport.call(
            "ZRANGE", key, 0, _SAMPLE - examined - 1, key=key
        )
        ids = [lossless(member) for member in members]
        examined += len(ids)
        drifted += await _inconsistent(backend, tag, ids)
        if examined >= _SAMPLE:
            break
    detail = f"{plural(examined, 'execution')} examined"
    if not drifted:
        return Finding("indexes", Grade.OK, f"{detail}, all indexes match their records")
    return Finding(
        "indexes",
        Grade.BROKEN,
        f"{detail}, {len(drifted)} differ from their index, such as {shown(drifted[0])}",
        "the scanners repair this within two minutes; if it persists, report it",
    )


async def _inconsistent(backend: ValkeyBackend, tag: str, ids: list[str]) -> list[str]:
    if not ids:
        return []
    verdicts = await backend.upkeep.reconcile_execution_index(tag, ids, "check")
    return [each for each, verdict in zip(ids, verdicts, strict=True) if verdict != "consistent"]
