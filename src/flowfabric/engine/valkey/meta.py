"""The engine itself: clock, capabilities, and findings about the deployment."""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Sized
from typing import Any

from flowfabric.core import errors
from flowfabric.core.ids import validate_namespace
from flowfabric.core.partition import CollisionGrade
from flowfabric.core.text import plural, shown
from flowfabric.core.version import VERSION
from flowfabric.engine.api import check
from flowfabric.engine.api import meta as api
from flowfabric.engine.api.backend import Backend, supported
from flowfabric.engine.api.meta import Finding, Grade, broken, ok, warning
from flowfabric.engine.api.upkeep import ALL_EXECUTIONS, Index
from flowfabric.engine.flow_overview import describe_unit
from flowfabric.engine.valkey import boot, health, keys
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.library import LIBRARY_VERSION, library_fits, read_library
from flowfabric.engine.valkey.stream_pool import StreamPool
from flowfabric.valkey.connect import MINIMUM_VERSION
from flowfabric.valkey.connect import check_server as check_version
from flowfabric.valkey.transport import Transport

SERVER_NAME = "flowfabric-server:"
"""The prefix of the connection names of server processes; host and pid follow."""
_server_connection = re.compile(rf" name={SERVER_NAME}(\S+) ")
_IDENTITY = api.Identity("valkey", api.Version(*VERSION), "beta")
_SKEW_MS = 1000
_VERSION_BUDGET_S = 1.0
_SAMPLE = 1000
_MAX_LISTED = 8
_COUNT_VARIABLES = ("FF_FLOW_PARTITIONS", "FF_BUDGET_PARTITIONS", "FF_QUOTA_PARTITIONS")


def stopped_by(error: errors.FlowFabricError, *, owned: bool) -> Finding:
    match error:
        case errors.TransportError():
            return broken("connection", error.message or error.kind, error.hint)
        case errors.EngineError():
            return broken("deployment", error.explanation or error.code, error.hint)
        case errors.ConfigError(field="partition_config") if owned:
            detail = "the first start in this folder was interrupted"
            advice = "no action needed: the next worker, program or command completes it"
            return warning("partitions", detail, advice)
        case errors.ConfigError(field="partition_config"):
            advice = "run `flowfabric doctor --prepare` once"
            return broken("partitions", "this Valkey is not prepared", advice)
        case errors.ConfigError(context="embedded"):
            return broken("folder" if error.field == "data_dir" else "server", error.message)
        case _:
            return broken("deployment", str(error).removeprefix("config: "))


async def check_server(transport: Transport, *, owned: bool) -> list[Finding]:
    """Run the checks that need no preparation; `owned` as in `boot.prepare`."""
    findings = [await _connection(transport), await _version(transport)]
    if findings[-1].grade is Grade.BROKEN:
        return findings
    return [
        *(*findings, await _library(transport, owned=owned)),
        *await health.check_security(transport),
        *await health.health_findings(transport),
        await _skew(transport),
    ]


async def _connection(transport: Transport) -> Finding:
    started = time.perf_counter()
    await transport.call("PING", key="")
    took = (time.perf_counter() - started) * 1000
    return ok("connection", f"answers in {took:.2f} ms")


async def _version(transport: Transport) -> Finding:
    try:
        version = await check_version(transport, budget=_VERSION_BUDGET_S)
    except errors.EngineError as error:
        return _refused("version", error)
    found, needed = (".".join(map(str, each)) for each in (version, MINIMUM_VERSION))
    return ok("version", f"Valkey {found} ({needed} or newer is needed)")


async def _library(transport: Transport, *, owned: bool) -> Finding:
    stored = await read_library(transport)
    if stored is None:
        advice = "run `flowfabric doctor --prepare`, or start a worker"
        return warning("functions", "the function library is not loaded", advice)
    found = f"version {stored.version}, content {stored.content_hash}"
    if stored.version < LIBRARY_VERSION:
        advice = "run `flowfabric doctor --prepare` to upgrade it; older processes can still use it"
        detail = f"{found}; this program has version {LIBRARY_VERSION}"
        return warning("functions", detail, advice)
    try:
        fits = await library_fits(transport, owned=owned)
    except errors.EngineError as error:
        return _refused("functions", error)
    if fits:
        return ok("functions", found)
    advice = "run `flowfabric doctor --prepare` to load this program's"
    detail = f"{found}; this program has other content or settings"
    return warning("functions", detail, advice)


