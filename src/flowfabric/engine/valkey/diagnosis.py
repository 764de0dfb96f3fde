"""What puts the work of a deployment at risk, and what to do about it."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sized
from typing import Any

from flowfabric.core.errors import ConfigError, EngineError, FlowFabricError, TransportError
from flowfabric.core.ids import validate_namespace
from flowfabric.core.partition import CollisionGrade, lane_collisions
from flowfabric.core.text import plural, shown
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.meta import Finding, Grade
from flowfabric.engine.api.upkeep import ALL_EXECUTIONS, Index
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.boot import configured_counts
from flowfabric.engine.valkey.health import check_security, health_findings
from flowfabric.engine.valkey.library import LIBRARY_VERSION, library_fits, read_library
from flowfabric.valkey.connect import MINIMUM_VERSION
from flowfabric.valkey.connect import check_server as check_version
from flowfabric.valkey.transport import Transport

_SKEW_MS = 1000
_VERSION_BUDGET_S = 1.0
_SAMPLE = 1000
_MAX_LISTED = 8
_COUNT_VARIABLES = ("FF_FLOW_PARTITIONS", "FF_BUDGET_PARTITIONS", "FF_QUOTA_PARTITIONS")


def stopped_by(error: FlowFabricError, *, owned: bool) -> Finding:
    """The finding for an error that stopped the checks."""
    match error:
        case TransportError():
            return Finding("connection", Grade.BROKEN, error.message or error.kind, error.hint)
        case EngineError():
            return Finding("deployment", Grade.BROKEN, error.explanation or error.code, error.hint)
        case ConfigError(field="partition_config") if owned:
            detail = "the first start in this folder was interrupted"
            advice = "no action needed: the next worker, program or command completes it"
            return Finding("partitions", Grade.WARNING, detail, advice)
        case ConfigError(field="partition_config"):
            advice = "run `flowfabric doctor --prepare` once"
            return Finding("partitions", Grade.BROKEN, "this Valkey is not prepared", advice)
        case ConfigError(context="embedded"):
            name = "folder" if error.field == "data_dir" else "server"
            return Finding(name, Grade.BROKEN, error.message)
        case _:
            return Finding("deployment", Grade.BROKEN, str(error).removeprefix("config: "))


# --- the server alone, prepared or not ------------------------------------------------------------


async def check_server(transport: Transport, *, owned: bool) -> list[Finding]:
    """Run the checks that need no preparation; `owned` as in `boot.prepare`."""
    findings = [await _connection(transport), await _version(transport)]
    if findings[-1].grade is Grade.BROKEN:
        return findings
    library = await _library(transport, owned=owned)
    security = await check_security(transport)
    return [
        *(*findings, library, *security),
        *await health_findings(transport),
        await _skew(transport),
    ]


async def _connection(transport: Transport) -> Finding:
    started = time.perf_counter()
    await transport.call("PING", key="")
    took = (time.perf_counter() - started) * 1000
    return Finding("connection", Grade.OK, f"answers in {took:.1f} ms")


async def _version(transport: Transport) -> Finding:
    try:
        version = await check_version(transport, budget=_VERSION_BUDGET_S)
    except EngineError as error:
        return _refused("version", error)
    found, needed = (".".join(map(str, each)) for each in (version, MINIMUM_VERSION))
    return Finding("version", Grade.OK, f"Valkey {found} ({needed} or newer is needed)")


async def _library(transport: Transport, *, owned: bool) -> Finding:
    stored = await read_library(transport)
    if stored is None:
        advice = "run `flowfabric doctor --prepare`, or start a worker"
        return Finding("functions", Grade.WARNING, "the function library is not loaded", advice)
    found = f"version {stored.version}, content {stored.content_hash}"
    if stored.version < LIBRARY_VERSION:
        advice = "run `flowfabric doctor --prepare` to upgrade it; older processes can still use it"
        detail = f"{found}; this program has version {LIBRARY_VERSION}"
        return Finding("functions", Grade.WARNING, detail, advice)
    try:
        fits = await library_fits(transport, owned=owned)
    except EngineError as error:
        return _refused("functions", error)
    if fits:
        return Finding("functions", Grade.OK, found)
    advice = "run `flowfabric doctor --prepare` to load this program's"
    detail = f"{found}; this program has other content or settings"
    return Finding("functions", Grade.WARNING, detail, advice)


async def _skew(transport: Transport) -> Finding:
    before = time.time()
    # Not the engine's clock: the function library may be missing.
    reply: Any = await transport.call("TIME", key="")
    server, after = int(reply[0]) + int(reply[1]) / 1_000_000, time.time()
    # A difference within the round trip may be its delay.
    skew_s = server - min(max(server, before), after)
    if abs(skew_s) * 1000 < _SKEW_MS:
        detail = f"{abs(skew_s) * 1000:.0f} ms between the server and this host"
        return Finding("clock skew", Grade.OK, detail)
    side = "ahead of" if skew_s > 0 else "behind"
    return Finding(
        "clock skew",
        Grade.WARNING,
        f"the server's clock is {abs(skew_s):.1f} s {side} this host's",
        "synchronise both with NTP: the engine uses the server's clock, but programs compute "
        "points in time with this host's",
    )


def _refused(name: str, error: EngineError) -> Finding:
    return Finding(name, Grade.BROKEN, str(error).partition(" — ")[0], error.hint)


# --- a prepared deployment ------------------------------------------------------------------------


async def check_deployment(
    backend: Backend, transport: Transport, namespace: str | None
) -> list[Finding]:
    """Run the checks that need the partition counts."""
    if namespace is not None:
        validate_namespace(namespace)
    lanes = await backend.places.lanes_in_use()
    return [
        await _partitions(backend, transport),
        await _tokens(backend, transport),
        await _lanes(backend, transport, lanes),
        _collisions(backend, lanes),
        await _workers(backend, transport, lanes, namespace),
        await _scanners(backend),
        await _indexes(backend),
    ]


async def _malformed(
    transport: Transport, registry: str, read: Callable[[], Awaitable[Sized]]
) -> Finding | None:
    """A finding if a registry holds names that it cannot hold; scanners and listings skip them."""
    stored: Any = await transport.call("SCARD", registry, key=registry)
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


async def _partitions(backend: Backend, transport: Transport) -> Finding:
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
    odd = await _malformed(transport, keys.PARTITIONS, backend.places.partitions_in_use)
    return odd or Finding("partitions", Grade.OK, stored)


async def _tokens(backend: Backend, transport: Transport) -> Finding:
    names = [keys.secrets(f"{{fp:{index}}}") for index in range(backend.counts.flow)]
    found: list[Any] = await asyncio.gather(
        *(transport.call("HGET", name, "current_kid", key=name) for name in names)
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


async def _lanes(backend: Backend, transport: Transport, lanes: list[str]) -> Finding:
    odd = await _malformed(transport, keys.LANES, backend.places.lanes_in_use)
    if odd is not None:
        return odd
    stopped: list[str] = []
    for lane in lanes:
        settings = await backend.lanes.get_lane(lane)
        if settings.state != "active":
            reason = f" ({settings.reason})" if settings.reason else ""
            stopped.append(f"{lane} is {settings.state}{reason}")
    count = plural(len(lanes), "lane")
    if stopped:
        advice = "reactivate them when their work may continue"
        return Finding("lanes", Grade.WARNING, f"{count}; {', '.join(stopped)}", advice)
    listed = lanes if len(lanes) <= _MAX_LISTED else [*lanes[:_MAX_LISTED], "…"]
    return Finding("lanes", Grade.OK, f"{count}: {', '.join(listed)}")


def _collisions(backend: Backend, lanes: list[str]) -> Finding:
    found = lane_collisions(lanes, backend.counts)
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


async def _workers(
    backend: Backend, transport: Transport, lanes: list[str], namespace: str | None
) -> Finding:
    workers = await backend.workers.list_workers(namespace, limit=None)
    served = {lane for worker in workers for lane in worker.lanes}
    tags = await backend.places.used_partitions()
    # In a cluster this is expensive to find out, and `find_work` names every partition.
    lanes = [lane for lane in lanes if tags and not transport.is_cluster and lane not in served]
    waiting = [lane for lane in lanes if await backend.wakeups.find_work(lane, tags)]
    count = plural(len(workers), "live worker")
    if waiting:
        return Finding(
            "workers",
            Grade.WARNING,
            f"{count}; no worker serves {', '.join(waiting)}, where work waits",
            f"run `flowfabric worker module:app --lanes {','.join(waiting)}`",
        )
    if not workers:
        advice = "run `flowfabric worker module:app`"
        return Finding("workers", Grade.WARNING, "no live worker: nothing runs", advice)
    return Finding("workers", Grade.OK, count)


async def _scanners(backend: Backend) -> Finding:
    running = [
        f"{leader.process} for its part" if leader.partial else leader.process
        for leader in await backend.leadership.leaders()
    ]
    if running:
        return Finding("scanners", Grade.OK, f"run by {', '.join(running)} (host:pid)")
    return Finding(
        "scanners",
        Grade.WARNING,
        "none run: expired leases, retries and deadlines are not handled",
        "run a worker without --no-scanners",
    )


async def _indexes(backend: Backend) -> Finding:
    examined = 0
    drifted: list[str] = []
    for tag in await backend.places.used_partitions():
        listed = Index(tag, ALL_EXECUTIONS)
        ids = await backend.upkeep.list_index(listed, 0, _SAMPLE - examined)
        if ids:
            verdicts = await backend.upkeep.reconcile_execution_index(tag, ids, "check")
            pairs = zip(ids, verdicts, strict=True)
            drifted += [each for each, verdict in pairs if verdict != "consistent"]
        examined += len(ids)
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
