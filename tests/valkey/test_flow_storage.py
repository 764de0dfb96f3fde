"""Flows in the store: submissions in parts, background drains, audits, deletion in steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.flows import (
    CancellationScheduled,
    FlowAudit,
    FlowGraph,
    GraphEdge,
    GraphNode,
    Submitted,
)
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import new_uuid
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine, refused
from tests.support.flows import (
    TestFlow,
    graph,
    set_counters,
    set_units,
    submitted,
    without_followups,
)
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer

HOUR = 3_600_000


def chain(length: int, **last: Any) -> FlowGraph:
    """A chain that takes several calls to submit."""
    nodes = [GraphNode(key=f"n{n}", execution_kind="job") for n in range(length)]
    if last:
        nodes[-1] = GraphNode(key=f"n{length - 1}", execution_kind="job", **last)
    edges = tuple(GraphEdge(frm=f"n{n - 1}", to=f"n{n}") for n in range(1, length))
    return FlowGraph(flow_id=new_uuid(), flow_kind="chain", nodes=tuple(nodes), edges=edges)


async def flow_keys(engine: Engine, flow_id: str) -> list[str]:
    found: Any = await engine.backend.transport.call("KEYS", f"ff:flow:*{flow_id}*")
    return sorted(name.decode() for name in found)


# --- submissions in parts -------------------------------------------------------------------------


async def test_a_submission_that_is_refused_half_way_leaves_nothing(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_state("full", "draining")
    graph = chain(350, lane_id="full")
    await refused(engine.backend.flows.submit_flow(graph), "lane_not_accepting")
    assert await flow_keys(engine, graph.flow_id) == []
    assert (await engine.backend.listings.list_executions()).executions == ()
    await engine.backend.lanes.set_lane_state("full", "active")
    assert (await engine.backend.flows.submit_flow(graph)).kind == "submitted"


@pytest.mark.parametrize("kept", [1, 2, 3])
async def test_a_repeat_completes_a_submission_that_was_cut_off(
    engine: Engine, valkey: TestServer, kept: int
) -> None:
    graph = chain(350)
    flows = engine.backend.flows
    with FaultProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(parse_url(proxy.url), prepare_with=PartitionCounts())
        sent, original = 0, client.calls.fcall

        async def dying(function: str, *args: Any, **options: Any) -> Any:
            nonlocal sent
            if function == "ff_submit_flow":
                sent += 1
                if sent > kept:
                    raise TransportError("transport", "the process died")
            return await original(function, *args, **options)

        client.calls.fcall = dying  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(TransportError):
            await client.flows.submit_flow(graph)
        await client.aclose()
    tag = TestFlow.tag_of(engine, graph.flow_id)
    assert await flows.describe_flow(graph.flow_id) is None
    assert (await flows.list_flows()).entries == ()
    assert (await flows.list_members(graph.flow_id)).entries == ()
    await refused(flows.cancel_flow(graph.flow_id), "flow_not_found")
    await refused(flows.delete_flow(graph.flow_id), "flow_not_found")
    assert (await engine.backend.claims.claim_many(engine.want(), tag, 10)).claims == []
    other = FlowGraph(flow_id=graph.flow_id, flow_kind="other", nodes=graph.nodes)
    await refused(flows.submit_flow(other), "flow_submission_conflict")
    outcome = await flows.submit_flow(graph)
    assert isinstance(outcome, Submitted)
    assert outcome.graph_revision == 350 + 349
    flow = TestFlow(engine, outcome)
    assert await flow.claim() == ["n0"]
    assert (await flow.snapshot()).members == {"active": 1, "waiting_children": 349}


async def test_a_submission_that_was_given_up_is_deleted_after_an_hour(engine: Engine) -> None:
    graph = chain(3)
    flow = await submitted(engine, "a>b c")
    key = keys.flow(flow.tag, flow.flow_id)
    now = await engine.now()
    await engine.backend.transport.call("HSET", key, "submitting", now)
    audit = engine.backend.flows.project_flow_summary
    assert await audit(flow.flow_id) == FlowAudit("submitting")
    await engine.advance(HOUR)
    assert await audit(flow.flow_id) == FlowAudit("deleted")
    assert await flow_keys(engine, flow.flow_id) == []
    assert (await engine.backend.listings.list_executions()).executions == ()
    assert await flow.claim() == []
    assert (await engine.backend.flows.submit_flow(graph)).kind == "submitted"


# --- background drains ----------------------------------------------------------------------------


async def test_a_client_continues_what_its_call_left(engine: Engine) -> None:
    flow = await submitted(engine, " ".join(f"a>n{n}" for n in range(30)))
    await set_units(engine, 7)
    handle = (await engine.backend.claims.claim_many(engine.want(), flow.tag, 1)).claims[0].handle
    outcome = await engine.backend.executions.complete(handle)
    assert outcome.cascade is not None
    assert (outcome.cascade.promoted, outcome.cascade.pending) == (7, True)
    async with asyncio.timeout(20):
        while (await flow.snapshot()).members.get("waiting_children"):
            pass
    assert (await flow.snapshot()).members == {"completed": 1, "waiting": 30}


async def test_a_client_cancels_the_members_that_its_call_left(engine: Engine) -> None:
    flow = await submitted(engine, " ".join(f"n{n}" for n in range(30)))
    await set_units(engine, 7)
    outcome = await engine.backend.flows.cancel_flow(flow.flow_id, "stop")
    assert isinstance(outcome, CancellationScheduled)
    assert len(outcome.member_execution_ids) == 30
    assert await engine.backend.flows.wait_flow(flow.flow_id, 20) == "failed"
    assert (await flow.snapshot()).members == {"cancelled": 30}


async def test_a_closed_client_leaves_the_rest_to_others(engine: Engine) -> None:
    flow = await submitted(engine, " ".join(f"a>n{n}" for n in range(30)))
    await set_units(engine, 7)
    await flow.claim()
    await without_followups(engine)
    await flow.end("a")
    assert (await flow.snapshot()).members["waiting_children"] == 23
    partition = flow.nodes["a"].partition
    while (await engine.backend.flows.drain_cascade(partition)).pending:
        pass
    assert (await flow.snapshot()).members == {"completed": 1, "waiting": 30}


# --- audits ---------------------------------------------------------------------------------------


async def test_an_audit_repairs_the_counters(engine: Engine) -> None:
    flow = await submitted(engine, "a>b c")
    await flow.end("a")
    good = await flow.snapshot()
    await set_counters(engine, flow.flow_id, members_waiting=9, live=1, members_completed=0)
    found = await engine.backend.flows.project_flow_summary(flow.flow_id)
    assert found.outcome == "repaired"
    assert set(found.drift) == {"members_waiting 9>1", "live 1>2", "members_completed 0>1"}
    assert await flow.snapshot() == good
    assert await engine.backend.flows.project_flow_summary(flow.flow_id) == FlowAudit("consistent")


async def test_an_audit_finishes_a_flow_that_should_be(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    await flow.end("a")
    key = keys.flow(flow.tag, flow.flow_id)
    await engine.backend.transport.call("HDEL", key, "finished_at")
    await set_counters(engine, flow.flow_id, live=1)
    found = await engine.backend.flows.project_flow_summary(flow.flow_id)
    assert found == FlowAudit("repaired", ("live 1>0",))
    assert await engine.backend.flows.wait_flow(flow.flow_id, 1) == "completed"


async def test_an_entry_without_a_flow_leaves_the_index(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    index, lost = keys.index(flow.tag, "flow_index"), new_uuid()
    await engine.backend.transport.call("ZADD", index, 0, lost)
    partition = flow.nodes["a"].partition
    assert lost in await engine.backend.flows.flow_ids(partition)
    page = await engine.backend.flows.list_flows(partition=partition)
    assert [row.flow_id for row in page.entries] == [flow.flow_id]
    assert await engine.backend.flows.flow_ids(partition) == [flow.flow_id]


async def test_a_damaged_flow_hides_no_other(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    index, broken = keys.index(flow.tag, "flow_index"), new_uuid()
    await engine.backend.transport.call("ZADD", index, 0, broken)
    await engine.backend.transport.call("SET", keys.flow(flow.tag, broken), "text")
    page = await engine.backend.flows.list_flows(partition=flow.nodes["a"].partition)
    assert [row.flow_id for row in page.entries] == [flow.flow_id]
    assert page.damaged == (f"flow {broken}: record: is not a hash",)
    await engine.backend.transport.call("DEL", keys.flow(flow.tag, broken))
    await engine.backend.transport.call("ZREM", index, broken)


# --- deletion -------------------------------------------------------------------------------------


async def test_a_large_flow_is_deleted_in_steps(engine: Engine) -> None:
    outcome = await engine.backend.flows.submit_flow(chain(150))
    assert isinstance(outcome, Submitted)
    flow = TestFlow(engine, outcome)
    await flow.end("n0", "failed")
    assert await engine.backend.flows.wait_flow(flow.flow_id, 20) == "failed"
    steps, original = [], engine.backend.calls.fcall

    async def counted(function: str, *args: Any, **options: Any) -> Any:
        reply = await original(function, *args, **options)
        if function == "ff_delete_flow":
            steps.append(reply[2])
            assert await engine.backend.flows.describe_flow(flow.flow_id) is None
        return reply

    engine.backend.calls.fcall = counted  # pyright: ignore[reportAttributeAccessIssue]
    await engine.backend.flows.delete_flow(flow.flow_id)
    assert steps == [b"deleting"] * 4 + [b"deleted"]
    assert await flow_keys(engine, flow.flow_id) == []
    assert (await engine.backend.listings.list_executions()).executions == ()


async def test_a_deletion_that_was_cut_off_is_finished_by_the_audit(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("a", "failed")
    args = (flow.flow_id, "", 0)
    await engine.backend.calls.fcall("ff_delete_flow", flow.tag, args, op="test")
    assert await engine.backend.flows.describe_flow(flow.flow_id) is None
    with pytest.raises(EngineError):
        await engine.backend.flows.wait_flow(flow.flow_id, 1)
    assert await engine.backend.flows.project_flow_summary(flow.flow_id) == FlowAudit("deleted")
    assert await flow_keys(engine, flow.flow_id) == []


async def test_a_flow_of_that_id_replaces_one_whose_deletion_was_cut_off(engine: Engine) -> None:
    backend = engine.backend
    large = graph(" ".join(f"m{n}" for n in range(90)))
    for again in (
        lambda: backend.flows.submit_flow(large),
        lambda: backend.flows.create_flow(large.flow_id, "new"),
    ):
        await backend.flows.submit_flow(large)
        await backend.flows.cancel_flow(large.flow_id)
        tag = TestFlow.tag_of(engine, large.flow_id)
        await backend.calls.fcall("ff_delete_flow", tag, (large.flow_id, "", 0), op="test")
        for _ in range(2):
            await refused(again(), "execution_being_deleted")
        assert (await again()).kind in ("submitted", "created")
        await backend.flows.cancel_flow(large.flow_id)
        await backend.flows.delete_flow(large.flow_id)


async def test_children_are_looked_at_from_where_the_last_look_stopped(engine: Engine) -> None:
    flow = await submitted(engine, "a>b a>c a>d")
    await flow.end("a")
    await flow.end("b")
    await engine.advance(2 * 86_400_000)
    upkeep = engine.backend.upkeep
    assert await upkeep.trim_retention(flow.tag, "default", [flow.nodes["a"]]) == ["not_due"]
    core = keys.core(flow.tag, flow.nodes["a"])
    cursor: Any = await engine.backend.transport.call("HGET", core, "children_ended")
    assert int(cursor) == 1
    again: Any = await upkeep.trim_retention(flow.tag, "default", [flow.nodes["a"]])
    assert again == ["not_due"]
    await flow.end("c", "cancelled")
    await flow.end("d", "cancelled")
    await engine.advance(60_000)
    assert await upkeep.trim_retention(flow.tag, "default", [flow.nodes["a"]]) == ["purged"]


async def test_a_large_flow_is_replayed_in_steps(engine: Engine) -> None:
    flow = await submitted(engine, " ".join(f"n{n}" for n in range(20)))
    for key in flow.nodes:
        await flow.end(key, "failed")
    await set_units(engine, 6)
    await without_followups(engine)
    replayed = await engine.backend.flows.replay_flow(flow.flow_id)
    assert (replayed.replayed, replayed.pending) == (2, True)
    partition = flow.nodes["n0"].partition
    while (await engine.backend.flows.drain_cascade(partition)).pending:
        pass
    assert (await flow.snapshot()).members == {"waiting": 20}
