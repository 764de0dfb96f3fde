"""Races and crash windows of flows (08 §17), with calls that can do one unit, two or three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.flows import (
    AnyOf,
    DependencyResolved,
    GraphEdge,
    GraphNode,
    Quorum,
)
from flowfabric.core.errors import EngineError
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine, refused
from tests.support.flows import TestFlow, drained, set_units, submitted, without_followups

SMALL = [1, 2, 3]
_NEW = GraphNode(key="new", execution_kind="job")


@pytest.fixture(autouse=True)
async def default_units(engine: Engine) -> AsyncIterator[None]:
    """Callers die after their calls; the next test finds the default again."""
    await without_followups(engine)
    yield
    await set_units(engine)


async def only_edge(flow: TestFlow, frm: str, to: str) -> str:
    (edge,) = (
        each
        for each in await flow.backend.flows.list_incoming_edges(flow.nodes[to])
        if each.upstream_execution_id == flow.nodes[frm]
    )
    return edge.edge_id


# --- overflow ----------------------------------------------------------------------


@pytest.mark.parametrize("units", SMALL)
async def test_a_call_stays_within_its_limit(engine: Engine, units: int) -> None:
    """What it leaves is stored with it, and each further call does as much."""
    await set_units(engine, units)
    flow = await submitted(engine, " ".join(f"root>n{n}" for n in range(10)))
    await drained(engine, flow.tag)
    await flow.claim()
    ended = await engine.backend.executions.complete(flow.claims["root"].handle)
    assert ended.cascade is not None
    assert (ended.cascade.resolved, ended.cascade.pending) == (units, True)
    released = units
    for _ in range(20):
        assert (await flow.recount()).get("waiting", 0) == released
        counts = await engine.backend.flows.drain_cascade(flow.nodes["root"].partition)
        assert counts.promoted <= units
        released += counts.promoted
        if not counts.pending:
            break
    else:
        pytest.fail("the backlog never empties")
    assert await flow.recount() == {"completed": 1, "waiting": 10}


@pytest.mark.parametrize("units", SMALL)
@pytest.mark.parametrize("how", ["success", "failed", "cancelled"])
async def test_a_deep_graph_is_decided_in_small_steps(engine: Engine, units: int, how: str) -> None:
    await set_units(engine, units)
    text = "r>a>b>c>d>e r>x>e r>y>z o>any e>any"
    flow = await submitted(engine, text, {"any": AnyOf("let_run")})
    await drained(engine, flow.tag)
    await flow.claim()
    await flow.end("o")
    await flow.end("r", how)
    await drained(engine, flow.tag)
    states = await flow.states()
    if how == "success":
        assert {key for key, state in states.items() if state == "waiting"} == {*"axy", "any"}
    else:
        assert {key for key, state in states.items() if state == "skipped"} == set("abcdexyz")
        assert states["any"] == "waiting"
    assert (await flow.snapshot()).members == await flow.recount()


@pytest.mark.parametrize("units", SMALL)
async def test_a_released_and_a_reopened_flow_in_small_steps(engine: Engine, units: int) -> None:
    await set_units(engine, units)
    flow = await submitted(engine, "r>a>b>c r>x>c")
    await drained(engine, flow.tag)
    await flow.end("r", "failed")
    await drained(engine, flow.tag)
    assert await flow.recount() == {"failed": 1, "skipped": 4}
    await engine.backend.flows.replay_flow(flow.flow_id)
    await drained(engine, flow.tag)
    assert await flow.recount() == {"waiting": 1, "waiting_children": 4}
    flow.claims.clear()
    for key in "raxbc":
        await flow.end(key)
        await drained(engine, flow.tag)
    assert (await flow.snapshot()).derived_state == "completed"


# --- an upstream that ends, and is replayed, in between ------------------------------


async def test_an_upstream_that_runs_again_decides_nothing_yet(engine: Engine) -> None:
    """It was replayed before its end was told to everybody: its marker is dropped."""
    await set_units(engine, 1)
    flow = await submitted(engine, "a>b a>c a>d")
    await flow.end("a")
    assert await flow.recount() == {"completed": 1, "waiting": 1, "waiting_children": 2}
    await engine.backend.executions.replay_execution(flow.nodes["a"])
    counts = await engine.backend.flows.drain_cascade(flow.nodes["a"].partition)
    assert (counts.resolved, counts.pending) == (0, False)
    assert [(await flow.state(key)).value for key in "cd"] == ["waiting_children"] * 2
    await set_units(engine)
    flow.claims.clear()
    await flow.end("a", "failed")
    # The first end stands for b, which was told; the others hear of the second one.
    assert [(await flow.state(key)).value for key in "cd"] == ["skipped"] * 2
    assert await flow.state("b") == "active"


@pytest.mark.parametrize("end", ["success", "failed"])
async def test_a_reopening_that_comes_late_changes_nothing(engine: Engine, end: str) -> None:
    """The member ended again before those after it were reopened: its new end counts."""
    flow = await submitted(engine, "a>b a>c>d other")
    await flow.end("a", "failed")
    await set_units(engine, 1)
    assert (await engine.backend.flows.replay_flow(flow.flow_id)).pending
    assert await flow.state("c") == "skipped"
    both = msgspec.structs.replace(_NEW, join=Quorum(2, "let_run"))
    edges = [GraphEdge(frm="a", to="new"), GraphEdge(frm="other", to="new")]
    flow.nodes |= (await engine.backend.flows.extend_flow(flow.flow_id, [both], edges)).nodes
    await set_units(engine)
    flow.claims.pop("a")
    await flow.end("a", end)
    await drained(engine, flow.tag)
    await flow.end("other")
    states = await flow.states()
    good = end == "success"
    assert [states[key] for key in ("b", "c", "new")] == ["waiting" if good else "skipped"] * 3
    assert states["d"] == ("waiting_children" if good else "skipped")


async def test_a_child_that_ended_is_left_alone(engine: Engine) -> None:
    """Cancelled while its upstream's end was on its way: no promotion, no data."""
    await set_units(engine, 1)
    flow = await submitted(engine, "a>b a>c", data_passing_ref="all")
    await drained(engine, flow.tag)
    await flow.end("a", result=b"too late")
    assert await flow.state("c") == "waiting_children"
    await engine.backend.executions.cancel_execution(flow.nodes["c"], "mine")
    await drained(engine, flow.tag)
    info = await engine.backend.reads.read_execution_info(flow.nodes["c"])
    assert (info.public_state.value, info.cancellation_reason) == ("cancelled", "mine")
    assert (await engine.backend.reads.read_execution_context(flow.nodes["c"])).input_payload == b""
    events = [event.type for event in await engine.events(flow.nodes["c"])]
    assert events.count("completion") == 1