async def _skew(transport: Transport) -> Finding:
    before = time.time()
    # Not the engine's clock, because the function library may be missing.
    reply: Any = await transport.call("TIME", key="")
    server, after = int(reply[0]) + int(reply[1]) / 1_000_000, time.time()
    # A difference within the round-trip time may be due to the delay.
    skew_s = server - min(max(server, before), after)
    if abs(skew_s) * 1000 < _SKEW_MS:
        return ok("clock skew", f"{abs(skew_s) * 1000:.0f} ms between the server and this host")
    side = "ahead of" if skew_s > 0 else "behind"
    return warning(
        "clock skew",
        f"the server's clock is {abs(skew_s):.1f} s {side} this host's",
        "synchronise both with NTP: the engine uses the server's clock, but programs compute "
        "points in time with this host's",
    )


def _refused(name: str, error: errors.EngineError) -> Finding:
    return broken(name, error.problem, error.hint)


async def check_deployment(
    backend: Backend, transport: Transport, namespace: str | None
) -> list[Finding]:
    if namespace is not None:
        validate_namespace(namespace)
    lanes = await backend.places.lanes_in_use()
    servers = await _servers(transport)
    return [
        await _partitions(backend, transport),
        await _tokens(backend, transport),
        await _lanes(backend, transport, lanes),
        await _collisions(backend, transport, lanes),
        await _workers(backend, transport, lanes, namespace),
        *([] if servers is None else [servers]),
        await _scanners(backend),
        await _flows(backend),
        await _indexes(backend),
    ]


async def _malformed(
    transport: Transport, registry: str, read: Callable[[], Awaitable[Sized]]
) -> Finding | None:
    """A finding if a registry has malformed names, which scanners and listings skip."""
    stored: Any = await transport.call("SCARD", registry, key=registry)
    # Read this second, so that a name registered in between does not count as malformed.
    odd = stored - len(await read())
    if odd <= 0:
        return None
    detail = f"{registry} holds {plural(odd, 'malformed name')}"
    advice = f"list them with SMEMBERS {registry} and remove them with SREM"
    return broken(registry.rpartition(":")[2], detail, advice)


async def _partitions(backend: Backend, transport: Transport) -> Finding:
    counts = backend.counts
    stored = f"{counts.flow} flow, {counts.budget} budget, {counts.quota} quota"
    if any(os.environ.get(name) for name in _COUNT_VARIABLES):
        configured = boot.configured_counts()
        if configured != counts:
            wanted = f"{configured.flow}, {configured.budget}, {configured.quota}"
            detail = f"{stored} are stored, but the environment sets {wanted}"
            advice = f"unset {', '.join(_COUNT_VARIABLES)}: the stored counts cannot change"
            return broken("partitions", detail, advice)
    odd = await _malformed(transport, keys.PARTITIONS, backend.places.used_partitions)
    return odd or ok("partitions", stored)


async def _tokens(backend: Backend, transport: Transport) -> Finding:
    names = [keys.secrets(f"{{fp:{index}}}") for index in range(backend.counts.flow)]
    found: list[Any] = await asyncio.gather(
        *(transport.call("HGET", name, "current_kid", key=name) for name in names)
    )
    kids = sorted({kid.decode(errors="replace") for kid in found if kid is not None})
    missing = found.count(None)
    if not missing:
        return ok("tokens", f"signed with {', '.join(kids)}")
    where = "the server" if missing == len(found) else plural(missing, "partition")
    return warning(
        "tokens",
        f"no secret to sign tokens on {where}: handlers there cannot wait for answers",
        "set FF_WAITPOINT_HMAC_SECRET, for example to the output of `openssl rand -hex 32`, and "
        "run `flowfabric doctor --prepare`",
    )


