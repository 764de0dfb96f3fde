"""Whether the process lives, and whether it should get requests (10 §11.11)."""

import asyncio

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem
from flowfabric.server.queries import NoQuery
from flowfabric.server.routing import Routes
from flowfabric.server.wire import Reply, answer

routes = Routes()
CHECKS_S = 1.0
"""How long Valkey may take; less than usual probe timeouts, so that the probe gets an answer."""
_LATE = f"Valkey did not respond within {CHECKS_S:g} s"
_SHUTDOWN = "shutdown"
_OK = answer({"status": "ok"})
_READY = answer({"status": "ready"})


class Health(msgspec.Struct):
    """The state of a server process."""

    status: str


@routes.get("/livez", scope=None, counted=False, answers={200: Health})
async def livez(call: Call[None, NoQuery]) -> Reply:  # noqa: ARG001 - asks nothing
    """Report whether the process is running."""
    return _OK


@routes.get("/healthz", scope=None, counted=False, answers={200: Health}, errors=(503,))
async def healthz(call: Call[None, NoQuery]) -> Reply:
    """Report whether Valkey responds."""
    try:
        async with asyncio.timeout(CHECKS_S):
            await call.backend.meta.ping()
    except (EngineError, TimeoutError) as error:
        detail = error.detail if isinstance(error, EngineError) else _LATE
        raise Problem("unavailable", detail, error="backend op unavailable: ping") from error
    return _OK


@routes.get("/readyz", scope=None, counted=False, answers={200: Health}, errors=(503,))
async def readyz(call: Call[None, NoQuery]) -> Reply:
    """Report whether the process is ready for requests, and which checks fail."""
    failing = await _failing(call)
    if failing:
        problem = Problem(
            "unavailable",
            ", ".join(failing),
            error="backend op unavailable: readyz",
            fields={"status": "not_ready", "failing": failing},
        )
        problem.is_fault = failing != [_SHUTDOWN]
        raise problem
    return _READY


async def _failing(call: Call[None, NoQuery]) -> list[str]:
    services = call.services
    try:
        async with asyncio.timeout(CHECKS_S):
            failing = await call.backend.meta.failing_checks()
    except TimeoutError:
        failing = ["ping"]
    if services.dispatcher is not None and not services.dispatcher.is_alive:
        failing.append("dispatcher")
    if services.scanners is not None and any(
        status.stuck for status in services.scanners.status().values()
    ):
        failing.append("scanners")
    if services.stopping.is_set():
        failing.append(_SHUTDOWN)
    return failing
