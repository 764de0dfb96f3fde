"""Late edges, kinds of dependencies, gates after a join, children of running members (08 B5-10)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.flows import (
    AnyOf,
    CascadeCounts,
    DependencyKind,
    EdgeApplied,
    GraphEdge,
    GraphNode,
    Submitted,
)
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import new_uuid
from flowfabric.core.policy import parse_policy
from flowfabric.core.state import ExpireReason, PublicState
from tests.support.engine import Engine, refused, untouched
from tests.support.flows import TestFlow, graph, submitted
from tests.support.suspension import Waits

RETRIES = parse_policy(
    {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1000}}}
)
OUTCOMES = ("success", "failed", "cancelled", "expired", "skipped")
SATISFYING: dict[DependencyKind, set[str]] = {
    "success_only": {"success"},
    "failure_only": {"failed", "expired"},
    "terminal": set(OUTCOMES),
}


def node(key: str, **fields: Any) -> GraphNode:
    return GraphNode(key=key, execution_kind="job", **fields)


async def with_nodes(engine: Engine, text: str, **nodes: dict[str, Any]) -> TestFlow:
    """A submitted graph in which some nodes have further fields."""
    plain = graph(text)
    changed = tuple(msgspec.structs.replace(n, **nodes.get(n.key, {})) for n in plain.nodes)
    held = nodes.get("flow", {})
    outcome = await engine.backend.flows.submit_flow(
        msgspec.structs.replace(plain, nodes=changed, **held)
    )
    assert isinstance(outcome, Submitted)
    return TestFlow(engine, outcome)


async def add(flow: TestFlow, frm: str, to: str, **fields: Any) -> Any:
    return await flow.backend.flows.add_dependency(
        flow.flow_id, flow.nodes[frm], flow.nodes[to], **fields
    )


# --- late edges (B5) --------------------------------------------------------------


async def test_an_edge_into_an_ended_member_is_refused(engine: Engine) -> None:
    flow = await submitted(engine, "a b c")
    await flow.end("b")
    staged = await engine.backend.flows.stage_dependency_edge(
        flow.flow_id, flow.nodes["c"], flow.nodes["a"]
    )
    await flow.end("a")
    async with untouched(engine):
        await refused(add(flow, "c", "b"), "terminal")
        await refused(
            engine.backend.flows.apply_dependency_to_child(flow.flow_id, staged.edge_id),
            "terminal",
        )


@pytest.mark.parametrize("end", ["success", "failed"])
async def test_an_edge_into_a_running_member_waits_until_it_waits(engine: Engine, end: str) -> None:
    flow = await submitted(engine, "a b")
    assert await flow.claim() == ["a", "b"]
    applied = await add(flow, "a", "b")
    assert (applied.unsatisfied_count, applied.resolution) == (1, "")
    assert await flow.state("b") == "active"
    await flow.end("a", end)
    assert await flow.state("b") == "active"
    handle = flow.claims["b"].handle
    moved = await engine.backend.executions.move_to_waiting_children(flow.nodes["b"], handle)
    assert moved.kind == ("ready" if end == "success" else "impossible")
    await flow.end("b")
    assert await flow.state("b") == "completed"


async def test_an_edge_into_a_suspended_member_does_not_end_it(engine: Engine) -> None:
    flow = await submitted(engine, "a b")
    await flow.claim()
    await (await Waits.open(engine)).park(handle=flow.claims["b"].handle)
    await add(flow, "a", "b")
    await flow.end("a", "failed")
    assert await flow.state("b") == "suspended"
    await engine.backend.suspensions.resume_execution(flow.nodes["b"])
    assert await flow.claim() == ["b"]
    assert flow.claims["b"].handle.kind == "resumed"


async def test_a_delayed_member_waits_for_the_edge_and_then_for_its_time(engine: Engine) -> None:
    flow = await with_nodes(engine, "a b", b={"delay_ms": 20_000})
    assert await flow.state("b") == "delayed"
    await add(flow, "a", "b")
    assert await flow.state("b") == "waiting_children"
    await flow.end("a")
    assert await flow.state("b") == "delayed"
    await engine.advance(20_000)
    answers = await engine.backend.upkeep.promote_delayed(flow.tag, "default", [flow.nodes["b"]])
    assert answers == ["promoted"]
    assert await flow.claim() == ["b"]


async def test_a_late_edge_opens_a_join_of_all_again(engine: Engine) -> None:
    flow = await submitted(engine, "a>z b")
    await flow.end("a")
    assert await flow.state("z") == "waiting"
    await add(flow, "b", "z")
    assert await flow.state("z") == "waiting_children"
    await flow.end("b")
    assert await flow.claim() == ["z"]


async def test_a_late_edge_leaves_a_decided_join_of_any_as_it_is(engine: Engine) -> None:
    flow = await submitted(engine, "a>z b>z c", {"z": AnyOf("let_run")})
    await flow.end("a")
    applied = await add(flow, "c", "z")
    assert applied.unsatisfied_count == 2
    assert await flow.state("z") == "waiting"
    (join,) = (await flow.snapshot()).edge_groups
    assert (join.group_state, join.total_deps, join.satisfied_count) == ("satisfied", 3, 1)
    await flow.end("c", "failed")
    assert await flow.claim() == ["z"]
    (join,) = (await flow.snapshot()).edge_groups
    assert (join.group_state, join.failed_count) == ("satisfied", 1)


async def test_a_late_edge_leaves_an_impossible_join_as_it_is(engine: Engine) -> None:
    """It was decided while the member ran; a retry does not wait for what comes later."""
    flow = await with_nodes(engine, "a b c", b={"policy": RETRIES})
    await flow.claim()
    await add(flow, "a", "b")
    await flow.end("a", "failed")
    await engine.backend.executions.fail(flow.claims["b"].handle, "x", "transient")
    assert await flow.state("b") == "delayed"
    await add(flow, "c", "b")
    await engine.advance(1000)
    await engine.backend.upkeep.promote_delayed(flow.tag, "default", [flow.nodes["b"]])
    assert await flow.claim() == ["b"]


# --- kinds (B6) -------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SATISFYING))
@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_which_ends_satisfy_which_kind(
    engine: Engine, kind: DependencyKind, outcome: str
) -> None:
    flow = await with_nodes(
        engine, "before>a z", a={"execution_deadline_at": await engine.now() + 1000}
    )
    await add(flow, "a", "z", dependency_kind=kind, input_name="a")
    await flow.end("before", "failed" if outcome == "skipped" else "success")
    if outcome == "expired":
        await engine.advance(1000)
        await engine.backend.upkeep.expire_execution(
            flow.tag, ExpireReason.EXECUTION_DEADLINE, [flow.nodes["a"]]
        )
    elif outcome != "skipped":
        await flow.end("a", outcome)
    good = outcome in SATISFYING[kind]
    assert await flow.state("z") == ("waiting" if good else "skipped")
    (join,) = [
        each
        for each in (await flow.snapshot()).edge_groups
        if each.downstream_execution_id == flow.nodes["z"]
    ]
    counted = (join.satisfied_count, join.failed_count, join.skipped_count)
    assert counted == ((1, 0, 0) if good else (0, 0, 1) if outcome == "skipped" else (0, 1, 0))
    if good:
        await flow.claim()
        assert flow.claims["z"].inputs.inputs["a"].outcome == outcome


async def test_an_unknown_kind_or_a_bad_input_name_is_refused(engine: Engine) -> None:
    flow = await submitted(engine, "a b")
    async with untouched(engine):
        await refused(add(flow, "a", "b", dependency_kind="sometimes"), "invalid_input")
        await refused(add(flow, "a", "b", input_name="no spaces"), "invalid_input")


# --- gates after a join (B9) ------------------------------------------------------


async def test_the_form_of_an_edge_comes_after_its_flow_and_before_its_ends(engine: Engine) -> None:
    flow = await submitted(engine, "a b")
    stage = engine.backend.flows.stage_dependency_edge
    a, b = flow.nodes["a"], flow.nodes["b"]
    edge_id, stranger = new_uuid(), engine.new_id("elsewhere")
    bad: list[dict[str, Any]] = [
        {"dependency_kind": "always"},
        {"data_passing_ref": "x" * 1025},
        {"input_name": "two words"},
    ]
    missing = next(each for each in iter(new_uuid, "") if TestFlow.tag_of(engine, each) == flow.tag)
    await stage(flow.flow_id, a, b, edge_id=edge_id)
    for wrong in bad:
        async with untouched(engine):
            await refused(stage(missing, a, b, **wrong), "flow_not_found")
            await refused(
                stage(flow.flow_id, b, a, edge_id=edge_id, **wrong), "dependency_already_exists"
            )
            await refused(
                stage(flow.flow_id, a, b, expected_graph_revision=0, **wrong),
                "stale_graph_revision",
            )
            await refused(stage(flow.flow_id, a, stranger, **wrong), "invalid_input")
            await refused(stage(flow.flow_id, a, stranger), "execution_not_in_flow")
    await engine.backend.flows.cancel_flow(flow.flow_id)
    await refused(stage(flow.flow_id, a, b, **bad[0]), "flow_already_terminal")


async def test_a_member_of_a_held_flow_waits_for_its_release_and_its_time(engine: Engine) -> None:
    flow = await with_nodes(engine, "a>b", b={"delay_ms": 20_000}, flow={"hold": True})
    info = await engine.backend.reads.read_execution_info(flow.nodes["a"])
    assert (info.state_vector.eligibility_state.value, info.blocking_detail) == (
        "blocked_by_operator",
        "flow held",
    )
    assert await flow.claim() == []
    await engine.backend.executions.cancel_execution(flow.nodes["a"])
    assert await flow.state("b") == "skipped"

    flow = await with_nodes(engine, "a b", b={"delay_ms": 20_000}, flow={"hold": True})
    await engine.backend.flows.release_flow(flow.flow_id)
    assert await flow.states() == {"a": "waiting", "b": "delayed"}


async def test_an_edge_satisfied_in_a_held_flow_leaves_the_hold(engine: Engine) -> None:
    flow = await with_nodes(engine, "a b", flow={"hold": True})
    await engine.backend.executions.cancel_execution(flow.nodes["a"])
    applied = await add(flow, "a", "b", dependency_kind="terminal")
    assert applied == EdgeApplied(0, "satisfied", 3, CascadeCounts(resolved=1, promoted=1))
    info = await engine.backend.reads.read_execution_info(flow.nodes["b"])
    assert info.state_vector.eligibility_state.value == "blocked_by_operator"
    assert await flow.claim() == []
    assert (await engine.backend.flows.release_flow(flow.flow_id)).eligible == 1
    assert await flow.claim() == ["b"]


async def test_a_replay_in_a_held_flow_waits_for_the_release(engine: Engine) -> None:
    flow = await with_nodes(engine, "a", flow={"hold": True})
    await engine.backend.executions.cancel_execution(flow.nodes["a"])
    await engine.backend.executions.replay_execution(flow.nodes["a"])
    info = await engine.backend.reads.read_execution_info(flow.nodes["a"])
    assert info.blocking_detail == "flow held"
    assert await flow.claim() == []
    assert (await engine.backend.flows.release_flow(flow.flow_id)).eligible == 1
    assert await flow.claim() == ["a"]


# --- children of running members (B10) --------------------------------------------


async def test_who_may_not_spawn(engine: Engine) -> None:
    spawn = engine.backend.flows.spawn_children
    solo = await engine.running()
    await refused(spawn(solo, [node("x")]), "execution_not_in_flow")
    flow = await submitted(engine, "a b")
    await flow.claim()
    handle = flow.claims["a"].handle
    stale = msgspec.structs.replace(handle, lease=f"{handle.lease_id}/99")
    async with untouched(engine):
        await refused(spawn(stale, [node("x")]), "stale_lease")
        await refused(spawn(handle, []), "invalid_input")
        await refused(spawn(handle, [node("x"), node("x")]), "invalid_input")
        await refused(
            spawn(
                handle,
                [node("x"), node("y")],
                [GraphEdge(frm="x", to="y"), GraphEdge(frm="y", to="x")],
            ),
            "cycle_detected",
        )
    await engine.backend.flows.cancel_flow(flow.flow_id, cancellation_policy="cancel_pending")
    async with untouched(engine):
        await refused(spawn(handle, [node("x")]), "flow_already_terminal")


async def test_a_repeated_spawn_adds_nothing(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    await flow.claim()
    handle = flow.claims["a"].handle
    spawn = engine.backend.flows.spawn_children
    first = await spawn(handle, [node("x"), node("y")], [GraphEdge(frm="x", to="y")])
    again = await spawn(handle, [node("x"), node("y")], [GraphEdge(frm="x", to="y")])
    assert first == again
    assert (await flow.snapshot()).node_count == 3
    parked = await spawn(handle, [node("x")], wait=True)
    assert parked.parked
    assert (await spawn(handle, [node("x")], wait=True)).parked


async def test_waiting_without_open_children_keeps_the_lease(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    await flow.claim()
    handle: Handle = flow.claims["a"].handle
    wait = engine.backend.executions.move_to_waiting_children
    assert (await wait(flow.nodes["a"], handle)).kind == "ready"
    spawned = await engine.backend.flows.spawn_children(handle, [node("x")], kind="success_only")
    flow.nodes.update(spawned.nodes)
    await flow.end("x", "failed")
    impossible: Any = await wait(flow.nodes["a"], handle)
    assert (impossible.kind, impossible.upstreams) == ("impossible", (flow.nodes["x"],))
    assert await flow.state("a") == PublicState.ACTIVE
    await flow.end("a")