async def _lanes(backend: Backend, transport: Transport, lanes: list[str]) -> Finding:
    odd = await _malformed(transport, keys.LANES, backend.places.lanes_in_use)
    if odd is not None:
        return odd
    stopped: list[str] = []
    for settings in await backend.lanes.read_settings(lanes):
        lane = settings.lane_id
        if settings.state != "active":
            reason = f" ({settings.reason})" if settings.reason else ""
            stopped.append(f"{lane} is {settings.state}{reason}")
    count = plural(len(lanes), "lane")
    if stopped:
        advice = "reactivate them when their work may continue"
        return warning("lanes", f"{count}; {', '.join(stopped)}", advice)
    listed = lanes if len(lanes) <= _MAX_LISTED else [*lanes[:_MAX_LISTED], "…"]
    return ok("lanes", f"{count}: {', '.join(listed)}")


async def _collisions(backend: Backend, transport: Transport, lanes: list[str]) -> Finding:
    found = await boot.find_collisions(transport, backend.counts, lanes)
    if found.grade is CollisionGrade.CLEAN:
        return ok("lane placement", "no two pinned lanes share a partition")
    groups = "; ".join(" + ".join(group) for group in found.shared.values())
    share = f"{found.affected} of {found.lanes} pinned lanes share one"
    detail = f"{found.grade.value}: {share} ({groups})"
    if found.grade is CollisionGrade.WATCH:
        return ok("lane placement", detail)
    advice = (
        "see whether `flowfabric lanes --partitions` shows them as busy; if so, spread one with "
        "`flowfabric lane set LANE --placement spread`"
    )
    return warning("lane placement", detail, advice)


async def _workers(
    backend: Backend, transport: Transport, lanes: list[str], namespace: str | None
) -> Finding:
    workers = await backend.workers.list_workers(namespace, limit=None)
    served = {lane for worker in workers for lane in worker.lanes}
    tags = await backend.places.used_partitions()
    # In a cluster this is expensive to find out: `find_work` asks about each place apart.
    lanes = [lane for lane in lanes if tags and not transport.is_cluster and lane not in served]
    places = [(lane, tag) for lane in lanes for tag in tags]
    waiting = sorted({lane for lane, _ in await backend.wakeups.find_work(places)})
    count = plural(len(workers), "live worker")
    if waiting:
        detail = f"{count}; no worker serves {', '.join(waiting)}, where work waits"
        advice = f"run `flowfabric worker module:app --lanes {','.join(waiting)}`"
        return warning("workers", detail, advice)
    if not workers:
        advice = "run `flowfabric worker module:app`"
        return warning("workers", "no live worker: nothing runs", advice)
    return ok("workers", count)


async def _servers(transport: Transport) -> Finding | None:
    """The server processes; None if the account may not list connections."""
    try:
        replies: dict[str, Any] = await transport.call_all_primaries("CLIENT", "LIST")
    except errors.EngineError:
        return None
    text = "".join(reply.decode(errors="replace") for reply in replies.values())
    found = sorted(set(_server_connection.findall(text)))
    if not found:
        return ok("servers", "no server process: the REST API is not served")
    listed = ", ".join(found[:_MAX_LISTED] + ["…"] * (len(found) > _MAX_LISTED))
    count = "one server process" if len(found) == 1 else f"{len(found)} server processes"
    return ok("servers", f"{count}: {listed} (host:pid)")


async def _scanners(backend: Backend) -> Finding:
    running = [
        f"{leader.process} in part" if leader.partial else leader.process
        for leader in await backend.leadership.leaders()
    ]
    if running:
        return ok("scanners", f"run by {', '.join(running)} (host:pid)")
    detail = "none run: expired leases, retries and deadlines are not handled"
    advice = "run a worker without --no-scanners"
    return warning("scanners", detail, advice)