async def test_what_resolving_an_edge_answers(engine: Engine) -> None:
    await set_units(engine, 1)
    joins = {"any": AnyOf("let_run"), "two": Quorum(2, "let_run")}
    text = "first>s a>any b>any a>two b>two c>two bad>i bad>k"
    flow = await submitted(engine, text, joins, data_passing_ref="")
    resolve = engine.backend.flows.resolve_dependency

    async def answer(frm: str, to: str, outcome: str = "success") -> DependencyResolved:
        return await resolve(flow.flow_id, await only_edge(flow, frm, to), outcome)

    await flow.claim()
    key = keys.index(flow.tag, "cascade_backlog")
    for end in ("a", "b"):
        await flow.end(end)
    # The first edge of each was decided with its end; the rest is left.
    assert await engine.backend.transport.call("ZCARD", key) == 2
    assert await answer("a", "any") == DependencyResolved("already_resolved")
    assert await answer("a", "two") == DependencyResolved("pending")
    assert await answer("b", "any") == DependencyResolved("already_resolved")
    assert await answer("b", "two") == DependencyResolved("satisfied")
    await flow.end("c")
    assert await flow.state("two") == "waiting"
    await flow.end("bad", "failed")
    assert await answer("bad", "k", "failed") == DependencyResolved(
        "impossible", child_skipped=True
    )
    assert await answer("bad", "k", "success") == DependencyResolved("already_resolved")


