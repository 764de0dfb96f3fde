"""What calls about flows answer and refuse, where no other file shows it (08 §3 to §13)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.flows import (
    AlreadyApplied,
    AlreadyExtended,
    AlreadyMember,
    AlreadySubmitted,
    AnyOf,
    Dependency,
    EdgeApplied,
    Extended,
    FlowCancelled,
    FlowCreated,
    FlowExists,
    GraphEdge,
    GraphNode,
    JoinAll,
    MemberAdded,
    Quorum,
    Released,
)
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.api.executions import Completion
from tests.support.engine import Engine, refused, untouched
from tests.support.flows import TestFlow, graph, submitted


def another(engine: Engine, flow: TestFlow) -> str:
    """The id of a flow that is not there, in the same partition."""
    return next(each for each in iter(new_uuid, "") if flow.tag_of(engine, each) == flow.tag)


def stranger(engine: Engine, flow: TestFlow) -> ExecutionId:
    """An id that can never be a member."""
    flow_id = next(each for each in iter(new_uuid, "") if flow.tag_of(engine, each) != flow.tag)
    return ExecutionId.deterministic_for_flow(flow_id, new_uuid(), engine.backend.counts)


async def test_creating_a_flow_twice(engine: Engine) -> None:
    create, flow_id = engine.backend.flows.create_flow, new_uuid()
    assert await create(flow_id, "dag") == FlowCreated(flow_id)
    async with untouched(engine):
        assert await create(flow_id, "dag") == FlowExists(flow_id)
        await refused(create(flow_id, "pipeline"), "invalid_input")
        await refused(create(flow_id, "dag", "other"), "invalid_input")


async def test_an_execution_is_in_one_flow_forever(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    flows, other = engine.backend.flows, another(engine, flow)
    await flows.create_flow(other, "dag")
    alone = await engine.create(execution_id=flow.new_member_id())
    assert await flows.add_execution_to_flow(other, alone) == MemberAdded(alone, 1)
    assert await flows.add_execution_to_flow(other, alone) == AlreadyMember(alone, 1)
    async with untouched(engine):
        error = await refused(
            flows.add_execution_to_flow(flow.flow_id, alone), "already_member_of_different_flow"
        )
        assert error.details == (other,)
        apart = await refused(
            flows.add_execution_to_flow(other, stranger(engine, flow)), "partition_mismatch"
        )
        assert flow.tag in str(apart)


async def test_a_new_member_waits_for_members_only(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    alone = await engine.create(execution_id=flow.new_member_id())
    new = flow.new_member_id()
    with_a_stranger = engine.create(
        execution_id=new, flow_id=flow.flow_id, depends_on=(Dependency(upstream=alone),)
    )
    async with untouched(engine):
        error = await refused(with_a_stranger, "execution_not_in_flow")
    assert error.details == (alone,)


async def test_an_execution_joins_in_any_state(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    ids = [await engine.create(execution_id=flow.new_member_id()) for _ in range(3)]
    flow.nodes |= dict(zip("xyz", ids, strict=True))
    await flow.claim()
    await flow.end("x")
    await engine.backend.executions.delay(flow.claims["y"].handle, await engine.now() + 60_000)
    for execution_id in ids:
        await engine.backend.flows.add_execution_to_flow(flow.flow_id, execution_id)
    snapshot = await flow.snapshot()
    assert snapshot.members == {"active": 2, "completed": 1, "delayed": 1}
    assert (snapshot.graph_revision, snapshot.node_count) == (4, 4)


# --- edges -----------------------------------------------------------------------------------


async def test_applying_an_edge(engine: Engine) -> None:
    flow = await submitted(engine, "a b c")
    flows, (a, b, c) = engine.backend.flows, (flow.nodes[key] for key in "abc")
    apply = flows.apply_dependency_to_child
    edge = (
        await flows.stage_dependency_edge(
            flow.flow_id, a, b, dependency_kind="terminal", data_passing_ref="all"
        )
    ).edge_id
    assert await flow.state("b") == "waiting"
    wrong: list[dict[str, Any]] = [
        {"upstream_execution_id": c},
        {"downstream_execution_id": c},
        {"dependency_kind": "success_only"},
        {"data_passing_ref": "some"},
    ]
    async with untouched(engine):
        for given in wrong:
            await refused(apply(flow.flow_id, edge, **given), "invalid_dependency")
        await refused(apply(flow.flow_id, new_uuid()), "invalid_dependency")
        await refused(apply(another(engine, flow), edge), "flow_not_found")
    right: dict[str, Any] = {
        "upstream_execution_id": a,
        "downstream_execution_id": b,
        "dependency_kind": "terminal",
        "data_passing_ref": "all",
    }
    assert await apply(flow.flow_id, edge, **right) == EdgeApplied(1)
    assert await flow.state("b") == "waiting_children"
    async with untouched(engine):
        assert await apply(flow.flow_id, edge) == AlreadyApplied()
    late = (await flows.stage_dependency_edge(flow.flow_id, a, c)).edge_id
    await flows.cancel_flow(flow.flow_id, cancellation_policy="flow_only")
    async with untouched(engine):
        await refused(apply(flow.flow_id, late), "flow_already_terminal")
        assert await apply(flow.flow_id, edge) == AlreadyApplied()


async def test_parallel_edges_count_each(engine: Engine) -> None:
    flow = await submitted(engine, "a b")
    add = engine.backend.flows.add_dependency
    for count in (1, 2):
        applied = await add(flow.flow_id, flow.nodes["a"], flow.nodes["b"])
        assert applied == EdgeApplied(count, "", 2 + count)
    await flow.end("a")
    (join,) = (await flow.snapshot()).edge_groups
    assert (join.total_deps, join.satisfied_count) == (2, 2)
    assert await flow.claim() == ["b"]


# --- joins -----------------------------------------------------------------------------------


async def test_the_policy_of_a_join(engine: Engine) -> None:
    flow = await submitted(engine, "a b>c")
    flows, a = engine.backend.flows, flow.nodes["a"]
    change = flows.set_edge_group_policy
    bad: list[Any] = [None, "all_of", Quorum(0, "let_run"), Quorum(2**31, "let_run")]
    bad += [AnyOf("later"), Quorum(1, "")]  # type: ignore[arg-type]
    async with untouched(engine):
        for policy in bad:
            await refused(change(flow.flow_id, a, policy), "invalid_input")
        await refused(change(another(engine, flow), a, JoinAll()), "flow_not_found")
        for absent in (flow.new_member_id(), stranger(engine, flow)):
            await refused(change(flow.flow_id, absent, AnyOf("let_run")), "execution_not_in_flow")
        fixed = await refused(
            change(flow.flow_id, flow.nodes["c"], AnyOf("let_run")), "invalid_input"
        )
        assert "edge_group_policy_already_fixed" in str(fixed)
        assert not await change(flow.flow_id, flow.nodes["c"], JoinAll())
    assert await change(flow.flow_id, a, Quorum(2, "let_run"))
    assert not await change(flow.flow_id, a, Quorum(2, "let_run"))
    # Another number or ending replaces it while no edge counts.
    assert await change(flow.flow_id, a, Quorum(3, "let_run"))
    assert await change(flow.flow_id, a, Quorum(3, "cancel_remaining"))
    assert await change(flow.flow_id, a, JoinAll())
    await flows.cancel_flow(flow.flow_id)
    async with untouched(engine):
        await refused(change(flow.flow_id, a, AnyOf("let_run")), "flow_already_terminal")


# --- whole graphs ----------------------------------------------------------------------------


async def test_submitting_a_graph_twice(engine: Engine) -> None:
    flows, whole = engine.backend.flows, graph("a>b>c")
    first = await flows.submit_flow(whole)
    async with untouched(engine):
        again = await flows.submit_flow(whole)
        assert again == AlreadySubmitted(first.flow_id, first.graph_revision, first.nodes)
        other = graph("a>b", flow_id=whole.flow_id)
        await refused(flows.submit_flow(other), "flow_submission_conflict")
    assert first.graph_revision == 5


NODES = tuple(GraphNode(key=key, execution_kind="job") for key in "abc")
WRONG_GRAPHS: list[tuple[str, dict[str, Any]]] = [
    ("invalid_input", {"nodes": ()}),
    ("invalid_input", {"nodes": (*NODES, NODES[0])}),
    ("invalid_input", {"edges": (GraphEdge(frm="a", to="x"),)}),
    ("invalid_input", {"edges": (GraphEdge(frm="x", to="a"),)}),
    ("self_referencing_edge", {"edges": (GraphEdge(frm="a", to="a"),)}),
    ("dependency_already_exists", {"edges": (GraphEdge(frm="a", to="b"),) * 2}),
    (
        "invalid_input",
        {"nodes": (*NODES[:2], msgspec.structs.replace(NODES[2], join=AnyOf("let_run")))},
    ),
    (
        "invalid_input",
        {
            "nodes": (*NODES[:2], msgspec.structs.replace(NODES[2], join=Quorum(2, "let_run"))),
            "edges": (GraphEdge(frm="a", to="c"),),
        },
    ),
    (
        "cycle_detected",
        {
            "edges": (
                GraphEdge(frm="a", to="b"),
                GraphEdge(frm="b", to="c"),
                GraphEdge(frm="c", to="a"),
            )
        },
    ),
    (
        "invalid_input",
        {
            "edges": (
                GraphEdge(frm="a", to="c", data_passing_ref="x"),
                GraphEdge(frm="b", to="c", data_passing_ref="x"),
            )
        },
    ),
]


@pytest.mark.parametrize(("code", "fields"), WRONG_GRAPHS)
async def test_a_graph_that_cannot_be_submitted(
    engine: Engine, code: str, fields: dict[str, Any]
) -> None:
    whole = msgspec.structs.replace(graph("a b c"), nodes=NODES)
    async with untouched(engine):
        error = await refused(
            engine.backend.flows.submit_flow(msgspec.structs.replace(whole, **fields)), code
        )
    if code == "cycle_detected":
        assert set(str(error.details[0]).split(" → ")) == set("abc")


async def test_growing_and_releasing_a_held_flow(engine: Engine) -> None:
    flows = engine.backend.flows
    held = await flows.submit_flow(msgspec.structs.replace(graph("a>b"), hold=True))
    new = GraphNode(key="c", execution_kind="job")
    grown = await flows.extend_flow(held.flow_id, [new], [GraphEdge(frm="b", to="c")])
    assert isinstance(grown, Extended)
    again = await flows.extend_flow(held.flow_id, [new], [GraphEdge(frm="b", to="c")])
    assert again == AlreadyExtended(grown.graph_revision, grown.nodes)
    flow = TestFlow(engine, held)  # type: ignore[arg-type]
    flow.nodes |= grown.nodes
    assert await flow.claim() == []
    assert await flows.release_flow(flow.flow_id) == Released(1)
    assert await flows.release_flow(flow.flow_id) == Released(0)
    for key in "abc":
        await flow.end(key)
    await refused(flows.release_flow(another(engine, flow)), "flow_not_found")
    await refused(flows.extend_flow(another(engine, flow), [new]), "flow_not_found")


# --- cancelling ------------------------------------------------------------------------------


async def test_a_cancellation_is_checked_first(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    cancel = engine.backend.flows.cancel_flow
    async with untouched(engine):
        for grace in (-1, 2**53, 1.5, "1", True):
            await refused(cancel(another(engine, flow), grace_ms=grace), "invalid_grace_ms")  # type: ignore[arg-type]
        await refused(cancel(another(engine, flow)), "flow_not_found")


async def test_waiting_counts_members_that_ended_before_as_done(engine: Engine) -> None:
    flow = await submitted(engine, "a b c")
    await flow.end("a")
    await flow.end("b", "failed")
    outcome = await engine.backend.flows.cancel_flow(flow.flow_id, wait_timeout_ms=5000)
    ids = tuple(flow.nodes.values())
    assert outcome == FlowCancelled("cancel_all", ids, 3)
    assert await flow.recount() == {"completed": 1, "failed": 1, "cancelled": 1}


async def test_a_cancelled_flow_without_members(engine: Engine) -> None:
    flow_id = new_uuid()
    await engine.backend.flows.create_flow(flow_id, "dag")
    outcome = await engine.backend.flows.cancel_flow(flow_id)
    assert outcome == FlowCancelled("cancel_all", (), 0)
    snapshot = await engine.backend.flows.describe_flow(flow_id)
    assert snapshot is not None
    assert (snapshot.public_flow_state, snapshot.derived_state) == ("cancelled", "open")


# --- completing and claiming -----------------------------------------------------------------


async def test_a_worker_claims_what_its_completions_released(engine: Engine) -> None:
    """One call ends executions with and without a flow, and takes what can run now."""
    flow = await submitted(engine, "a>b")
    await flow.claim()
    alone = await engine.create(execution_id=flow.new_member_id())
    flow.nodes["alone"] = alone
    await flow.claim()
    both = engine.backend.claims.complete_and_claim
    items = [Completion(flow.claims["alone"].handle)]
    outcomes, claimed = await both(flow.tag, items, engine.want(), 10)
    assert (outcomes, claimed.claims, claimed.remaining) == ([None], [], 0)
    items = [Completion(flow.claims["a"].handle)]
    outcomes, claimed = await both(flow.tag, items, engine.want(), 10)
    assert outcomes == [None]
    assert [claim.execution_id for claim in claimed.claims] == [flow.nodes["b"]]
    items = [Completion(claimed.claims[0].handle)]
    outcomes, claimed = await both(flow.tag, items, engine.want(tasks=("other",)), 10)
    assert (outcomes, claimed.claims) == ([None], [])
    assert (await flow.snapshot()).derived_state == "completed"


async def test_what_a_completion_releases_is_released_to_the_end(engine: Engine) -> None:
    """More than one call may: the worker that completes and claims goes on, without a scanner."""
    flow = await submitted(engine, " ".join(f"root>n{n}" for n in range(300)))
    await flow.claim()
    items = [Completion(flow.claims.pop("root").handle)]
    outcomes, claimed = await engine.backend.claims.complete_and_claim(
        flow.tag, items, engine.want(), 1
    )
    assert (outcomes, len(claimed.claims)) == ([None], 1)
    async with asyncio.timeout(20):
        while len(flow.claims) < 299:
            await flow.claim()
