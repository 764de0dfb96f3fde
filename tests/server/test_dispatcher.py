"""The dispatcher mirrors operator events to the audit log, and readiness knows whether it lives."""

from __future__ import annotations

import logging

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.server.config import ServerConfig
from flowfabric.server.dispatcher import EventDispatcher
from flowfabric.server.process import ServerProcess
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until


def mirrored(caplog: pytest.LogCaptureFixture, execution_id: ExecutionId) -> list[str]:
    """What the audit log says of an execution."""
    return [
        getattr(record, "action", "")
        for record in caplog.records
        if record.name == "flowfabric.audit"
        and getattr(record, "execution_id", "") == execution_id
        and getattr(record, "event_id", "").startswith(f"fp:{execution_id.partition}/")
    ]


async def test_operator_events_are_mirrored(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowfabric.audit")
    dispatcher = EventDispatcher(engine.backend)
    dispatcher.start()
    await until(lambda: bool(engine.backend._events._open), "the dispatcher follows the feeds")
    execution_id = await engine.create()
    await engine.backend.executions.change_priority(execution_id, 7)
    await engine.backend.executions.cancel_execution(execution_id)
    await until(lambda: len(mirrored(caplog, execution_id)) == 2, "both events")
    assert mirrored(caplog, execution_id) == ["operator_priority_changed", "operator_completion"]
    await dispatcher.stop()
    assert not dispatcher.is_alive


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
