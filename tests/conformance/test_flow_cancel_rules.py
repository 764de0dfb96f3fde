"""Cancelling a flow is exact for members in every state (08 B11)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.flows import (
    AlreadyExtended,
    AlreadySubmitted,
    GraphEdge,
    Released,
    Submitted,
)
from flowfabric.core.policy import parse_policy
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.flows import TestFlow, graph, submitted
from tests.support.suspension import Waits

RETRIES = parse_policy(
    {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1000}}}
)


async def cancel(flow: TestFlow, policy: str = "cancel_pending", why: str = "why") -> Any:
    return await flow.backend.flows.cancel_flow(flow.flow_id, why, cancellation_policy=policy)


async def reason(flow: TestFlow, key: str) -> str | None:
    info = await flow.backend.reads.read_execution_info(flow.nodes[key])
    assert info.cancelled_by == "flow_cascade"
    return info.cancellation_reason


async def retried(engine: Engine, text: str) -> TestFlow:
    plain = graph(text)
    nodes = tuple(msgspec.structs.replace(node, policy=RETRIES) for node in plain.nodes)
    outcome = await engine.backend.flows.submit_flow(msgspec.structs.replace(plain, nodes=nodes))
    assert isinstance(outcome, Submitted)
    return TestFlow(engine, outcome)


async def fail(flow: TestFlow, key: str) -> Any:
    return await flow.backend.executions.fail_execution(
        *(flow.nodes[key], flow.claims[key].handle),
        failure_reason="test",
        failure_category="transient",
    )


async def test_pending_members_end_and_running_ones_go_on(engine: Engine) -> None:
    flow = await submitted(engine, "run susp ready block>after")
    assert await flow.claim() == ["block", "ready", "run", "susp"]
    waits = await Waits.open(engine)
    await waits.park(handle=flow.claims["susp"].handle)
    await engine.backend.executions.delay_execution(
        flow.nodes["ready"], flow.claims["ready"].handle, delay_until=await engine.now() + 60_000
    )
    outcome = await cancel(flow)
    assert outcome.kind == "cancelled"
    assert await flow.states() == {
        "run": "active",
        "susp": "suspended",
        "ready": "cancelled",
        "block": "active",
        "after": "cancelled",
    }
    assert await reason(flow, "after") == "why"
    await flow.end("run")
    await flow.end("block")
    assert await flow.state("after") == "cancelled"


async def test_a_resumed_member_of_a_draining_flow_goes_on(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.claim()
    await (await Waits.open(engine)).park(handle=flow.claims["a"].handle)
    await cancel(flow)
    await engine.backend.suspensions.resume_execution(flow.nodes["a"])
    assert await flow.claim() == ["a"]
    assert flow.claims["a"].handle.kind == "resumed"
    await flow.end("a")
    assert await flow.states() == {"a": "completed", "b": "cancelled"}


@pytest.mark.parametrize("kind", ["terminal", "success_only"])
async def test_a_parked_member_ends_with_those_that_wait(engine: Engine, kind: str) -> None:
    """Its upstream is cancelled first, but decides nothing that the flow has decided."""
    flow = await submitted(engine, "a b")
    await flow.claim()
    handles = {key: claim.handle for key, claim in flow.claims.items()}
    await engine.backend.flows.add_dependency(
        flow.flow_id, flow.nodes["a"], flow.nodes["b"], dependency_kind=kind
    )
    await engine.backend.executions.delay(handles["a"], await engine.now() + 60_000)
    assert (await engine.backend.executions.wait_children(handles["b"])).kind == "moved"
    await cancel(flow)
    assert await flow.states() == {"a": "cancelled", "b": "cancelled"}
    assert await reason(flow, "b") == "why"


async def test_a_suspended_member_of_a_cancelled_flow_ends_when_it_would_resume(
    engine: Engine,
) -> None:
    flow = await submitted(engine, "a")
    await flow.claim()
    await (await Waits.open(engine)).park(handle=flow.claims["a"].handle)
    await cancel(flow, "cancel_all")
    assert await flow.state("a") == "cancelled"
    await refused(
        engine.backend.suspensions.resume_execution(flow.nodes["a"]), "execution_not_suspended"
    )


async def test_a_failing_attempt_gets_no_retry(engine: Engine) -> None:
    flow = await retried(engine, "a>b")
    await flow.claim()
    await cancel(flow)
    assert (await fail(flow, "a")).kind == "terminal_failed"
    assert await flow.states() == {"a": "failed", "b": "cancelled"}


async def test_a_member_between_attempts_ends(engine: Engine) -> None:
    flow = await retried(engine, "a")
    await flow.claim()
    assert (await fail(flow, "a")).kind == "retry_scheduled"
    await cancel(flow)
    assert await flow.state("a") == "cancelled"


async def test_a_lost_lease_ends_cancelled(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    await flow.claim()
    await cancel(flow)
    await engine.advance(TTL + 1)
    marked = await engine.backend.upkeep.mark_lease_expired_if_due(flow.tag, [flow.nodes["a"]])
    assert marked == ["cancelled"]
    assert await flow.state("a") == "cancelled"
    assert await reason(flow, "a") == "why"
    assert (await flow.snapshot()).finished_at is not None


async def test_a_revoked_lease_ends_cancelled_at_the_next_claim(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    await flow.claim()
    await cancel(flow)
    await engine.backend.leases.revoke_lease(flow.nodes["a"])
    assert await flow.claim() == []
    assert await flow.state("a") == "cancelled"


async def test_flow_only_leaves_members_alone(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    outcome = await cancel(flow, "flow_only")
    assert (outcome.kind, outcome.total_members, outcome.pending_members) == ("cancelled", 2, 0)
    await flow.end("a")
    await flow.end("b")
    snapshot = await flow.snapshot()
    assert (snapshot.public_flow_state, snapshot.derived_state) == ("cancelled", "completed")


async def test_an_unknown_policy_is_stored_and_means_flow_only(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    flow = await submitted(engine, "a")
    outcome = await cancel(flow, "cancel_flow_only")
    assert "unknown policy 'cancel_flow_only'" in caplog.text
    assert outcome.cancellation_policy == "cancel_flow_only"
    assert await flow.claim() == ["a"]


async def test_a_stronger_policy_reaches_more_and_a_weaker_one_nothing(engine: Engine) -> None:
    flow = await submitted(engine, "a b>c")
    await flow.claim()
    await cancel(flow, "flow_only", "first")
    assert await flow.state("c") == "waiting_children"
    outcome = await cancel(flow, "cancel_pending", "second")
    assert outcome.cancellation_policy == "cancel_pending"
    assert await flow.states() == {"a": "active", "b": "active", "c": "cancelled"}
    assert await reason(flow, "c") == "second"
    outcome = await cancel(flow, "cancel_all", "third")
    assert outcome.cancellation_policy == "cancel_all"
    assert set((await flow.states()).values()) == {"cancelled"}
    async with untouched(engine):
        for weaker in ("cancel_all", "cancel_pending", "flow_only"):
            again = await cancel(flow, weaker, "ignored")
            assert (again.kind, again.cancellation_policy) == ("cancelled", "cancel_all")
            assert (again.total_members, again.truncated, again.pending_members) == (3, False, 0)
            assert set(again.member_execution_ids) == set(flow.nodes.values())
    assert (await flow.snapshot()).cancel_reason == "third"


@pytest.mark.parametrize("policy", ["cancel_all", "cancel_pending"])
async def test_ends_during_a_cancel_never_skip(engine: Engine, policy: str) -> None:
    """Verdicts are recorded, but a member that is owed a cancel ends cancelled."""
    flow = await submitted(engine, "a>b>c")
    await flow.claim()
    if policy == "cancel_pending":
        await cancel(flow, policy)
        await flow.end("a", "failed")
    else:
        await cancel(flow, policy)
        await refused(fail(flow, "a"), "execution_not_active")
    states = await flow.states()
    assert states["b"] == states["c"] == "cancelled"
    assert await reason(flow, "c") == "why"
    assert (await flow.snapshot()).members == await flow.recount()


async def test_no_member_joins_a_cancelled_flow(engine: Engine) -> None:
    flow = await submitted(engine, "a b")
    other = await engine.create(execution_id=flow.new_member_id())
    await cancel(flow, "flow_only")
    flows = engine.backend.flows
    async with untouched(engine):
        await refused(flows.add_execution_to_flow(flow.flow_id, other), "flow_already_terminal")
        await refused(
            flows.add_dependency(flow.flow_id, flow.nodes["a"], flow.nodes["b"]),
            "flow_already_terminal",
        )
        await refused(flows.extend_flow(flow.flow_id, graph("x").nodes), "flow_already_terminal")


async def test_repeats_find_what_a_cancelled_flow_has(engine: Engine) -> None:
    """A client that asks again after a lost reply learns that the flow is stored."""
    flows = engine.backend.flows
    held = msgspec.structs.replace(graph("a>b"), hold=True)
    flow = TestFlow(engine, await flows.submit_flow(held))  # type: ignore[arg-type]
    new, edges = (
        graph("c").nodes,
        [GraphEdge(frm="b", to="c"), GraphEdge(frm="a", to="b", input_name="x")],
    )
    await flows.extend_flow(flow.flow_id, new, edges)
    await flows.release_flow(flow.flow_id)
    await cancel(flow, "flow_only")
    async with untouched(engine):
        assert isinstance(await flows.submit_flow(held), AlreadySubmitted)
        assert isinstance(await flows.extend_flow(flow.flow_id, new, edges), AlreadyExtended)
        assert await flows.release_flow(flow.flow_id) == Released(0)
        more = [*edges, GraphEdge(frm="a", to="c")]
        await refused(flows.extend_flow(flow.flow_id, new, more), "flow_already_terminal")


async def test_a_held_flow_whose_members_end_is_not_released(engine: Engine) -> None:
    flows = engine.backend.flows
    for policy in ("cancel_all", "cancel_pending"):
        held = await flows.submit_flow(msgspec.structs.replace(graph("a"), hold=True))
        await flows.cancel_flow(held.flow_id, cancellation_policy=policy)
        async with untouched(engine):
            await refused(flows.release_flow(held.flow_id), "flow_already_terminal")


async def test_a_held_flow_that_keeps_its_members_is_released(engine: Engine) -> None:
    """`flow_only` stops nothing: its members would wait for good."""
    flows = engine.backend.flows
    held = await flows.submit_flow(msgspec.structs.replace(graph("a"), hold=True))
    flow = TestFlow(engine, held)  # type: ignore[arg-type]
    await cancel(flow, "flow_only")
    assert await flows.release_flow(flow.flow_id) == Released(1)
    assert await flow.claim() == ["a"]
