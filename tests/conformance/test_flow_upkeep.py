"""What the engine does for flows on its own: resolving, draining, replaying, deleting."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.flows import (
    AnyOf,
    DependencyResolved,
    FlowAudit,
    FlowDeleted,
    GraphEdge,
    GraphNode,
    HeaderAlreadyTerminal,
    HeaderCancelled,
    Quorum,
    Submitted,
)
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import ExpireReason
from tests.support.engine import Engine, refused
from tests.support.flows import TestFlow, graph, submitted

DAY = 86_400_000
FIRST = AnyOf("let_run")


async def only_edge(flow: TestFlow, key: str) -> str:
    (edge,) = await flow.backend.flows.list_incoming_edges(flow.nodes[key])
    return edge.edge_id


# --- resolving ------------------------------------------------------------------------------------


async def test_the_record_of_the_upstream_decides_an_edge(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    flows = engine.backend.flows
    edge = await only_edge(flow, "b")
    await refused(flows.resolve_dependency(flow.flow_id, edge, "ended"), "invalid_input")
    await refused(flows.resolve_dependency(flow.flow_id, edge, "failed"), "execution_not_terminal")
    assert await flow.state("b") == "waiting_children"
    await flow.end("a")
    again = await flows.resolve_dependency(flow.flow_id, edge, "failed")
    assert again == DependencyResolved("already_resolved")
    await refused(
        flows.resolve_dependency(flow.flow_id, new_uuid(), "failed"), "invalid_dependency"
    )
    await refused(flows.resolve_dependency(new_uuid(), edge, "failed"), "flow_not_found")


async def test_completing_again_changes_nothing(engine: Engine) -> None:
    flow = await submitted(engine, "a>b>c")
    flows = engine.backend.flows
    await refused(flows.cascade_completion(flow.nodes["a"]), "execution_not_terminal")
    await refused(flows.cascade_completion(engine.new_id()), "execution_not_found")
    await flow.end("a", "failed")
    before = await engine.dump()
    outcome = await flows.cascade_completion(flow.nodes["a"])
    assert (outcome.resolved, outcome.cascaded_children, outcome.synchronous) == (0, 0, True)
    assert await engine.dump() == before


async def test_promoting_what_no_dependency_blocks(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    promote = engine.backend.flows.promote_blocked_to_eligible
    await refused(promote(engine.new_id()), "execution_not_found")
    await refused(promote(flow.nodes["a"]), "not_blocked_by_deps")
    error = await refused(promote(flow.nodes["b"]), "deps_not_satisfied")
    assert error.details == ("1", "1")
    await flow.claim()
    await refused(promote(flow.nodes["a"]), "not_runnable")


# --- cancelling -----------------------------------------------------------------------------------


async def test_the_first_step_of_a_cancellation(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    header = engine.backend.flows.cancel_flow_header
    ids = tuple(flow.nodes.values())
    assert await header(flow.flow_id, "stop") == HeaderCancelled("cancel_all", ids)
    again = await header(flow.flow_id, "later")
    assert again == HeaderAlreadyTerminal("cancel_all", "stop", ids)
    assert await engine.backend.flows.ack_cancel_member(flow.flow_id, ids[0]) == 0
    await refused(header(new_uuid()), "flow_not_found")


async def test_siblings_of_a_decided_join(engine: Engine) -> None:
    flow = await submitted(engine, "a>c b>c", {"c": AnyOf("cancel_remaining")})
    flows = engine.backend.flows
    child = flow.nodes["c"]
    assert await flows.drain_sibling_cancel_group(flow.flow_id, child) == "already_drained"
    assert await flows.reconcile_sibling_cancel_group(flow.flow_id, child) == "no_op"
    await flow.end("a")
    assert await flow.state("b") == "cancelled"
    assert await flows.drain_sibling_cancel_group(flow.flow_id, child) == "already_drained"
    await refused(flows.drain_sibling_cancel_group("", child), "invalid_args")


# --- replaying ------------------------------------------------------------------------------------


async def test_a_flow_runs_its_failed_members_again(engine: Engine) -> None:
    flow = await submitted(engine, "a>b>c x>y")
    await flow.end("a", "failed")
    await flow.end("x")
    await flow.end("y")
    assert await flow.states() == {
        "a": "failed",
        "b": "skipped",
        "c": "skipped",
        "x": "completed",
        "y": "completed",
    }
    replayed = await engine.backend.flows.replay_flow(flow.flow_id)
    assert (replayed.replayed, replayed.reopened, replayed.pending) == (1, 2, False)
    flow.claims.clear()
    for key in "abc":
        await flow.end(key)
    assert (await flow.snapshot()).derived_state == "completed"
    again = await engine.backend.flows.replay_flow(flow.flow_id)
    assert (again.replayed, again.reopened) == (0, 0)


async def test_a_reopened_join_waits_for_every_upstream(engine: Engine) -> None:
    flow = await submitted(engine, "r>a>d r>b>d")
    await flow.end("r", "failed")
    assert (await engine.backend.flows.replay_flow(flow.flow_id)).reopened == 3
    flow.claims.clear()
    await flow.end("r")
    await flow.end("a")
    assert await flow.state("d") == "waiting_children"
    await flow.end("b")
    assert await flow.claim() == ["d"]


async def test_a_rerun_waits_for_every_reopened_upstream(engine: Engine) -> None:
    flow = await submitted(engine, "r>a>d r>b>d")
    for key in "rabd":
        await flow.end(key)
    replayed = await engine.backend.executions.replay_execution(
        flow.nodes["r"], reopen_downstream=True, include_completed=True
    )
    assert replayed.reopened == 3
    flow.claims.clear()
    await flow.end("r")
    await flow.end("a")
    assert await flow.state("d") == "waiting_children"
    await flow.end("b")
    assert await flow.claim() == ["d"]


async def test_a_rerun_starts_nobody_before_its_upstreams(engine: Engine) -> None:
    """What an upstream that runs again decided before counts for nobody."""
    flow = await submitted(engine, "r>a>d r>b>d other>e a>e", {"d": FIRST, "e": FIRST})
    for key in ("other", *"rabde"):
        await flow.end(key)
    await engine.backend.executions.replay_execution(
        flow.nodes["r"], reopen_downstream=True, include_completed=True
    )
    assert await flow.state("d") == "waiting_children"
    # The end of an upstream that does not run again still counts.
    assert await flow.state("e") == "waiting"
    flow.claims.clear()
    await flow.end("r")
    await flow.end("b")
    assert "d" in await flow.claim()


async def test_a_rerun_counts_what_ended_again_before_it(engine: Engine) -> None:
    """`x` failed twice; a join that `a` reopens and `b` blocks has its second end, too."""
    flow = await submitted(engine, "r>a>d r>b>d x>d", {"d": FIRST})
    replay = engine.backend.executions.replay_execution
    await flow.end("x", "failed")
    await replay(flow.nodes["x"])
    del flow.claims["x"]
    await flow.end("x", "failed")
    for key in "rabd":
        await flow.end(key)
    await replay(flow.nodes["r"], reopen_downstream=True, include_completed=True)
    assert await flow.state("d") == "waiting_children"
    flow.claims.clear()
    await flow.end("r")
    await flow.end("a", "failed")
    await flow.end("b", "failed")
    assert await flow.state("d") == "skipped"


async def test_a_quorum_is_replayed(engine: Engine) -> None:
    flow = await submitted(engine, "a>d b>d c>d", {"d": Quorum(2, "let_run")})
    await flow.end("a")
    await flow.end("b", "failed")
    await flow.end("c", "failed")
    assert await flow.state("d") == "skipped"
    assert (await engine.backend.flows.replay_flow(flow.flow_id)).replayed == 2
    flow.claims.clear()
    await flow.end("b")
    assert await flow.state("d") == "waiting"


async def test_a_replay_keeps_what_other_upstreams_decided(engine: Engine) -> None:
    flow = await submitted(engine, "x>d y>d z>d", {"d": AnyOf("let_run")})
    await flow.claim()
    await flow.end("x", "failed")
    await flow.end("y", "failed")
    await engine.backend.executions.replay_execution(flow.nodes["y"], reopen_downstream=True)
    (join,) = (await flow.snapshot()).edge_groups
    assert (join.failed_count, join.running_count) == (1, 2)
    flow.claims.pop("y")
    await flow.end("y", "failed")
    await flow.end("z", "failed")
    assert await flow.state("d") == "skipped"
    assert (await flow.snapshot()).finished_at is not None


async def test_which_members_of_a_flow_are_replayed(engine: Engine) -> None:
    flow = await submitted(engine, "a b c")
    await flow.end("a")
    await flow.end("b", "cancelled")
    await flow.end("c", "failed")
    flows = engine.backend.flows
    assert (await flows.replay_flow(flow.flow_id)).replayed == 1
    assert (await flows.replay_flow(flow.flow_id, failed_only=False)).replayed == 1
    assert await flow.states() == {"a": "completed", "b": "waiting", "c": "waiting"}


async def test_members_that_ended_while_they_waited_wait_again(engine: Engine) -> None:
    """Nobody runs before its upstreams because it was cancelled."""
    flow = await submitted(engine, "a>b>c d>c")
    for key in "cba":
        await flow.end(key, "cancelled")
    replay = engine.backend.executions.replay_execution
    refusal = await refused(replay(flow.nodes["b"], strict=True), "deps_not_satisfied")
    assert flow.nodes["a"].compact in str(refusal)
    replayed = await engine.backend.flows.replay_flow(flow.flow_id, failed_only=False)
    assert replayed.replayed == 3
    assert await flow.claim() == ["a", "d"]
    for key in "dab":
        assert await flow.state("c") == "waiting_children"
        await flow.end(key)
    assert await flow.claim() == ["c"]


async def test_a_member_cancelled_before_its_upstream_ended_waits_for_it(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("b", "cancelled")
    again = await engine.backend.executions.replay_execution(flow.nodes["b"])
    assert again.public_state == "waiting_children"
    await flow.end("a", "failed")
    assert await flow.state("b") == "skipped"


async def test_a_member_that_ran_runs_again_at_once(engine: Engine) -> None:
    """An edge that came while it ran never held it."""
    flow = await submitted(engine, "a b")
    assert await flow.claim() == ["a", "b"]
    await engine.backend.flows.add_dependency(flow.flow_id, flow.nodes["a"], flow.nodes["b"])
    await flow.end("b", "cancelled")
    again = await engine.backend.executions.replay_execution(flow.nodes["b"])
    assert again.public_state == "waiting"


async def test_a_cancelled_flow_is_not_replayed(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("a", "failed")
    flows = engine.backend.flows
    await flows.cancel_flow(flow.flow_id)
    await refused(flows.replay_flow(flow.flow_id), "flow_already_terminal")
    await refused(
        engine.backend.executions.replay_execution(flow.nodes["a"]), "flow_already_terminal"
    )
    await refused(flows.replay_flow(new_uuid()), "flow_not_found")


# --- deleting -------------------------------------------------------------------------------------


async def trim(engine: Engine, flow: TestFlow, *keys: str) -> list[str]:
    ids = [flow.nodes[key] for key in keys]
    return await engine.backend.upkeep.trim_retention(flow.tag, "default", ids)


async def test_an_ended_flow_is_deleted_with_its_members(engine: Engine) -> None:
    flow = await submitted(engine, "a>b a>c")
    flows = engine.backend.flows
    error = await refused(flows.delete_flow(flow.flow_id), "flow_not_terminal")
    assert error.details == ("unfinished members: 3",)
    for key in "abc":
        await flow.end(key)
    assert await flows.delete_flow(flow.flow_id) == FlowDeleted(flow.flow_id)
    assert await flows.describe_flow(flow.flow_id) is None
    assert await flows.resolve_execution_flow_id(flow.nodes["a"]) is None
    assert (await flows.list_flows()).entries == ()
    await refused(flows.delete_flow(flow.flow_id), "flow_not_found")


async def test_which_flows_can_be_deleted(engine: Engine) -> None:
    flows = engine.backend.flows
    empty = new_uuid()
    await flows.create_flow(empty, "dag")
    await refused(flows.delete_flow(empty), "flow_not_terminal")
    await flows.cancel_flow(empty)
    await flows.delete_flow(empty)
    flow = await submitted(engine, "a")
    await flow.claim()
    await flows.cancel_flow(flow.flow_id, cancellation_policy="cancel_pending")
    error = await refused(flows.delete_flow(flow.flow_id), "flow_not_terminal")
    assert error.details == ("unfinished members: 1",)
    await flow.end("a")
    await flows.delete_flow(flow.flow_id)


async def test_a_result_stays_while_a_child_needs_it(engine: Engine) -> None:
    flow = await submitted(engine, "a>b", input_name="text")
    await flow.end("a", result=b"needed")
    await engine.advance(2 * DAY)
    assert await trim(engine, flow, "a") == ["not_due"]
    await flow.claim()
    assert flow.claims["b"].inputs.inputs["text"].result == b"needed"
    await engine.advance(2 * DAY)
    assert await trim(engine, flow, "a") == ["not_due"]
    await engine.backend.executions.cancel_execution(flow.nodes["b"])
    await engine.advance(2 * DAY)
    assert await trim(engine, flow, "a", "b") == ["purged", "purged"]
    snapshot = await flow.snapshot()
    assert snapshot.members == {"completed": 1, "cancelled": 1}
    assert snapshot.node_count == 2


async def test_a_flow_without_members_is_deleted_after_its_retention(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    flows = engine.backend.flows
    await flow.end("a")
    await flow.end("b")
    assert await flows.project_flow_summary(flow.flow_id) == FlowAudit("consistent")
    await engine.advance(2 * DAY)
    # Members are trimmed by their own retention first.
    assert await flows.project_flow_summary(flow.flow_id) == FlowAudit("consistent")
    assert await trim(engine, flow, "b", "a") == ["purged", "purged"]
    assert (await flow.snapshot()).derived_state == "completed"
    assert await flows.flow_ids(flow.nodes["a"].partition) == [flow.flow_id]
    assert await flows.project_flow_summary(flow.flow_id) == FlowAudit("deleted")
    assert await flows.project_flow_summary(flow.flow_id) == FlowAudit("orphan_removed")
    assert await flows.flow_ids(flow.nodes["a"].partition) == []


async def test_counters_survive_trimming(engine: Engine) -> None:
    flow = await submitted(engine, "a b c")
    await flow.end("a")
    await flow.end("b", "failed")
    await engine.advance(2 * DAY)
    assert await trim(engine, flow, "a", "b") == ["purged", "purged"]
    assert await engine.backend.flows.project_flow_summary(flow.flow_id) == FlowAudit("consistent")
    assert (await flow.snapshot()).members == {"completed": 1, "failed": 1, "active": 1}
    page = await engine.backend.flows.list_members(flow.flow_id)
    assert [member.node for member in page.entries] == ["c"]


async def test_edges_of_trimmed_members_are_gone(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    edge = await only_edge(flow, "b")
    await flow.end("a", "failed")
    await engine.advance(2 * DAY)
    assert await trim(engine, flow, "b", "a") == ["purged", "purged"]
    assert await engine.backend.flows.describe_edge(flow.flow_id, edge) is None
    assert (await engine.backend.flows.list_edges(flow.flow_id)).entries == ()


async def test_the_edges_of_a_trimmed_member_do_not_lead_to_another_with_its_id(
    engine: Engine,
) -> None:
    flow = await submitted(engine, "a>c b")
    flows = engine.backend.flows
    await engine.backend.executions.cancel_execution(flow.nodes["c"])
    await engine.advance(2 * DAY)
    assert await trim(engine, flow, "c") == ["purged"]
    node, edge = GraphNode(key="c", execution_kind="job"), GraphEdge(frm="b", to="c")
    await flows.extend_flow(flow.flow_id, [node], [edge])
    (only,) = (await flows.list_edges(flow.flow_id)).entries
    assert only.upstream_execution_id == flow.nodes["b"]
    await flow.end("a")
    assert await flow.state("c") == "waiting_children"
    await flow.end("b")
    assert await flow.state("c") == "waiting"


async def test_a_skipped_member_without_its_upstream_cannot_run(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("a", "failed")
    await engine.advance(2 * DAY)
    assert await trim(engine, flow, "a") == ["purged"]
    error = await refused(
        engine.backend.executions.replay_execution(flow.nodes["b"]), "deps_not_satisfied"
    )
    assert error.details == (flow.nodes["a"],)


@pytest.mark.parametrize("how", ["success", "failed", "cancelled"])
async def test_an_end_tells_what_it_meant_for_others(engine: Engine, how: str) -> None:
    flow = await submitted(engine, "a>b>c")
    await flow.claim()
    executions = engine.backend.executions
    handle = flow.claims["a"].handle
    outcome: Any
    if how == "success":
        outcome = await executions.complete(handle)
    elif how == "failed":
        outcome = await executions.fail(handle, "x", "permanent")
    else:
        outcome = await executions.cancel(handle)
    cascade = outcome.cascade
    assert cascade is not None
    good = how == "success"
    assert (cascade.resolved, cascade.promoted, cascade.skipped, cascade.pending) == (
        (1, 1, 0, False) if good else (2, 0, 2, False)
    )


async def test_a_late_edge_tells_what_it_meant_for_others(engine: Engine) -> None:
    flow = await submitted(engine, "a b>c>d x")
    flows = engine.backend.flows
    await flow.end("a", "failed")
    applied: Any = await flows.add_dependency(flow.flow_id, flow.nodes["a"], flow.nodes["c"])
    assert (applied.resolution, applied.cascade.skipped) == ("impossible", 2)
    staged = await flows.stage_dependency_edge(flow.flow_id, flow.nodes["a"], flow.nodes["x"])
    applied = await flows.apply_dependency_to_child(flow.flow_id, staged.edge_id)
    assert (applied.resolution, applied.cascade.resolved) == ("impossible", 1)


async def test_an_expired_member_leaves_nothing_to_a_scanner(engine: Engine) -> None:
    """What one call cannot do is continued by the client that made it."""
    children = " ".join(f"a>c{n}" for n in range(300))
    plain = graph(children)
    root = msgspec.structs.replace(plain.nodes[0], execution_deadline_at=await engine.now() + 1000)
    outcome = await engine.backend.flows.submit_flow(
        msgspec.structs.replace(plain, nodes=(root, *plain.nodes[1:]))
    )
    assert isinstance(outcome, Submitted)
    flow = TestFlow(engine, outcome)
    await engine.advance(1001)
    upkeep = engine.backend.upkeep
    due = ExpireReason.EXECUTION_DEADLINE
    assert await upkeep.expire_execution(flow.tag, due, [flow.nodes["a"]]) == ["expired"]
    assert await engine.backend.flows.wait_flow(flow.flow_id, 10) == "failed"
    assert (await flow.snapshot()).members == {"expired": 1, "skipped": 300}


async def test_an_end_without_a_flow_tells_nothing(engine: Engine) -> None:
    handle = await engine.running()
    assert (await engine.backend.executions.complete(handle)).cascade is None
