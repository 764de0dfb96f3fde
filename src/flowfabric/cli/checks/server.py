"""Checks of the server alone, which work before it is prepared."""

from __future__ import annotations

import time
from typing import Any

from flowfabric.cli.checks.security import check_security
from flowfabric.cli.views.text import duration
from flowfabric.core.errors import EngineError
from flowfabric.engine.valkey.health import Finding, Grade, health_findings
from flowfabric.engine.valkey.library import LIBRARY_VERSION, library_fits, read_library
from flowfabric.valkey.connect import MINIMUM_VERSION, check_server
from flowfabric.valkey.transport import Transport

_SKEW_MS = 1000
_VERSION_BUDGET_S = 1.0


async def check_server_side(transport: Transport, *, owned: bool = False) -> list[Finding]:
    """Run the checks that need no preparation."""
    checks = [await _connection(transport), await _version(transport)]
    if checks[-1].grade is Grade.BROKEN:
        return checks
    library = await _library(transport, owned=owned)
    return [
        *checks,
        library,
        *await check_security(transport),
        *await health_findings(transport),
        await _skew(transport),
    ]


async def _connection(transport: Transport) -> Finding:
    started = time.perf_counter()
    await transport.call("PING", key="")
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
        return _failed("functions", error)
    if fits:
        return Finding("functions", Grade.OK, found)
    return Finding(
        "functions",
        Grade.WARNING,
        f"{found}; this program has other content or settings",
        "run `flowfabric doctor --prepare` to load this program's",
    )


async def _skew(transport: Transport) -> Finding:
    before = time.time()
    server = await server_seconds(transport)
    after = time.time()
    # A difference within the round trip may be its delay.
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
        "synchronise both with NTP: the engine uses the server's clock, but programs compute "
        "points in time with this host's",
    )


async def server_seconds(transport: Transport) -> float:
    """The server's clock, read without the function library, which may be missing."""
    reply: Any = await transport.call("TIME", key="")
    return int(reply[0]) + int(reply[1]) / 1_000_000


def _failed(name: str, error: EngineError) -> Finding:
    return Finding(name, Grade.BROKEN, str(error).partition(" — ")[0], error.hint)
