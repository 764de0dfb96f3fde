"""The acceptance checks of flows that no other file makes (08 §21)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from flowfabric.core.contracts.flows import (
    AlreadyStaged,
    AnyOf,
    GraphEdge,
    GraphNode,
    Staged,
    Submitted,
)
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from tests.support.engine import Engine, refused
from tests.support.flows import TestFlow, graph, submitted, without_followups

ALL_BYTES = bytes(range(256))


async def test_a_chain_goes_on_with_each_reply(engine: Engine) -> None:
    """No scanner runs: the next member can be claimed as soon as the reply is there."""
    flow = await submitted(engine, ">".join(f"n{i}" for i in range(50)))
    for i in range(50):
        assert await flow.claim() == [f"n{i}"]
        await flow.end(f"n{i}")
    assert (await flow.snapshot()).derived_state == "completed"


async def test_a_fan_out_of_a_thousand(engine: Engine) -> None:
    """08 §21.1: no more calls than 1,000 members at 128 a call take."""
    flow = await submitted(engine, " ".join(f"root>n{i}" for i in range(999)))
    await without_followups(engine)
    await flow.end("root")
    calls = 1
    while (await engine.backend.flows.drain_cascade(flow.nodes["root"].partition)).pending:
        calls += 1
    assert calls <= 8
    assert (await flow.snapshot()).members == {"completed": 1, "waiting": 999}


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


async def test_a_cycle_of_edges_that_were_added_from_the_last_to_the_first(engine: Engine) -> None:
    flow = await submitted(engine, "a b c d e")
    add = engine.backend.flows.add_dependency
    for upstream, child in ("de", "cd", "bc", "ab"):
        await add(flow.flow_id, flow.nodes[upstream], flow.nodes[child])
    for upstream in "ecdb":
        closing = add(flow.flow_id, flow.nodes[upstream], flow.nodes["a"])
        await refused(closing, "cycle_detected")


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


@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_of_two_results_the_edge_staged_last_counts(engine: Engine, order: str) -> None:
    flow = await submitted(engine, "a b c")
    for key in "ab":
        await engine.backend.flows.add_dependency(
            flow.flow_id, flow.nodes[key], flow.nodes["c"], data_passing_ref="result"
        )
    for key in order:
        await flow.end(key, result=key.encode())
    await flow.claim()
    assert flow.claims["c"].input_payload == b"b"


async def test_an_ended_child_keeps_its_payload(engine: Engine) -> None:
    given = graph("a>b", data_passing_ref="result")
    nodes = tuple(msgspec.structs.replace(node, input_payload=b"own") for node in given.nodes)
    outcome = await engine.backend.flows.submit_flow(msgspec.structs.replace(given, nodes=nodes))
    assert isinstance(outcome, Submitted)
    flow = TestFlow(engine, outcome)
    await flow.end("b", "cancelled")
    await flow.end("a", result=b"new")
    await engine.backend.executions.replay_execution(flow.nodes["b"])
    await flow.claim()
    assert flow.claims["b"].input_payload == b"own"


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


@pytest.mark.chaos
async def test_a_walk_that_takes_too_long_is_a_cycle(engine: Engine) -> None:
    """More than 10,000 members come after the child of the new edge, all of a lower rank."""
    flow = await submitted(engine, "before>up child")
    for first in range(0, 11_000, 1000):
        keys = [f"n{n}" for n in range(first, first + 1000)]
        nodes = [GraphNode(key=key, execution_kind="job") for key in keys]
        edges = [GraphEdge(frm="child", to=key) for key in keys]
        await engine.backend.flows.extend_flow(flow.flow_id, nodes, edges)
    error = await refused(
        engine.backend.flows.stage_dependency_edge(
            flow.flow_id, flow.nodes["up"], flow.nodes["child"]
        ),
        "cycle_detected",
    )
    assert error.details == ("graph_too_large",)
