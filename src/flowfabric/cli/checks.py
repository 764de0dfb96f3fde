"""What `flowfabric doctor` looks at, one check a function."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sized
from typing import Any

from flowfabric.cli.fleet import live_workers, server_now_ms
from flowfabric.cli.words import clean, duration, plural
from flowfabric.core import keys
from flowfabric.core.errors import EngineError
from flowfabric.core.partition import CollisionGrade, PartitionCounts, lane_collisions
from flowfabric.core.text import lossless, shown
from flowfabric.engine.backend import Backend
from flowfabric.engine.boot import configured_counts
from flowfabric.engine.health import Finding, Grade, health_findings
from flowfabric.engine.registry import WorkerEntry
from flowfabric.scanners.leader import read_leaders
from flowfabric.valkey.connect import MINIMUM_VERSION, check_server
from flowfabric.valkey.library import LIBRARY_VERSION, library_fits, read_library
from flowfabric.valkey.transport import Transport

__all__ = ["check_deployment", "check_server_side"]

_SAMPLE = 1000
_SKEW_MS = 1000
_VERSION_BUDGET_S = 1.0
_COUNT_VARIABLES = ("FF_FLOW_PARTITIONS", "FF_BUDGET_PARTITIONS", "FF_QUOTA_PARTITIONS")


def _failed(name: str, error: EngineError) -> Finding:
    return Finding(name, Grade.BROKEN, str(error).partition(" — ")[0], error.hint)


# --- the server -------------------------------------------------------------------------------


async def check_server_side(transport: Transport, *, owned: bool = False) -> list[Finding]:
    """What can be said of the server alone, whether or not it was prepared."""
    checks = [await _connection(transport), await _version(transport)]
    if checks[-1].grade is Grade.BROKEN:
        return checks
    library = await _library(transport, owned=owned)
    return [*checks, library, *await health_findings(transport), await _skew(transport)]


async def _connection(transport: Transport) -> Finding:
    started = time.perf_counter()
    await transport.call("PING", key="", replay_safe=True)
    took = (time.perf_counter() - started) * 1000
    return Finding("connection", Grade.OK, f"answers in {took:.1f} ms")


async def _version(transport: Transport) -> Finding:
    needed = ".".join(map(str, MINIMUM_VERSION))
    try:
        version = await check_server(transport, budget=_VERSION_BUDGET_S)
    except EngineError as error:
        return _failed("version", error)
    found = ".".join(map(str, version))
    return Finding("version", Grade.OK, f"Valkey {found} ({needed} or newer is needed)")


async def _library(transport: Transport, *, owned: bool) -> Finding:
    stored = await read_library(transport)
    if stored is None:
        advice = "run `flowfabric doctor --prepare`; a worker would load it too"
        return Finding("functions", Grade.WARNING, "the function library is not loaded", advice)
    found = f"version {stored.version}, content {stored.content_hash}"
    if stored.version < LIBRARY_VERSION:
        advice = "run `flowfabric doctor --prepare` to load ours; older processes can still use it"
        detail = f"{found}; this program has version {LIBRARY_VERSION}"
        return Finding("functions", Grade.WARNING, detail, advice)
    try:
        fits = await library_fits(transport, owned=owned)
    except EngineError as error:
        return _failed("functions", error)
    if fits:
        return Finding("functions", Grade.OK, found)
    return Finding(
        "functions",
        Grade.WARNING,
        f"{found}; this program has other content or settings",
        "run `flowfabric doctor --prepare` to load ours",
    )


async def _skew(transport: Transport) -> Finding:
    before = time.time()
    reply: Any = await transport.call("TIME", key="")
    after = time.time()
    server = int(reply[0]) + int(reply[1]) / 1_000_000
    # Anything inside the round trip may be its own delay.
    skew_ms = round(1000 * (server - min(max(server, before), after)))
    if abs(skew_ms) < _SKEW_MS:
        return Finding(
            "clock skew", Grade.OK, f"{abs(skew_ms)} ms between the server and this host"
        )
    side = "ahead of" if skew_ms > 0 else "behind"
    return Finding(
        "clock skew",
        Grade.WARNING,
        f"the server's clock is {duration(abs(skew_ms))} {side} this host's",
        "synchronise both with NTP: durations count on the server, but a point in time that a "
        "program works out here is this host's",
    )


# --- the deployment ---------------------------------------------------------------------------


async def check_deployment(backend: Backend, namespace: str | None) -> list[Finding]:
    """What can be said once the partition counts are known."""
    now = await server_now_ms(backend)
    lanes = await backend.lanes_in_use()
    workers = await live_workers(backend, now, namespace)
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
    backend: Backend, registry: str, read: Callable[[], Awaitable[Sized]]
) -> Finding | None:
    """Names that nobody can have registered; scanners and listings leave them out."""
    stored: Any = await backend.transport.call("SCARD", registry, key=registry)
    # Read second: what is registered in between is not malformed.
    odd = stored - len(await read())
    if odd <= 0:
        return None
    return Finding(
        registry.rpartition(":")[2],
        Grade.BROKEN,
        f"{registry} holds {plural(odd, 'malformed name')}",
        f"find them with SMEMBERS {registry}, and take them out with SREM",
    )


async def _partitions(backend: Backend) -> Finding:
    counts = backend.counts
    stored = f"{counts.flow} flow, {counts.budget} budget, {counts.quota} quota"
    if any(os.environ.get(name) for name in _COUNT_VARIABLES):
        configured = configured_counts()
        if configured != counts:
            wanted = f"{configured.flow}, {configured.budget}, {configured.quota}"
            return Finding(
                "partitions",
                Grade.BROKEN,
                f"{stored} are stored, the environment asks for {wanted}",
                f"unset {', '.join(_COUNT_VARIABLES)}: the counts never change",
            )
    odd = await _malformed(backend, keys.PARTITIONS, backend.partitions_in_use)
    return odd or Finding("partitions", Grade.OK, stored)


async def _tokens(backend: Backend) -> Finding:
    """Each partition signs the tokens of its own waitpoints."""
    names = [keys.secrets(f"{{fp:{index}}}") for index in range(backend.counts.flow)]
    found: list[Any] = await asyncio.gather(
        *(backend.transport.call("HGET", name, "current_kid", key=name) for name in names)
    )
    kids = sorted({kid.decode(errors="replace") for kid in found if kid is not None})
    missing = found.count(None)
    if not missing:
        return Finding("tokens", Grade.OK, f"signed with {clean(', '.join(kids))}")
    where = "the server" if missing == len(found) else plural(missing, "partition")
    return Finding(
        "tokens",
        Grade.WARNING,
        f"no secret signs tokens on {where}: handlers there cannot wait for answers",
        "set FF_WAITPOINT_HMAC_SECRET, for example to what `openssl rand -hex 32` prints, and run "
        "`flowfabric doctor --prepare`",
    )


async def _lanes(backend: Backend, lanes: list[str]) -> Finding:
    odd = await _malformed(backend, keys.LANES, backend.lanes_in_use)
    if odd is not None:
        return odd
    stopped: list[str] = []
    for lane in lanes:
        settings = await backend.get_lane(lane)
        if settings.state != "active":
            reason = f" ({clean(settings.reason)})" if settings.reason else ""
            stopped.append(f"{clean(lane)} is {settings.state}{reason}")
    shown = ", ".join(clean(lane) for lane in lanes[:8]) + (", …" if len(lanes) > 8 else "")
    if stopped:
        detail = f"{plural(len(lanes), 'lane')}; {', '.join(stopped)}"
        return Finding(
            "lanes", Grade.WARNING, detail, "activate them again when their work may go on"
        )
    return Finding("lanes", Grade.OK, f"{plural(len(lanes), 'lane')}: {shown}")


def _collisions(lanes: list[str], counts: PartitionCounts) -> Finding:
    found = lane_collisions(lanes, counts)
    if found.grade is CollisionGrade.CLEAN:
        return Finding("lane placement", Grade.OK, "clean: no two lanes share a partition")
    groups = "; ".join(" + ".join(map(clean, group)) for group in found.shared.values())
    serious = found.grade in (CollisionGrade.ELEVATED, CollisionGrade.REMEDIATE)
    return Finding(
        "lane placement",
        Grade.WARNING if serious else Grade.OK,
        f"{found.grade.value}: {found.affected} of {found.lanes} lanes share one ({groups})",
        "rename one lane of each group if they carry much work" if serious else "",
    )


async def _workers(backend: Backend, lanes: list[str], workers: list[WorkerEntry]) -> Finding:
    served = {lane for worker in workers for lane in worker.lanes}
    waiting = [
        clean(lane) for lane in lanes if lane not in served and await _holds_work(backend, lane)
    ]
    if waiting:
        return Finding(
            "workers",
            Grade.WARNING,
            f"{plural(len(workers), 'live worker')}; work waits in {', '.join(waiting)}, "
            "which nobody serves",
            f"run `flowfabric worker module:app --lanes {','.join(waiting)}`",
        )
    if not workers:
        advice = "run `flowfabric worker module:app`"
        return Finding("workers", Grade.WARNING, "no live worker: nothing is run", advice)
    return Finding("workers", Grade.OK, plural(len(workers), "live worker"))


async def _holds_work(backend: Backend, lane: str) -> bool:
    tags = await backend.used_partitions()
    # In a cluster the engine cannot tell cheaply, and says so by answering yes.
    return bool(tags) and not backend.transport.is_cluster and await backend.any_work(lane, tags)


async def _leader(backend: Backend) -> Finding:
    leaders = await read_leaders(backend)
    if leaders:
        who = ", ".join(
            f"{clean(leader.process)}{' for its part' if leader.partial else ''}"
            for leader in leaders
        )
        return Finding("scanners", Grade.OK, f"run by {who} (host:pid)")
    return Finding(
        "scanners",
        Grade.WARNING,
        "nobody runs them: lost leases, retries and deadlines are not acted upon",
        "run a worker without --no-scanners",
    )


async def _indexes(backend: Backend) -> Finding:
    looked = 0
    drifted: list[str] = []
    for tag in await backend.used_partitions():
        key = keys.index(tag, "all_executions")
        members: Any = await backend.transport.call("ZRANGE", key, 0, _SAMPLE - looked - 1, key=key)
        ids = [lossless(member) for member in members]
        looked += len(ids)
        drifted += await _inconsistent(backend, tag, ids)
        if looked >= _SAMPLE:
            break
    detail = f"{plural(looked, 'execution')} examined"
    if not drifted:
        return Finding("indexes", Grade.OK, f"{detail}, each is where its record says")
    return Finding(
        "indexes",
        Grade.BROKEN,
        f"{detail}, {len(drifted)} are not where their record says, such as "
        f"{clean(shown(drifted[0]))}",
        "the scanners repair this within two minutes; run doctor again, and report it if it stays",
    )


async def _inconsistent(backend: Backend, tag: str, ids: list[str]) -> list[str]:
    if not ids:
        return []
    verdicts = await backend.reconcile_execution_index(tag, ids, "check")
    return [each for each, verdict in zip(ids, verdicts, strict=True) if verdict != "consistent"]
