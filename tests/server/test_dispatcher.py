"""The dispatcher mirrors operator events to the audit log, and readiness knows whether it lives."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.settings import ScannerFilter, ScannerSettings
from flowfabric.server.config import ServerConfig
from flowfabric.server.dispatcher import EventDispatcher
from flowfabric.server.process import ServerProcess
from flowfabric.valkey.address import parse_url
from tests.support.budgets import new_budget
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.proxy import FaultProxy
from tests.support.sdk import until
from tests.support.server import TestServer


@asynccontextmanager
async def dispatching(
    backend: ValkeyBackend, settings: ScannerSettings | None = None
) -> AsyncGenerator[EventDispatcher]:
    """A dispatcher that follows the feeds."""
    dispatcher = EventDispatcher(backend, settings or ScannerSettings())
    dispatcher.start()
    await until(lambda: bool(backend._events._open), "the dispatcher follows the feeds")
    try:
        yield dispatcher
    finally:
        await dispatcher.stop()


@pytest.fixture(autouse=True)
def audited(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flowfabric.audit")


def mirrored(caplog: pytest.LogCaptureFixture, execution_id: ExecutionId) -> list[str]:
    """What the audit log says of an execution."""
    return [
        getattr(record, "action", "")
        for record in caplog.records
        if record.name == "flowfabric.audit"
        and getattr(record, "execution_id", "") == execution_id
        and getattr(record, "event_id", "").startswith(f"fp:{execution_id.partition}/")
    ]


def is_mirrored(caplog: pytest.LogCaptureFixture, execution_id: ExecutionId) -> bool:
    return bool(mirrored(caplog, execution_id))


def has_length(things: list[RuntimeError], length: int) -> bool:
    return len(things) == length


async def test_operator_events_are_mirrored(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    async with dispatching(engine.backend) as dispatcher:
        execution_id = await engine.create()
        await engine.backend.executions.change_priority(execution_id, 7)
        await engine.backend.executions.cancel_execution(execution_id)
        await until(lambda: len(mirrored(caplog, execution_id)) == 2, "both events")
    assert mirrored(caplog, execution_id) == ["operator_priority_changed", "operator_completion"]
    assert not dispatcher.is_alive


async def test_nothing_is_missed_while_the_connection_is_lost(
    engine: Engine, valkey: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even before the first event: the position is where the subscription began."""
    caplog.set_level(logging.INFO, "flowfabric.server")
    with FaultProxy(valkey.socket_path) as proxy:
        async with (
            await ValkeyBackend.connect(parse_url(proxy.url), request_timeout=0.05) as backend,
            dispatching(backend),
        ):
            for _ in range(2):
                proxy.down()
                await until(lambda: not backend._events._open, "the subscription is lost")
                execution_id = await engine.create()
                await engine.backend.executions.cancel_execution(execution_id)
                proxy.up()
                await until(partial(is_mirrored, caplog, execution_id), "the event")
                assert mirrored(caplog, execution_id) == ["operator_completion"]
    resumed = [r for r in caplog.records if vars(r).get("action") == "feed_resumed"]
    assert len(resumed) >= 2, "an operator sees when the mirror follows again"


async def test_a_crash_is_logged_and_survived(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    crashes = [RuntimeError("a fault of the dispatcher"), RuntimeError("another")]

    def crash(record: logging.LogRecord) -> bool:
        if crashes and record.__dict__["action"] == "operator_completion":
            raise crashes.pop()
        return True

    audit = logging.getLogger("flowfabric.audit")
    audit.addFilter(crash)
    try:
        async with dispatching(engine.backend, ScannerSettings(restart_backoff_s=0.01)):
            for left in (1, 0):
                lost = await engine.create()
                await engine.backend.executions.cancel_execution(lost)
                await until(partial(has_length, crashes, left), "a crash")
            # An event that it cannot mirror does not hold up the next one.
            execution_id = await engine.create()
            await engine.backend.executions.cancel_execution(execution_id)
            await until(partial(is_mirrored, caplog, execution_id), "the event")
    finally:
        audit.removeFilter(crash)
    crashed = [r for r in caplog.records if r.__dict__.get("action") == "dispatcher_crashed"]
    assert [r.__dict__["restart_count"] for r in crashed] == [1, 2]
    assert all(r.levelname == "ERROR" and r.exc_info for r in crashed)


@pytest.mark.parametrize(
    "where", [ScannerFilter(namespace="acme"), ScannerFilter(instance_tag=("cell", "eu"))]
)
async def test_the_filter_of_the_process_applies(
    engine: Engine, caplog: pytest.LogCaptureFixture, where: ScannerFilter
) -> None:
    async with dispatching(engine.backend, ScannerSettings(filter=where)):
        theirs = await engine.create()
        ours = await engine.create(namespace="acme", tags={"cell": "eu"})
        for execution_id in (theirs, ours):
            await engine.backend.executions.cancel_execution(execution_id)
        await until(partial(is_mirrored, caplog, ours), "our event")
        # Budgets belong to no namespace.
        await new_budget(engine.backend, {"tokens": 1})
        created = "operator_budget_created"
        await until(lambda: created in [r.__dict__.get("action") for r in caplog.records], created)
        assert mirrored(caplog, theirs) == []


async def test_readiness_names_a_dead_dispatcher(engine: Engine) -> None:
    server = ServerProcess(engine.backend, ServerConfig(listen=("127.0.0.1", 0)))
    server.services.dispatcher = server.dispatcher
    server.dispatcher.start()
    await server.listen()
    http = Http(server.address)
    try:
        assert (await http.get("/readyz")).status == 200
        await server.dispatcher.stop()
        assert (await http.get("/readyz")).json["failing"] == ["dispatcher"]
    finally:
        await server.stop_serving()