async def test_an_edge_of_a_decided_join_is_counted(engine: Engine) -> None:
    await set_units(engine, 1)
    flow = await submitted(engine, "b>y a>x a>z b>z", {"z": AnyOf("let_run")})
    await flow.claim()
    await flow.end("a")
    await flow.end("b")
    resolve = engine.backend.flows.resolve_dependency
    first = await resolve(flow.flow_id, await only_edge(flow, "a", "z"), "success")
    second = await resolve(flow.flow_id, await only_edge(flow, "b", "z"), "success")
    assert (first.verdict, second.verdict) == ("satisfied", "already_fired")
    groups = (await flow.snapshot()).edge_groups
    (join,) = (each for each in groups if each.downstream_execution_id == flow.nodes["z"])
    assert (join.group_state, join.satisfied_count) == ("satisfied", 2)


async def test_results_that_an_edge_passes_on(engine: Engine) -> None:
    await set_units(engine, 1)
    flow = await submitted(engine, "a>b a>c", data_passing_ref="all")
    await flow.end("a", result=b"r")
    resolve = engine.backend.flows.resolve_dependency
    told = await resolve(flow.flow_id, await only_edge(flow, "a", "c"), "success")
    assert told == DependencyResolved("satisfied", data_injected=True)


# --- siblings ------------------------------------------------------------------------


async def a_race(engine: Engine) -> TestFlow:
    """A join that one call decided; its siblings are left."""
    await set_units(engine, 1)
    flow = await submitted(engine, "a>z b>z c>z late", {"z": AnyOf("cancel_remaining")})
    await drained(engine, flow.tag)
    await flow.claim()
    await flow.end("a")
    assert await flow.recount() == {"completed": 1, "active": 3, "waiting": 1}
    return flow


async def test_siblings_in_small_steps(engine: Engine) -> None:
    flow = await a_race(engine)
    flows, z = engine.backend.flows, flow.nodes["z"]
    assert await flows.reconcile_sibling_cancel_group(flow.flow_id, z) == "no_op"
    answers = [await flows.drain_sibling_cancel_group(flow.flow_id, z) for _ in range(3)]
    assert answers == ["pending", "drained", "already_drained"]
    assert await flow.recount() == {"completed": 1, "active": 1, "cancelled": 2, "waiting": 1}


async def test_siblings_that_ended_meanwhile(engine: Engine) -> None:
    flow = await a_race(engine)
    await flow.end("b")
    await flow.end("c", "failed")
    reconcile = engine.backend.flows.reconcile_sibling_cancel_group
    assert await reconcile(flow.flow_id, flow.nodes["z"]) == "completed_drain"
    assert await reconcile(flow.flow_id, flow.nodes["z"]) == "no_op"


@pytest.mark.parametrize("what", ["drain", "reconcile"])
async def test_a_group_without_its_flag(engine: Engine, what: str) -> None:
    """A replay of the child forgot the decision; the entry is stale."""
    flow = await a_race(engine)
    await flow.claim()
    await engine.backend.executions.cancel_execution(flow.nodes["z"])
    core = keys.core(flow.tag, flow.nodes["z"])
    await engine.backend.transport.call("HDEL", core, "siblings")
    flows, args = engine.backend.flows, (flow.flow_id, flow.nodes["z"])
    if what == "drain":
        assert await flows.drain_sibling_cancel_group(*args) == "drained_sans_group"
    else:
        assert await flows.reconcile_sibling_cancel_group(*args) == "sremmed_stale"
    assert await flow.state("b") == "active"