async def _flows(backend: Backend) -> Finding:
    backlog = await backend.upkeep.flow_backlog(await backend.places.used_partitions())
    queued = ", ".join(f"{count:,} in {name}" for name, count in sorted(backlog.queued.items()))
    detail = f"queued updates: {queued}" if queued else "no queued updates"
    if not backlog.parked:
        return ok("flows", detail)
    unit, why = min(backlog.parked.items())
    count = plural(len(backlog.parked), "update")
    detail = f"{detail}; {count} failed too often, such as {describe_unit(unit)}: {why}"
    advice = "repair or delete the record, then run `flowfabric flow retry`"
    return broken("flows", detail, advice)


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
        return ok("indexes", f"{detail}, all indexes match their records")
    detail = f"{detail}, {len(drifted)} differ from their index, such as {shown(drifted[0])}"
    advice = "the scanners repair this within two minutes; if it persists, report it"
    return broken("indexes", detail, advice)


class ValkeyMeta(api.Meta):
    def __init__(self, calls: FunctionCalls, pool: StreamPool, backend: Backend) -> None:
        self._calls = calls
        self._pool = pool
        self._backend = backend

    async def ping(self) -> None:
        await self._calls.transport.call("PING", key="")

    async def failing_checks(self) -> list[str]:
        transport, failing = self._calls.transport, list[str]()
        try:
            await self.ping()
            library = await read_library(transport)
            if library is None or not library.min_client <= LIBRARY_VERSION <= library.version:
                failing.append("library")
            if await boot.read_counts(transport) != self._calls.counts:
                failing.append("partitions")
        except errors.ConfigError:
            failing.append("partitions")
        except errors.EngineError:
            failing.append("ping")
        return failing

    async def prepare(self) -> api.NoOp | api.Applied:
        calls = self._calls
        loaded = await boot.prepare(calls.transport, calls.counts)
        await boot.report_collisions(calls.transport, calls.counts)
        return api.Applied(f"function library version {LIBRARY_VERSION}") if loaded else api.NoOp()

    async def shutdown_prepare(self, grace_s: float) -> None:
        grace_s = check.seconds(grace_s, "grace_s")
        op, started = "shutdown_prepare", time.monotonic()
        if not await self._pool.drain(grace_s):
            elapsed = round((time.monotonic() - started) * 1000)
            raise errors.TimeoutError_("timeout", op, f"elapsed_ms={elapsed}", op=op)

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(_IDENTITY, supported(self._backend))

    def backend_label(self) -> str:
        return _IDENTITY.family

    async def server_time_ms(self) -> int:
        return await self._calls.server_time_ms()

    async def log_findings(self) -> None:
        await health.log_findings(self._calls.transport)

    async def usage(self) -> api.StoreUsage:
        sections = ("cpu", "stats", "memory", "clients")
        nodes = (await health.server_facts(self._calls.transport, *sections)).values()

        def total(*names: str) -> float:
            return sum(float(facts[name]) for facts in nodes for name in names)

        return api.StoreUsage(
            cpu_s=total("used_cpu_user_main_thread", "used_cpu_sys_main_thread"),
            commands=round(total("total_commands_processed")),
            data_bytes=round(total("used_memory") - total("mem_clients_normal", "mem_aof_buffer")),
            blocked=round(total("blocked_clients")),
        )

    async def feed_size(self, partition: int) -> tuple[int, int]:
        calls = self._calls
        feed = keys.events(f"{{fp:{check.partition(partition, calls.counts)}}}")
        used = await calls.transport.call("MEMORY", "USAGE", feed, "SAMPLES", 0, key=feed)
        return await calls.read(f"{feed}: event feed", "XLEN", feed), used or 0

    async def diagnose(self, namespace: str | None = None) -> list[Finding]:
        transport = self._calls.transport
        return [
            *await check_server(transport, owned=False),
            *await check_deployment(self._backend, transport, namespace),
        ]

    async def wait_ready(self, timeout_s: float) -> None:
        await self._calls.transport.wait_ready(timeout_s)

    def fail_fast(self, *, enabled: bool = True) -> None:
        self._calls.transport.fail_fast(enabled=enabled)
