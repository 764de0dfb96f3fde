"""Flows under faults: lost, repeated and reordered drains, a killed server, damaged members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.flows import (
    AnyOf,
    CancellationScheduled,
    FlowGraph,
    GraphNode,
    PartiallyCancelled,
    Quorum,
    Submitted,
)
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.base import ScanResult
from flowfabric.valkey.address import parse_url
from tests.model.flow_model import ENDED
from tests.support.engine import Engine, prepared_backend, refused
from tests.support.flows import (
    TestFlow,
    drained,
    graph,
    set_units,
    submitted,
    without_followups,
)
from tests.support.scanning import break_record, idle
from tests.support.sdk import seeded
from tests.support.server import TestServer
from tests.valkey.test_flow_random import model_of, random_graph

UNITS = [1, 2, 3, 7]
SCANNERS = (
    *("cascade_drain", "dependency_reconciler", "edge_cancel_dispatcher", "edge_cancel_reconciler"),
    *("cancel_reconciler", "flow_projector"),
)
QUEUES = (
    *("cascade_backlog", "pending_cancel_groups", "release_backlog", "cancel_backlog"),
    *("reopen_backlog", "replay_backlog", "cascade_failed", "cascade_poison"),
)


@pytest.fixture(autouse=True)
async def default_units(engine: Engine) -> AsyncIterator[None]:
    """Callers die after their calls; the next test finds the default again."""
    await without_followups(engine)
    yield
    await set_units(engine)


async def queues(flow: TestFlow) -> list[str]:
    """The queues of the partition that hold anything."""
    call, kept = flow.backend.transport.call, list[str]()
    for name in QUEUES:
        if await call("EXISTS", keys.index(flow.tag, name)):
            kept.append(name)
    return kept


# --- drains ------------------------------------------------------------------------


def expected(graph: FlowGraph, ends: dict[str, str]) -> dict[str, str]:
    """The states in which a graph ends if each member that runs ends like this."""
    model = model_of(graph)
    while ready := [key for key, state in model.states.items() if state == "waiting"]:
        for key in ready:
            model.end(key, ends[key])
    return model.states


@pytest.mark.parametrize("units", UNITS)
async def test_drains_may_be_lost_repeated_and_reordered(engine: Engine, units: int) -> None:
    """The order of drains decides nothing: joins that let others run end in one way only."""
    rng = seeded("drains may be lost repeated and reordered")
    await set_units(engine, units)
    supervisor = idle(engine)
    for _ in range(8):
        graph = random_graph(rng)
        ends = {n.key: rng.choice(("completed", "completed", "failed")) for n in graph.nodes}
        outcome = await engine.backend.flows.submit_flow(graph)
        assert isinstance(outcome, Submitted)
        flow = TestFlow(engine, outcome)
        partition = int(flow.tag[4:-1])

        async def disturb(partition: int = partition, flow: TestFlow = flow) -> None:
            drain = engine.backend.flows.drain_cascade
            for _ in range(rng.randint(0, 3)):
                if rng.random() < 0.5:
                    name = rng.choice(SCANNERS)
                    await asyncio.gather(
                        *(supervisor.scan_once(name, partition) for _ in range(rng.randint(1, 2)))
                    )
                else:
                    retry = rng.random() < 0.5
                    await asyncio.gather(
                        *(drain(partition, retry=retry) for _ in range(rng.randint(1, 3)))
                    )

        idle_rounds = 0
        while idle_rounds < 2:
            await flow.claim()
            if not flow.claims:
                await drained(engine, flow.tag)
                idle_rounds += 1
                continue
            idle_rounds = 0
            for key in rng.sample(sorted(flow.claims), rng.randint(1, len(flow.claims))):
                await flow.end(key, {"completed": "success"}.get(ends[key], ends[key]))
                del flow.claims[key]
                await disturb()
        assert await flow.states() == expected(graph, ends)
        snapshot = await flow.snapshot()
        assert snapshot.finished_at is not None
        assert snapshot.members == await flow.recount()
        assert await queues(flow) == []


@pytest.mark.parametrize("units", UNITS)
async def test_joins_that_cancel_leave_nothing_behind(engine: Engine, units: int) -> None:
    rng = seeded("joins that cancel leave nothing behind")
    await set_units(engine, units)
    for _ in range(12):
        size = rng.randint(2, 8)
        joins: Any = {
            "j": rng.choice((AnyOf("cancel_remaining"), Quorum(2, "cancel_remaining"))),
            "k": Quorum(rng.randint(1, size), "cancel_remaining"),
        }
        text = " ".join(f"u{n}>j u{n}>k" for n in range(size))
        flow = await submitted(engine, text + " j>end k>end", joins)
        while True:
            states = await flow.states()
            left = [key for key, state in states.items() if state in {"waiting", "active"}]
            if not left:
                break
            await flow.end(rng.choice(left), rng.choice(("success", "failed", "cancelled")))
            await drained(engine, flow.tag)
            assert (await flow.snapshot()).members == await flow.recount()
        assert set(states.values()) <= ENDED
        assert (await flow.snapshot()).finished_at is not None
        assert await queues(flow) == []


# --- a killed server ---------------------------------------------------------------


async def test_a_server_killed_between_chunks_loses_nothing() -> None:
    """The queue is written with the state: what was acknowledged goes on after a restart."""
    server = TestServer("--appendonly", "yes", "--appendfsync", "always")
    try:
        async with prepared_backend(server.url) as backend:
            engine = Engine(backend)
            await without_followups(engine)
            await set_units(engine, 7)
            fan = await submitted(engine, " ".join(f"root>c{n} c{n}>end" for n in range(40)))
            race = await submitted(
                engine, " ".join(f"r{n}>j" for n in range(40)), {"j": AnyOf("cancel_remaining")}
            )
            doomed = await submitted(engine, " ".join(f"n{n}" for n in range(40)))
            wide = graph(" ".join(f"w{n}" for n in range(40)))
            outcome = await backend.flows.submit_flow(msgspec.structs.replace(wide, hold=True))
            assert isinstance(outcome, Submitted)
            held = TestFlow(engine, outcome)
            again = await submitted(engine, " ".join(f"u>s{n} s{n}>v" for n in range(40)))
            await again.end("u", "failed")
            await drained(engine, again.tag)
            await fan.end("root", "failed")
            await race.end("r0")
            await backend.flows.cancel_flow(doomed.flow_id, "stop", grace_ms=0)
            await backend.flows.release_flow(held.flow_id)
            assert (await backend.flows.replay_flow(again.flow_id)).pending
        every = (fan, race, doomed, held, again)
        for _ in range(3):
            server.kill()
            server.start()
            async with await _joined(server) as backend:
                for flow in every:
                    flow.engine = Engine(backend)
                    await backend.flows.drain_cascade(int(flow.tag[4:-1]))
                await backend.flows.drain_flow_cancel(doomed.flow_id)
        async with await _joined(server) as backend:
            engine = Engine(backend)
            for flow in every:
                flow.engine = engine
                await drained(engine, flow.tag)
            supervisor = idle(engine)
            await supervisor.scan_once("cancel_reconciler")
            assert await fan.recount() == {"failed": 1, "skipped": 41}
            assert await race.recount() == {"completed": 1, "cancelled": 39, "waiting": 1}
            assert await doomed.recount() == {"cancelled": 40}
            assert await held.recount() == {"waiting": 40}
            assert await again.recount() == {"waiting": 1, "waiting_children": 41}
            for flow in every:
                assert (await flow.snapshot()).members == await flow.recount()
                assert await queues(flow) == []
            assert await supervisor.scan_once("dependency_reconciler") == ScanResult()
            assert await supervisor.scan_once("flow_projector") == ScanResult()
    finally:
        server.stop()


async def _joined(server: TestServer) -> ValkeyBackend:
    return await ValkeyBackend.connect(parse_url(server.url))


# --- cancel_flow -------------------------------------------------------------------


async def test_cancelling_2000_members_survives_its_process(engine: Engine) -> None:
    """08 §21.7"""
    nodes = tuple(GraphNode(key=f"n{n}", execution_kind="job") for n in range(2000))
    outcome = await engine.backend.flows.submit_flow(
        FlowGraph(flow_id=new_uuid(), flow_kind="big", nodes=nodes[:1000])
    )
    assert isinstance(outcome, Submitted)
    more = await engine.backend.flows.extend_flow(outcome.flow_id, nodes[1000:])
    outcome.nodes.update(more.nodes)
    flow = TestFlow(engine, outcome)
    scheduled = await engine.backend.flows.cancel_flow(flow.flow_id, "enough")
    assert isinstance(scheduled, CancellationScheduled)
    assert len(scheduled.member_execution_ids) == 2000
    # The process has died; nothing can be claimed, and another process takes over.
    assert await flow.claim() == []
    await engine.backend.flows.drain_flow_cancel(flow.flow_id)
    await engine.advance(30_001)
    assert await idle(engine).scan_once("cancel_reconciler") == ScanResult(processed=1)
    await idle(engine).scan_once("cascade_drain")
    snapshot = await flow.snapshot()
    assert snapshot.members == {"cancelled": 2000}
    for key in ("n0", "n999", "n1999"):
        core = await engine.backend.reads.read_exec_core_fields(
            flow.nodes[key], ("cancellation_reason",)
        )
        assert core == {"cancellation_reason": "enough"}
    assert await queues(flow) == []
    repeat: Any = await engine.backend.flows.cancel_flow(flow.flow_id, "again")
    assert (len(repeat.member_execution_ids), repeat.pending_members) == (1000, 0)


@pytest.mark.parametrize("units", UNITS)
async def test_completions_race_with_the_cancellation(engine: Engine, units: int) -> None:
    """Each member ends once, as completed or cancelled; the counters say the same."""
    rng = seeded("completions race with the cancellation")
    await set_units(engine, units)
    for _ in range(4):
        flow = await submitted(engine, " ".join(f"a{n}>b{n}" for n in range(12)))
        await flow.claim()
        moves: list[Any] = [flow.end(key) for key in list(flow.claims)]
        moves.append(engine.backend.flows.cancel_flow(flow.flow_id, "stop"))
        moves += [engine.backend.flows.drain_flow_cancel(flow.flow_id) for _ in range(6)]
        rng.shuffle(moves)
        answers = await asyncio.gather(*moves, return_exceptions=True)
        assert all(not isinstance(a, BaseException) or isinstance(a, EngineError) for a in answers)
        while (await engine.backend.flows.drain_flow_cancel(flow.flow_id))[2]:
            pass
        await drained(engine, flow.tag)
        states = await flow.states()
        assert set(states.values()) <= {"completed", "cancelled"}
        assert all(states[f"b{n}"] == "cancelled" for n in range(12))
        assert (await flow.snapshot()).members == await flow.recount()
        assert await queues(flow) == []


# --- damage ------------------------------------------------------------------------


async def _wrong_type(flow: TestFlow, key: str) -> None:
    await break_record(flow.engine, flow.nodes[key])


async def _no_state(flow: TestFlow, key: str) -> None:
    await flow.backend.transport.call("HDEL", keys.core(flow.tag, flow.nodes[key]), "state")


async def _no_creation(flow: TestFlow, key: str) -> None:
    await flow.backend.transport.call("HDEL", keys.core(flow.tag, flow.nodes[key]), "created_at")


async def _odd_counters(flow: TestFlow, key: str) -> None:
    core = keys.core(flow.tag, flow.nodes[key])
    await flow.backend.transport.call("HSET", core, "deps", "many")


async def _full_counters(flow: TestFlow, key: str) -> None:
    core = keys.core(flow.tag, flow.nodes[key])
    await flow.backend.transport.call("HSET", core, "deps", "1 1 0 0 p")


def _inbound(flow: TestFlow, key: str) -> str:
    return f"ff:flow:{flow.tag}:{flow.flow_id}:in:{flow.nodes[key]}"


async def _odd_edge(flow: TestFlow, key: str) -> None:
    name: Any = await flow.backend.transport.call("HKEYS", _inbound(flow, key))
    await flow.backend.transport.call("HSET", _inbound(flow, key), name[0], "odd")


async def _odd_edges(flow: TestFlow, key: str) -> None:
    await flow.backend.transport.call("DEL", _inbound(flow, key))
    await flow.backend.transport.call("SET", _inbound(flow, key), "garbage")


DAMAGE = [
    _wrong_type,
    _no_state,
    _no_creation,
    _odd_counters,
    _full_counters,
    _odd_edge,
    _odd_edges,
]


@pytest.mark.corrupts
@pytest.mark.parametrize("how", ["success", "failed", "cancelled"])
@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_child_does_not_affect_others(
    engine: Engine, damage: Any, how: str
) -> None:
    """08 §21.9: the upstream ends, the others go on; the child is tried again, then parked."""
    flow = await submitted(engine, "a>b a>bad a>c c>d")
    await damage(flow, "bad")
    await flow.end("a", how)
    after = "waiting" if how == "success" else "skipped"
    assert [(await flow.state(key)).value for key in "bc"] == [after, after]
    supervisor = idle(engine)
    results = [await supervisor.scan_once("cascade_drain") for _ in range(7)]
    assert sum(result.errors for result in results) == 1
    (unit,) = await engine.backend.upkeep.parked_units(flow.tag)
    assert flow.nodes["bad"].uuid in unit


@pytest.mark.corrupts
async def test_counters_that_have_no_edge_left(engine: Engine) -> None:
    """08 §8: the child stays as it is."""
    flow = await submitted(engine, "a>b")
    await _full_counters(flow, "b")
    await flow.end("a")
    (edge,) = await engine.backend.flows.list_incoming_edges(flow.nodes["b"])
    resolve = engine.backend.flows.resolve_dependency(flow.flow_id, edge.edge_id, "success")
    error = await refused(resolve, "invariant_violation")
    assert error.details == (flow.nodes["b"], "1 1 0 0 p")
    assert await flow.state("b") == "waiting_children"


@pytest.mark.corrupts
async def test_a_child_that_names_another_flow(engine: Engine) -> None:
    flow = await submitted(engine, "a b")
    staged = await engine.backend.flows.stage_dependency_edge(
        flow.flow_id, flow.nodes["a"], flow.nodes["b"]
    )
    other, core = new_uuid(), keys.core(flow.tag, flow.nodes["b"])
    await engine.backend.transport.call("HSET", core, "flow_id", other)
    apply = engine.backend.flows.apply_dependency_to_child(flow.flow_id, staged.edge_id)
    assert (await refused(apply, "execution_already_in_flow")).details == (other,)


@pytest.mark.corrupts
@pytest.mark.parametrize("damage", [_wrong_type, _no_state, _no_creation])
async def test_a_damaged_member_concerns_no_cancellation(engine: Engine, damage: Any) -> None:
    flow = await submitted(engine, "a b bad c d")
    await damage(flow, "bad")
    partly = await engine.backend.flows.cancel_flow(flow.flow_id, "x", wait_timeout_ms=5000)
    assert isinstance(partly, PartiallyCancelled)
    assert partly.failed_member_execution_ids == (flow.nodes["bad"],)
    assert [(await flow.state(key)).value for key in "abcd"] == ["cancelled"] * 4
    supervisor = idle(engine)
    for _ in range(7):
        await supervisor.scan_once("cascade_drain")
    (unit,) = await engine.backend.upkeep.parked_units(flow.tag)
    assert unit.startswith(f"c|{flow.flow_id}|")


@pytest.mark.corrupts
async def test_a_damaged_sibling_concerns_no_other(engine: Engine) -> None:
    flow = await submitted(engine, "a>j b>j bad>j c>j", {"j": AnyOf("cancel_remaining")})
    await _wrong_type(flow, "bad")
    await flow.end("a")
    assert [(await flow.state(key)).value for key in "bcj"] == ["cancelled", "cancelled", "waiting"]


@pytest.mark.corrupts
async def test_a_damaged_flow_undoes_no_end_of_a_member(engine: Engine) -> None:
    flow = await submitted(engine, "a b")
    await flow.claim()
    key = keys.flow(flow.tag, flow.flow_id)
    await engine.backend.transport.call("DEL", key)
    await engine.backend.transport.call("SET", key, "garbage")
    await flow.end("a")
    assert (await flow.state("a")).value == "completed"