async def test_an_edge_that_came_after_the_decision_has_no_siblings(engine: Engine) -> None:
    flow = await a_race(engine)
    await engine.backend.flows.add_dependency(flow.flow_id, flow.nodes["late"], flow.nodes["z"])
    await drained(engine, flow.tag)
    assert await flow.state("late") == "active"
    assert [(await flow.state(key)).value for key in "bc"] == ["cancelled"] * 2


# --- cancel_flow -----------------------------------------------------------------------


async def test_no_member_runs_after_the_cancellation(engine: Engine) -> None:
    """However few members the call reached: a claim ends what it would have taken."""
    await set_units(engine, 1)
    flow = await submitted(engine, "a b c d")
    grant = await engine.backend.claims.issue_claim_grant(
        flow.nodes["d"], worker_id="w", worker_instance_id="w-1"
    )
    await engine.backend.flows.cancel_flow(flow.flow_id, "why")
    assert await flow.recount() == {"cancelled": 1, "waiting": 3}
    await refused(
        engine.backend.claims.claim_execution(
            grant, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=1000
        ),
        "flow_already_terminal",
    )
    assert await flow.claim() == []
    for key in "bcd":
        info = await engine.backend.reads.read_execution_info(flow.nodes[key])
        assert (info.public_state.value, info.cancellation_reason) == ("cancelled", "why")


@pytest.mark.parametrize("units", SMALL)
async def test_a_cancellation_in_small_steps(engine: Engine, units: int) -> None:
    await set_units(engine, units)
    flow = await submitted(engine, "a b c d e f")
    await drained(engine, flow.tag)
    outcome = await engine.backend.flows.cancel_flow(flow.flow_id, "why")
    assert outcome.kind == "cancellation_scheduled"
    for _ in range(6):
        before = (await flow.recount()).get("cancelled", 0)
        cancelled, _, left = await engine.backend.flows.drain_flow_cancel(flow.flow_id)
        assert (await flow.recount())["cancelled"] == before + cancelled == 6 - left
        if not left:
            break
    assert await flow.recount() == {"cancelled": 6}
    assert await engine.backend.flows.drain_flow_cancel(flow.flow_id) == (0, 0, 0)


async def test_a_wait_for_members_ends_in_time(engine: Engine) -> None:
    await set_units(engine, 1)
    flow = await submitted(engine, " ".join(f"n{n}" for n in range(300)))
    await drained(engine, flow.tag)
    error = await refused(
        engine.backend.flows.cancel_flow(flow.flow_id, wait_timeout_ms=1), "timeout"
    )
    assert "cancel" in str(error)
    assert (await flow.snapshot()).public_flow_state == "cancelled"
    assert await flow.claim() == []


Rival = Callable[[TestFlow], Awaitable[Any]]


async def _complete(flow: TestFlow) -> Any:
    return await flow.backend.executions.complete(flow.claims["run"].handle)


async def _fail(flow: TestFlow) -> Any:
    return await flow.backend.executions.fail(flow.claims["run"].handle, "x", "permanent")


async def _claim(flow: TestFlow) -> Any:
    return await flow.backend.claims.claim_many(flow.engine.want(), flow.tag, 100)


async def _spawn(flow: TestFlow) -> Any:
    return await flow.backend.flows.spawn_children(flow.claims["run"].handle, [_NEW], wait=True)


async def _extend(flow: TestFlow) -> Any:
    edges = [GraphEdge(frm="run", to="new"), GraphEdge(frm="new", to="after")]
    return await flow.backend.flows.extend_flow(flow.flow_id, [_NEW], edges)


async def _depend(flow: TestFlow) -> Any:
    add = flow.backend.flows.add_dependency
    return await add(flow.flow_id, flow.nodes["run"], flow.nodes["lone"])


