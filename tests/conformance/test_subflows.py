"""A member of kind `subflow` owns a flow, waits for it, and ends as it does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import (
    AlreadySubmitted,
    FlowGraph,
    GraphEdge,
    GraphNode,
)
from flowfabric.core.ids import new_uuid
from flowfabric.core.policy import parse_policy
from flowfabric.core.state import ExpireReason
from tests.support.engine import Engine, refused, untouched
from tests.support.flows import TestFlow, graph
from tests.support.subflows import NEVER_CLAIMED, child, drained, owning, parent


async def test_a_subflow_runs_between_its_neighbours(engine: Engine) -> None:
    flow = await parent(engine)
    sub = await child(flow, "x>y")
    assert await flow.state("s") == NEVER_CLAIMED
    assert await flow.claim() == ["a"]
    waiting = await sub.snapshot()
    assert (waiting.held, waiting.awaits_parent) == (False, True)
    await flow.end("a")
    assert await flow.claim() == ["x"]
    await flow.end("x")
    assert await flow.claim() == ["y"]
    assert await flow.state("s") == NEVER_CLAIMED
    await flow.end("y", result=b"\xff of y")
    assert await flow.state("s") == "completed"
    assert await flow.claim() == ["z"]
    given = flow.claims["z"].inputs.inputs["before"]
    assert (given.outcome, given.result) == ("success", b"\xff of y")
    snapshot = await sub.snapshot()
    assert snapshot.parent_execution_id == flow.nodes["s"]
    assert (await flow.snapshot()).parent_execution_id is None
    assert (await flow.snapshot()).members == {"completed": 2, "active": 1}


async def test_a_subflow_may_be_submitted_while_its_parent_waits_for_it(engine: Engine) -> None:
    flow = await parent(engine, "s>z")
    assert await flow.claim() == []
    info = await engine.backend.reads.read_execution_info(flow.nodes["s"])
    assert info.blocking_detail == "no subflow"
    assert info.state_vector.blocking_reason.value == "waiting_for_children"
    eligibility = await engine.backend.flows.evaluate_flow_eligibility(flow.nodes["s"])
    assert eligibility == "blocked_by_dependencies"
    await refused(
        engine.backend.flows.promote_blocked_to_eligible(flow.nodes["s"]), "deps_not_satisfied"
    )
    await child(flow, "x")
    assert await flow.claim() == ["x"]
    await flow.end("x")
    assert await flow.claim() == ["z"]


async def test_a_repeat_finds_the_subflow(engine: Engine) -> None:
    flow = await parent(engine)
    sub = await child(flow, "x")
    again = msgspec.structs.replace(graph("x"), flow_id="")
    async with untouched(engine):
        outcome = await engine.backend.flows.submit_flow(again, parent_execution_id=flow.nodes["s"])
    assert isinstance(outcome, AlreadySubmitted)
    assert outcome.flow_id == sub.flow_id


@pytest.mark.parametrize(
    ("results", "stored", "encoding"),
    [
        ({"x": (b'{"n":1}', "json"), "y": (b"[2]", "json")}, {"x": {"n": 1}, "y": [2]}, "json"),
        ({"x": (b"1", "json"), "y": None}, {"x": 1, "y": None}, "json"),
        (
            {"x": (b"1", "json"), "y": (bytes(range(256)), "")},
            {"x": b"1", "y": bytes(range(256))},
            "msgpack",
        ),
    ],
)
async def test_several_exit_nodes_give_one_result(
    engine: Engine, results: dict[str, Any], stored: Any, encoding: str
) -> None:
    flow = await parent(engine, "s")
    await child(flow, "w>x w>y")
    await flow.end("w")
    await flow.claim()
    for key, result in results.items():
        payload, label = result or (None, "")
        await engine.backend.executions.complete_execution(
            *(flow.nodes[key], flow.claims[key].handle),
            result_payload=payload,
            result_encoding=label,
        )
    info = await engine.backend.reads.read_execution_info(flow.nodes["s"])
    assert (info.public_state, info.result_encoding) == ("completed", encoding)
    raw = await engine.backend.reads.get_execution_result(flow.nodes["s"])
    assert raw is not None
    decode = msgspec.json.decode if encoding == "json" else msgspec.msgpack.decode
    assert decode(raw) == stored


async def test_a_failed_subflow_fails_its_parent(engine: Engine) -> None:
    flow = await parent(engine, "s>z")
    sub = await child(flow, "x>y")
    await flow.end("x", "failed")
    assert await flow.states() == {"s": "failed", "z": "skipped", "x": "failed", "y": "skipped"}
    info = await engine.backend.reads.read_execution_info(flow.nodes["s"])
    assert info.failure_reason == f"Subflow {sub.flow_id} failed: 1 failed, 1 skipped"


async def test_a_cancelled_subflow_cancels_its_parent(engine: Engine) -> None:
    flow = await parent(engine, "s>z")
    sub = await child(flow, "x>y")
    await engine.backend.flows.cancel_flow(sub.flow_id, "not needed")
    assert await flow.states() == dict.fromkeys("sxy", "cancelled") | {"z": "skipped"}
    info = await engine.backend.reads.read_execution_info(flow.nodes["s"])
    assert info.cancellation_reason == "not needed"


@pytest.mark.parametrize("policy", ["cancel_all", "cancel_pending", "flow_only"])
async def test_cancelling_the_parent_flow_reaches_every_level(engine: Engine, policy: str) -> None:
    flow = await parent(engine, "s>z")
    outcome = await engine.backend.flows.submit_flow(
        msgspec.structs.replace(owning("x t>y", "t"), flow_id=""),
        parent_execution_id=flow.nodes["s"],
    )
    flow.nodes.update(outcome.nodes)
    middle = TestFlow(engine, outcome)  # type: ignore[arg-type]
    low = await child(flow, "u>v", "t")
    assert await flow.claim() == ["u", "x"]
    await engine.backend.flows.cancel_flow(flow.flow_id, "why", cancellation_policy=policy)
    for each in (middle, low):
        snapshot = await each.snapshot()
        assert (snapshot.public_flow_state, snapshot.cancel_reason) == ("cancelled", "why")
        assert snapshot.cancellation_policy == policy
    if policy == "cancel_all":
        assert set((await flow.states()).values()) == {"cancelled"}
        return
    running = dict.fromkeys("ux", "active") | dict.fromkeys("st", "waiting_children")
    rest = "cancelled" if policy == "cancel_pending" else "waiting_children"
    assert await flow.states() == running | dict.fromkeys("zyv", rest)
    await flow.end("x")
    await flow.end("u")
    if policy == "cancel_pending":
        assert await flow.states() == dict.fromkeys("ux", "completed") | dict.fromkeys(
            "stzyv", "cancelled"
        )
        return
    for key in "vyz":
        await flow.end(key)
    assert set((await flow.states()).values()) == {"completed"}


async def test_a_subflow_that_is_still_to_begin_runs_in_a_flow_that_lets_members_finish(
    engine: Engine,
) -> None:
    flow = await parent(engine, "a>s>z")
    await child(flow, "x>y")
    assert await flow.claim() == ["a"]
    await engine.backend.flows.cancel_flow(flow.flow_id, "why", cancellation_policy="flow_only")
    for key in "axyz":
        await flow.end(key)
    assert set((await flow.states()).values()) == {"completed"}


async def test_a_stronger_policy_reaches_a_subflow_that_was_draining(engine: Engine) -> None:
    flow = await parent(engine, "s")
    await child(flow, "x")
    assert await flow.claim() == ["x"]
    flows = engine.backend.flows
    await flows.cancel_flow(flow.flow_id, "soft", cancellation_policy="cancel_pending")
    assert await flow.state("x") == "active"
    await flows.cancel_flow(flow.flow_id, "hard", cancellation_policy="cancel_all")
    assert await flow.states() == {"s": "cancelled", "x": "cancelled"}


async def test_the_end_of_the_parent_cancels_the_subflow(engine: Engine) -> None:
    flow = await parent(engine, "a>s")
    sub = await child(flow, "x")
    await flow.end("a", "failed")
    assert await flow.states() == {"a": "failed", "s": "skipped", "x": "cancelled"}
    assert (await sub.snapshot()).cancel_reason == "parent_skipped"

    flow = await parent(engine, "s")
    sub = await child(flow, "x>y")
    await flow.claim()
    await engine.backend.executions.cancel_execution(flow.nodes["s"], "by hand")
    assert set((await flow.states()).values()) == {"cancelled"}
    assert (await sub.snapshot()).cancel_reason == "by hand"

    now = await engine.now()
    flow = await parent(engine, "s", execution_deadline_at=now + 1000)
    sub = await child(flow, "x")
    await engine.advance(1000)
    await engine.backend.upkeep.expire_execution(
        flow.tag, ExpireReason.EXECUTION_DEADLINE, [flow.nodes["s"]]
    )
    assert await flow.states() == {"s": "expired", "x": "cancelled"}
    assert (await sub.snapshot()).cancel_reason == "parent_expired"


async def test_a_subflow_waits_for_the_delay_and_the_release_of_its_parent(engine: Engine) -> None:
    flow = await parent(engine, "a>s", delay_ms=5000)
    sub = await child(flow, "x", hold=True)
    await flow.end("a")
    assert await flow.state("s") == "delayed"
    await engine.advance(5000)
    await engine.backend.upkeep.promote_delayed(flow.tag, "default", [flow.nodes["s"]])
    assert await flow.state("s") == NEVER_CLAIMED
    assert await flow.claim() == []
    assert (await engine.backend.flows.release_flow(sub.flow_id)).eligible == 1
    await flow.end("x")
    assert await flow.state("s") == "completed"

    held = msgspec.structs.replace(owning("s", "s"), hold=True)
    outcome = await engine.backend.flows.submit_flow(held)
    flow = TestFlow(engine, outcome)  # type: ignore[arg-type]
    sub = await child(flow, "x", hold=True)
    assert (await engine.backend.flows.release_flow(sub.flow_id)).eligible == 0
    assert await flow.claim() == []
    await engine.backend.flows.release_flow(flow.flow_id)
    assert await flow.claim() == ["x"]


async def test_subflows_nest_at_most_sixteen_deep(engine: Engine) -> None:
    flow = await parent(engine, "s0", "s0")
    for depth in range(1, 17):
        outcome = await engine.backend.flows.submit_flow(
            msgspec.structs.replace(owning(f"s{depth}", f"s{depth}"), flow_id=""),
            parent_execution_id=flow.nodes[f"s{depth - 1}"],
        )
        flow.nodes.update(outcome.nodes)
    deep = msgspec.structs.replace(graph("x"), flow_id="")
    async with untouched(engine):
        error = await refused(
            engine.backend.flows.submit_flow(deep, parent_execution_id=flow.nodes["s16"]),
            "invalid_input",
        )
    assert "16" in str(error)
    await engine.backend.flows.cancel_flow(flow.flow_id)
    await drained(engine, flow)
    assert set((await flow.states()).values()) == {"cancelled"}


async def test_a_chain_of_subflows_ends_with_its_last_member(engine: Engine) -> None:
    flow = await parent(engine, "s0", "s0")
    for depth in range(1, 8):
        outcome = await engine.backend.flows.submit_flow(
            msgspec.structs.replace(owning(f"s{depth}", f"s{depth}"), flow_id=""),
            parent_execution_id=flow.nodes[f"s{depth - 1}"],
        )
        flow.nodes.update(outcome.nodes)
    await child(flow, "x", "s7")
    await flow.end("x", result=b"from the bottom")
    assert set((await flow.states()).values()) == {"completed"}
    result = await engine.backend.reads.get_execution_result(flow.nodes["s0"])
    assert result == b"from the bottom"


async def test_submissions_that_no_parent_can_own(engine: Engine) -> None:
    flow = await parent(engine, "a s")
    flows = engine.backend.flows
    plain = msgspec.structs.replace(graph("x"), flow_id="")
    elsewhere = next(
        each for each in iter(new_uuid, "") if TestFlow.tag_of(engine, each) != flow.tag
    )
    solo = await engine.create()
    absent = type(solo).parse(f"{flow.tag}:{new_uuid()}")

    async def submit(code: str, given: FlowGraph, owner: Any, **options: Any) -> None:
        async with untouched(engine):
            await refused(flows.submit_flow(given, parent_execution_id=owner, **options), code)

    owner = flow.nodes["s"]
    await submit("invalid_input", plain, flow.nodes["a"])
    await submit("invalid_input", plain, solo)
    await submit("execution_not_found", plain, absent)
    await submit("invalid_input", msgspec.structs.replace(plain, namespace="other"), owner)
    await submit("partition_mismatch", msgspec.structs.replace(plain, flow_id=elsewhere), owner)
    await submit("invalid_input", plain, None, spread=True)
    wrong = NewExecution(execution_id=engine.new_id(), execution_kind="subflow")
    await refused(engine.backend.executions.create_execution(wrong), "invalid_input")

    await child(flow, "x")
    other = next(each for each in iter(new_uuid, "") if TestFlow.tag_of(engine, each) == flow.tag)
    await submit("flow_submission_conflict", graph("x", flow_id=other), owner)
    await engine.backend.executions.cancel_execution(owner)
    await submit("terminal", graph("x", flow_id=other), owner)
    await flows.cancel_flow(flow.flow_id)
    await submit("flow_already_terminal", graph("x", flow_id=other), owner)


async def test_a_late_edge_does_not_end_a_subflow_that_runs(engine: Engine) -> None:
    flow = await parent(engine, "a b s")
    await child(flow, "x")
    add = engine.backend.flows.add_dependency
    await flow.end("a", "failed")
    await add(flow.flow_id, flow.nodes["a"], flow.nodes["s"])
    await add(flow.flow_id, flow.nodes["b"], flow.nodes["s"])
    assert await flow.state("s") == NEVER_CLAIMED
    await flow.end("b")
    await flow.end("x", result=b"1")
    assert await flow.state("s") == "completed"


async def test_members_added_later_belong_to_the_result(engine: Engine) -> None:
    flow = await parent(engine, "s")
    sub = await child(flow, "x")
    extended = await engine.backend.flows.extend_flow(
        sub.flow_id,
        [GraphNode(key="y", execution_kind="job")],
        [GraphEdge(frm="x", to="y")],
    )
    flow.nodes.update(extended.nodes)
    await flow.end("x", result=b"x")
    await flow.end("y", result=b"y")
    assert await engine.backend.reads.get_execution_result(flow.nodes["s"]) == b"y"


async def test_exit_results_stay_until_the_subflow_finishes(engine: Engine) -> None:
    flow = await parent(engine, "s")
    brief = parse_policy({"stream_policy": {"retention_ttl_ms": 1000}})
    nodes = tuple(GraphNode(key=key, execution_kind="job", policy=brief) for key in "xy")
    sub = await child(flow, "x", nodes=nodes)
    await flow.end("x", result=b"kept")
    await engine.advance(2000)
    await engine.backend.upkeep.trim_retention(flow.tag, "default", [flow.nodes["x"]])
    assert await flow.state("x") == "completed"
    await flow.end("y", result=b"new")
    raw = await engine.backend.reads.get_execution_result(flow.nodes["s"])
    assert raw is not None
    assert msgspec.msgpack.decode(raw) == {"x": b"kept", "y": b"new"}
    await engine.backend.flows.delete_flow(sub.flow_id)
    assert await engine.backend.flows.describe_flow(sub.flow_id) is None
    assert await flow.state("s") == "completed"


async def test_a_failed_subflow_goes_on_where_it_failed(engine: Engine) -> None:
    flow = await parent(engine, "s>z")
    await child(flow, "w>x>y")
    await flow.end("w")
    await flow.end("x", "failed")
    assert await flow.state("s") == "failed"
    replayed = await engine.backend.executions.replay_execution(
        flow.nodes["s"], reopen_downstream=True
    )
    assert (replayed.public_state, replayed.reopened) == ("waiting_children", 1)
    await drained(engine, flow)
    flow.claims.clear()
    assert await flow.claim() == ["x"]
    await flow.end("x")
    await flow.end("y", result=b"at last")
    assert await flow.state("s") == "completed"
    assert await flow.claim() == ["z"]
    assert flow.claims["z"].inputs.inputs["before"].result == b"at last"


async def test_a_completed_subflow_runs_again_from_its_roots(engine: Engine) -> None:
    flow = await parent(engine, "a>s")
    await child(flow, "x>y")
    for key in "axy":
        await flow.end(key, result=b"1")
    await engine.backend.executions.replay_execution(flow.nodes["s"])
    await drained(engine, flow)
    flow.claims.clear()
    assert await flow.claim() == ["x"]
    await flow.end("x")
    await flow.end("y", result=b"2")
    assert await engine.backend.reads.get_execution_result(flow.nodes["s"]) == b"2"


async def test_members_that_cannot_run_again_fail_the_subflow_again(engine: Engine) -> None:
    flow = await parent(engine, "s")
    once = parse_policy({"max_replay_count": 0})
    node = GraphNode(key="x", execution_kind="job", policy=once)
    await child(flow, "x", nodes=(node,))
    await flow.end("x", "failed")
    await engine.backend.executions.replay_execution(flow.nodes["s"])
    await drained(engine, flow)
    assert await flow.states() == {"s": "failed", "x": "failed"}


@pytest.mark.parametrize("how", ["skipped", "cancelled", "flow cancelled"])
@pytest.mark.parametrize("spread", [False, True])
async def test_a_subflow_that_was_cancelled_runs_from_its_start(
    engine: Engine, how: str, spread: bool
) -> None:
    flow = await parent(engine, "a>s>z")
    sub = await child(flow, "x>y x>v", spread=spread)
    await drained(engine, flow, sub)
    if how == "skipped":
        await flow.end("a", "failed")
    else:
        await flow.end("a")
        await drained(engine, flow, sub)
        await sub.end("x")
        assert await sub.claim() == ["v", "y"]
    if how == "cancelled":
        await flow.end("s", "cancelled")
    elif how == "flow cancelled":
        await engine.backend.flows.cancel_flow(sub.flow_id)
    await drained(engine, flow, sub)
    assert (await sub.snapshot()).public_flow_state == "cancelled"
    await engine.backend.flows.replay_flow(flow.flow_id, failed_only=False)
    await drained(engine, flow, sub)
    flow.claims.clear()
    sub.claims.clear()
    if how == "skipped":
        assert await flow.claim() == ["a"]
        await flow.end("a")
        await drained(engine, flow, sub)
    assert await sub.claim() == ["x"]
    for key in "xyv":
        assert await flow.state("s") == NEVER_CLAIMED
        await sub.end(key)
    await drained(engine, flow, sub)
    assert (await sub.snapshot()).public_flow_state == "open"
    assert await flow.state("s") == "completed"
    assert await flow.claim() == ["z"]


async def test_a_deleted_subflow_is_replaced(engine: Engine) -> None:
    flow = await parent(engine, "s")
    first = await child(flow, "x")
    await engine.backend.executions.cancel_execution(flow.nodes["s"])
    await engine.backend.flows.delete_flow(first.flow_id)
    await engine.backend.executions.replay_execution(flow.nodes["s"])
    assert await flow.state("s") == NEVER_CLAIMED
    del flow.nodes["x"]
    second = await child(flow, "y")
    assert second.flow_id != first.flow_id
    await flow.end("y")
    assert await flow.state("s") == "completed"


async def test_cancelling_a_flow_ends_a_member_whose_subflow_is_still_to_begin_once(
    engine: Engine,
) -> None:
    flow = await parent(engine, "a>s>z")
    await child(flow, "x>y")
    assert await flow.claim() == ["a"]
    await engine.backend.flows.cancel_flow(
        flow.flow_id, "why", cancellation_policy="cancel_pending"
    )
    assert await flow.states() == dict.fromkeys("sxyz", "cancelled") | {"a": "active"}
    events = await engine.events(flow.nodes["s"])
    assert [event.type for event in events].count("completion") == 1
    assert (await flow.snapshot()).members == {"active": 1, "cancelled": 2}
