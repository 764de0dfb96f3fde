"""Payloads and results: small ones are fields of the record, others have a key of their own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.flows import Submitted
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine
from tests.support.flows import TestFlow, graph, submitted

SMALL, LARGE = b"\xff" * 64, b"\xff" * 65


async def stored_in(engine: Engine, execution_id: ExecutionId, name: str) -> str:
    """Where a payload or result is stored: `field`, `key` or `nowhere`."""
    call, tag = engine.backend.transport.call, execution_id.tag
    own = {"payload": keys.payload, "result": keys.result}[name](tag, execution_id)
    core = keys.core(tag, execution_id)
    field: Any = await call("HEXISTS", core, name)
    key: Any = await call("EXISTS", own)
    if name == "payload":
        assert await call("HEXISTS", core, "payload_key") == key
    return {(1, 0): "field", (0, 1): "key", (0, 0): "nowhere"}[field, key]


VALUES = [(b"", "key"), (b"1", "field"), (SMALL, "field"), (LARGE, "key")]


@pytest.mark.parametrize(("value", "place"), VALUES)
async def test_every_reader_finds_the_payload(engine: Engine, value: bytes, place: str) -> None:
    made = await engine.create(input_payload=value)
    assert await stored_in(engine, made, "payload") == (place if value else "nowhere")
    assert (await engine.backend.reads.read_execution_context(made)).input_payload == value
    assert (await engine.claim()).input_payload == value


@pytest.mark.parametrize(("value", "place"), VALUES)
async def test_every_reader_finds_the_result(engine: Engine, value: bytes, place: str) -> None:
    flow = await submitted(engine, "a>b a>c", input_name="text")
    await flow.end("a", result=value)
    a = flow.nodes["a"]
    assert await stored_in(engine, a, "result") == place
    assert await engine.backend.reads.get_execution_result(a) == value
    assert (await engine.backend.reads.read_outcome(a))[1] == value
    await flow.claim()
    assert flow.claims["b"].inputs.inputs["text"].result == value
    assert await engine.backend.reads.read_exec_core_fields(a, ["result"]) == {"result": None}


@pytest.mark.parametrize("own", [b"", SMALL, LARGE])
@pytest.mark.parametrize("passed", [SMALL[1:], LARGE[1:] + b"12"])
async def test_a_result_replaces_the_childs_payload(
    engine: Engine, own: bytes, passed: bytes
) -> None:
    given = graph("a>b", data_passing_ref="result")
    nodes = tuple(msgspec.structs.replace(node, input_payload=own) for node in given.nodes)
    outcome = await engine.backend.flows.submit_flow(msgspec.structs.replace(given, nodes=nodes))
    assert isinstance(outcome, Submitted)
    flow = TestFlow(engine, outcome)
    await flow.end("a", result=passed)
    b = flow.nodes["b"]
    # A payload with a key keeps it: a reader that looks at the record first never misses both.
    in_key = len(passed) > 64 or own == LARGE
    assert await stored_in(engine, b, "payload") == ("key" if in_key else "field")
    assert (await engine.backend.reads.read_execution_context(b)).input_payload == passed
    await flow.claim()
    assert flow.claims["b"].input_payload == passed


@pytest.mark.parametrize("first", [SMALL, LARGE])
@pytest.mark.parametrize("second", [None, SMALL[1:], LARGE[1:] + b"12"])
async def test_a_replay_forgets_the_result(
    engine: Engine, first: bytes, second: bytes | None
) -> None:
    handle = await engine.running()
    executions, reads = engine.backend.executions, engine.backend.reads
    await executions.complete(handle, result_payload=first)
    await executions.replay_execution(handle.execution_id)
    assert await stored_in(engine, handle.execution_id, "result") == "nowhere"
    assert await reads.get_execution_result(handle.execution_id) is None
    await executions.complete((await engine.claim()).handle, result_payload=second)
    assert await reads.get_execution_result(handle.execution_id) == second
