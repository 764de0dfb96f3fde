"""The acceptance checks of flows that no other file makes (08 §21)."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.core.contracts.flows import AlreadyStaged, AnyOf, Staged
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from tests.support.engine import Engine, refused
from tests.support.flows import submitted

ALL_BYTES = bytes(range(256))


async def test_a_failed_root_skips_all_that_needs_it(engine: Engine) -> None:
    flow = await submitted(engine, "r>a>x r>b>x r>c o>c", {"c": AnyOf("let_run")})
    await flow.end("r", "failed")
    states = await flow.states()
    assert {key for key, state in states.items() if state == "skipped"} == {"a", "b", "x"}
    assert states["c"] == "waiting_children"
    for key in "rabx":
        events = await engine.events(flow.nodes[key])
        assert [event.type for event in events].count("completion") == 1
    await flow.end("o")
    assert await flow.claim() == ["c"]


async def test_staging_refuses_in_this_order(engine: Engine) -> None:
    flow = await submitted(engine, "a>b c")
    stage = engine.backend.flows.stage_dependency_edge
    a, b, c = (flow.nodes[key] for key in "abc")
    edge = new_uuid()
    revision = (await flow.snapshot()).graph_revision
    await refused(stage(flow.flow_id, a, a), "self_referencing_edge")
    await refused(
        stage(flow.flow_id, a, c, edge_id=edge, expected_graph_revision=0), "stale_graph_revision"
    )
    staged = await stage(flow.flow_id, a, c, edge_id=edge, expected_graph_revision=revision)
    assert staged == Staged(edge, revision + 1)
    # The revision has moved, but the edge is the same.
    again = await stage(flow.flow_id, a, c, edge_id=edge, expected_graph_revision=revision)
    assert again == AlreadyStaged(edge, revision + 1)
    error = await refused(stage(flow.flow_id, b, c, edge_id=edge), "dependency_already_exists")
    assert error.details == (edge, a, c)
    await refused(stage(flow.flow_id, a, flow.new_member_id()), "execution_not_in_flow")
    await refused(stage(flow.flow_id, flow.new_member_id(), a), "execution_not_in_flow")
    await refused(stage(flow.flow_id, b, a), "cycle_detected")
    await stage(flow.flow_id, b, c)
    await refused(stage(flow.flow_id, c, a), "cycle_detected")
    await engine.backend.flows.cancel_flow(flow.flow_id)
    await refused(stage(flow.flow_id, a, b), "flow_already_terminal")
    assert (await stage(flow.flow_id, a, c, edge_id=edge)).kind == "already_staged"


async def test_of_two_stagers_one_is_too_late(engine: Engine) -> None:
    flow = await submitted(engine, "a b c")
    stage = engine.backend.flows.stage_dependency_edge
    revision = (await flow.snapshot()).graph_revision
    pairs = (("a", "b"), ("a", "c"))
    outcomes = await asyncio.gather(
        *(
            stage(flow.flow_id, flow.nodes[up], flow.nodes[down], expected_graph_revision=revision)
            for up, down in pairs
        ),
        return_exceptions=True,
    )
    errors = [each.code for each in outcomes if isinstance(each, EngineError)]
    assert errors == ["stale_graph_revision"]


async def test_joining_is_checked_before_anything_is_written(engine: Engine) -> None:
    flows = engine.backend.flows
    flow = await submitted(engine, "a")
    alone = await engine.create(execution_id=flow.new_member_id())
    elsewhere = engine.new_id()
    while elsewhere.tag == flow.tag:
        elsewhere = engine.new_id(new_uuid()[:8])
    other = await submitted(engine, "a")
    missing = new_uuid()
    while flow.tag_of(engine, missing) != flow.tag:
        missing = new_uuid()
    before = await engine.dump()
    await refused(flows.add_execution_to_flow(flow.flow_id, elsewhere), "partition_mismatch")
    await refused(flows.add_execution_to_flow(missing, alone), "flow_not_found")
    await refused(
        flows.add_execution_to_flow(flow.flow_id, flow.new_member_id()), "execution_not_found"
    )
    assert await engine.dump() == before
    assert (await flows.add_execution_to_flow(flow.flow_id, alone)).kind == "added"
    assert (await flows.add_execution_to_flow(flow.flow_id, alone)).kind == "already_member"
    assert (await flow.snapshot()).node_count == 2
    await flows.cancel_flow(flow.flow_id)
    late = await engine.create(execution_id=flow.new_member_id())
    before = await engine.dump()
    await refused(flows.add_execution_to_flow(flow.flow_id, late), "flow_already_terminal")
    assert await engine.dump() == before
    assert (await other.snapshot()).node_count == 1


@pytest.mark.parametrize("how", ["payload", "input"])
async def test_every_byte_of_a_result_reaches_the_child(engine: Engine, how: str) -> None:
    edge = {"data_passing_ref": "result"} if how == "payload" else {"input_name": "text"}
    flow = await submitted(engine, "a>b", **edge)
    await flow.end("a", result=ALL_BYTES)
    await flow.claim()
    claim = flow.claims["b"]
    if how == "payload":
        assert claim.input_payload == ALL_BYTES
    else:
        assert claim.inputs.inputs["text"].result == ALL_BYTES
        assert claim.input_payload == b""


async def test_without_a_result_the_child_keeps_its_payload(engine: Engine) -> None:
    flow = await submitted(engine, "a>b", data_passing_ref="result")
    await flow.claim()
    await engine.backend.executions.complete(flow.claims["a"].handle)
    await flow.claim()
    assert flow.claims["b"].input_payload == b""


@pytest.mark.parametrize("order", ["upstream first", "child first"])
async def test_a_skipped_child_runs_after_both_replays(engine: Engine, order: str) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("a", "failed")
    keys = "ab" if order == "upstream first" else "ba"
    for key in keys:
        await engine.backend.executions.replay_execution(flow.nodes[key])
    assert await flow.state("b") == "waiting_children"
    flow.claims.clear()
    await flow.end("a")
    assert await flow.claim() == ["b"]


async def test_a_child_waits_while_its_upstream_stays_failed(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("a", "failed")
    await engine.backend.executions.replay_execution(flow.nodes["b"])
    for _ in range(3):
        await engine.backend.flows.drain_cascade(flow.nodes["a"].partition)
        await engine.backend.flows.cascade_completion(flow.nodes["a"])
        assert await flow.state("b") == "waiting_children"