async def _replay(flow: TestFlow) -> Any:
    replay = flow.backend.executions.replay_execution
    return await replay(flow.nodes["failed"], reopen_downstream=True)


async def _replay_flow(flow: TestFlow) -> Any:
    return await flow.backend.flows.replay_flow(flow.flow_id, failed_only=False)


async def _drain(flow: TestFlow) -> Any:
    return await flow.backend.flows.drain_cascade(int(flow.tag[4:-1]))


RIVALS = [_complete, _fail, _claim, _spawn, _extend, _depend, _replay, _replay_flow, _drain]
GRAPH = "failed>skipped run>after>end lone run>any other>any"


@pytest.mark.parametrize("units", [1, 3, 128])
@pytest.mark.parametrize("policy", ["cancel_all", "cancel_pending", "flow_only"])
@pytest.mark.parametrize("rival", RIVALS)
async def test_a_cancellation_races_with_any_call(
    engine: Engine, rival: Rival, policy: str, units: int
) -> None:
    """Before it, after it, or between its steps: members end as the policy says."""
    for before in range(4):
        flow = await submitted(engine, GRAPH, {"any": AnyOf("cancel_remaining")})
        await flow.claim()
        await flow.end("failed", "failed")
        await engine.backend.executions.delay(
            flow.claims["lone"].handle, await engine.now() + 60_000
        )
        await set_units(engine, units)
        steps = [_cancelled_by(policy), _cancel_more, _cancel_more]
        steps.insert(before, rival)
        codes = [await _code(step(flow)) for step in steps]
        assert set(codes) <= {"", "flow_already_terminal", "execution_not_active"}
        while (await _cancel_more(flow))[2]:
            pass
        await drained(engine, flow.tag)
        await check_cancelled(flow, policy)
        await set_units(engine)
        await _cancelled_by("cancel_all")(flow)


def _cancelled_by(policy: str) -> Rival:
    return lambda flow: flow.backend.flows.cancel_flow(
        flow.flow_id, "why", cancellation_policy=policy
    )


async def _cancel_more(flow: TestFlow) -> Any:
    return await flow.backend.flows.drain_flow_cancel(flow.flow_id)


async def _code(call: Awaitable[Any]) -> str:
    """What the call is refused with, or nothing."""
    try:
        await call
    except EngineError as error:
        return error.code
    return ""


async def check_cancelled(flow: TestFlow, policy: str) -> None:
    page = await flow.backend.flows.list_members(flow.flow_id)
    flow.nodes |= {member.node: member.execution_id for member in page.entries}
    states = await flow.states()
    assert (await flow.snapshot()).members == await flow.recount()
    audit = await flow.backend.flows.project_flow_summary(flow.flow_id)
    assert audit.outcome == "consistent"
    alive = {key for key, state in states.items() if state in {"waiting", "waiting_children"}}
    if policy == "cancel_all":
        assert not alive | {key for key, state in states.items() if state in {"active", "delayed"}}
    elif policy == "cancel_pending":
        assert not alive
        assert "delayed" not in states.values()
    # Nobody waits for what has been decided.
    for member in page.entries:
        if member.public_state == "waiting_children":
            assert member.join is not None
            assert member.join.group_state == "pending"


async def test_stagers_at_the_same_time_leave_no_cycle(engine: Engine) -> None:
    flow = await submitted(engine, "a b c d")
    add, pairs = engine.backend.flows.add_dependency, ["ab", "bc", "cd", "da", "ca", "db"]
    answers = await asyncio.gather(
        *(add(flow.flow_id, flow.nodes[pair[0]], flow.nodes[pair[1]]) for pair in pairs),
        return_exceptions=True,
    )
    codes = [each.code for each in answers if isinstance(each, EngineError)]
    assert codes
    assert set(codes) == {"cycle_detected"}
    while await flow.claim():
        for key in list(flow.claims):
            await flow.end(key)
            del flow.claims[key]
    assert await flow.recount() == {"completed": 4}
