"""Reading flows: edges, members, listings, eligibility, waiting for the end, events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.flows import AnyOf, FlowListing, JoinAll, Quorum
from flowfabric.core.errors import NotFoundError, TimeoutError_
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.flows import FlowFilter
from tests.support.engine import Engine, refused
from tests.support.flows import TestFlow, graph, submitted

# --- edges ---------------------------------------------------------------------------------------


async def test_an_edge_shows_what_was_submitted_and_how_it_is_decided(engine: Engine) -> None:
    flow = await submitted(engine, "a>b", input_name="text")
    flows = engine.backend.flows
    (edge,) = await flows.list_outgoing_edges(flow.nodes["a"])
    assert (edge.upstream_execution_id, edge.downstream_execution_id) == tuple(flow.nodes.values())
    assert (edge.dependency_kind, edge.input_name, edge.data_passing_ref) == (
        "success_only",
        "text",
        None,
    )
    assert edge.edge_state == "pending"
    assert (await flow.snapshot()).created_at <= edge.created_at <= await engine.now()
    assert await flows.describe_edge(flow.flow_id, edge.edge_id) == edge
    assert await flows.list_incoming_edges(flow.nodes["b"]) == [edge]
    await flow.end("a")
    decided = await flows.describe_edge(flow.flow_id, edge.edge_id)
    assert decided is not None
    assert decided.edge_state == "satisfied"


async def test_an_impossible_edge(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("a", "failed")
    (edge,) = await engine.backend.flows.list_incoming_edges(flow.nodes["b"])
    assert edge.edge_state == "impossible"


async def test_edges_of_what_has_none(engine: Engine) -> None:
    flows = engine.backend.flows
    flow = await submitted(engine, "a>b c")
    alone = await engine.create()
    assert await flows.describe_edge(flow.flow_id, new_uuid()) is None
    assert await flows.describe_edge(new_uuid(), new_uuid()) is None
    for execution_id in (alone, flow.nodes["c"]):
        assert await flows.list_outgoing_edges(execution_id) == []
        assert await flows.list_incoming_edges(execution_id) == []
    assert (await flows.list_edges(new_uuid())).entries == ()
    assert (await flows.list_edges(flow.flow_id, outgoing=flow.nodes["b"])).entries == ()


async def test_edges_come_in_pages(engine: Engine) -> None:
    flow = await submitted(engine, "a>b a>c a>d b>e c>e d>e")
    flows = engine.backend.flows
    names = {execution_id: key for key, execution_id in flow.nodes.items()}

    async def all_pages(**which: Any) -> list[str]:
        found: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = await flows.list_edges(flow.flow_id, cursor=cursor, limit=2, **which)
            assert len(page.entries) <= 2
            found += (
                names[edge.upstream_execution_id] + names[edge.downstream_execution_id]
                for edge in page.entries
            )
            cursor = page.next_cursor
        return found

    by_id = sorted("abcd", key=lambda key: flow.nodes[key])
    after = {"a": ["ab", "ac", "ad"], "b": ["be"], "c": ["ce"], "d": ["de"]}
    assert await all_pages() == [edge for key in by_id for edge in after[key]]
    assert await all_pages(outgoing=flow.nodes["a"]) == ["ab", "ac", "ad"]
    assert await all_pages(incoming=flow.nodes["e"]) == ["be", "ce", "de"]
    await refused(flows.list_edges(flow.flow_id, cursor="odd"), "invalid_cursor")
    both: dict[str, Any] = {"outgoing": flow.nodes["a"], "incoming": flow.nodes["a"]}
    await refused(flows.list_edges(flow.flow_id, **both), "invalid_input")
    assert (await flows.list_edges(flow.flow_id, limit=0)).entries == ()


# --- members -------------------------------------------------------------------------------------


async def test_members_come_by_id(engine: Engine) -> None:
    flow = await submitted(engine, "a>b c>b", {"b": AnyOf("let_run")})
    flows = engine.backend.flows
    page = await flows.list_members(flow.flow_id, limit=2)
    assert page.next_cursor is not None
    rest = await flows.list_members(flow.flow_id, limit=1, cursor=page.next_cursor)
    assert rest.next_cursor is None
    members = {member.node: member for member in (*page.entries, *rest.entries)}
    listed = [member.execution_id for member in members.values()]
    assert listed == sorted(flow.nodes.values())
    # In the order in which they joined.
    assert {key: member.number for key, member in members.items()} == {"a": 1, "c": 2, "b": 3}
    last = members["b"]
    assert (last.public_state, last.execution_kind) == ("waiting_children", "job")
    assert last.join is not None
    assert (last.join.policy, last.join.total_deps, last.join.running_count) == (
        AnyOf("let_run"),
        2,
        2,
    )
    assert (await flows.list_members(new_uuid())).entries == ()
    other = await submitted(engine, "a b")
    mine = (await flows.list_members(other.flow_id, limit=1)).next_cursor or ""
    await refused(flows.list_members(flow.flow_id, cursor=mine), "invalid_cursor")


async def test_the_groups_of_a_flow(engine: Engine) -> None:
    flow = await submitted(engine, "a>d b>d c>d d>e", {"d": Quorum(2, "let_run")})
    await flow.end("a")
    await flow.end("b", "failed")
    (quorum, every) = (await flow.snapshot()).edge_groups
    assert quorum.downstream_execution_id == flow.nodes["d"]
    assert (quorum.policy, quorum.group_state) == (Quorum(2, "let_run"), "pending")
    assert (quorum.satisfied_count, quorum.failed_count, quorum.skipped_count) == (1, 1, 0)
    assert (quorum.total_deps, quorum.running_count) == (3, 1)
    assert every.policy == JoinAll()
    short = await engine.backend.flows.describe_flow(flow.flow_id, edge_groups=False)
    assert short is not None
    assert short.edge_groups == ()


# --- listings ------------------------------------------------------------------------------------


async def listed(engine: Engine, limit: int = 2, **where: Any) -> list[FlowListing]:
    found: list[FlowListing] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await engine.backend.flows.list_flows(
            cursor=cursor, limit=limit, where=FlowFilter(**where)
        )
        assert len(page.entries) <= limit
        found += page.entries
        cursor = page.next_cursor
    return found


async def test_flows_are_listed_across_partitions(engine: Engine) -> None:
    flows = [await submitted(engine, "a>b") for _ in range(9)]
    rows = await listed(engine)
    assert {row.flow_id for row in rows} == {flow.flow_id for flow in flows}
    assert len(rows) == 9
    tags = [TestFlow.tag_of(engine, row.flow_id) for row in rows]
    numbered = [(int(tag[4:-1]), row.flow_id) for tag, row in zip(tags, rows, strict=True)]
    assert numbered == sorted(numbered)
    (row,) = [row for row in rows if row.flow_id == flows[0].flow_id]
    assert (row.flow_kind, row.namespace, row.node_count, row.ended_count) == (
        "test",
        "default",
        2,
        0,
    )
    assert (row.status, row.public_flow_state, row.derived_state) == ("active", "open", "blocked")
    partition = int(tags[0][4:-1])
    page = await engine.backend.flows.list_flows(partition=partition)
    assert {TestFlow.tag_of(engine, row.flow_id) for row in page.entries} == {tags[0]}


async def test_what_a_flow_ended_as_is_its_status(engine: Engine) -> None:
    good, bad, ended, open_ = [await submitted(engine, "a") for _ in range(4)]
    await good.end("a")
    await bad.end("a", "failed")
    await engine.backend.flows.cancel_flow(ended.flow_id)
    wanted = {
        "completed": good.flow_id,
        "failed": bad.flow_id,
        "cancelled": ended.flow_id,
        "active": open_.flow_id,
    }
    for status, flow_id in wanted.items():
        assert [row.flow_id for row in await listed(engine, status=status)] == [flow_id]
    await refused(
        engine.backend.flows.list_flows(where=FlowFilter(status="gone")),  # pyright: ignore[reportArgumentType]
        "invalid_input",
    )


async def test_a_listing_selects_by_namespace_and_tags(engine: Engine) -> None:
    flows = engine.backend.flows
    mine, other = graph("a"), graph("a")
    await flows.submit_flow(mine)
    await flows.create_flow(other.flow_id, "dag", "tenant")
    await flows.set_flow_tag(mine.flow_id, "app.team", "blue")
    await flows.set_flow_tag(other.flow_id, "app.team", "red")
    assert [row.flow_id for row in await listed(engine, namespace="tenant")] == [other.flow_id]
    tagged = await listed(engine, tags={"app.team": "blue"})
    assert [row.flow_id for row in tagged] == [mine.flow_id]
    assert await listed(engine, namespace="tenant", tags={"app.team": "blue"}) == []


async def test_a_page_ends_where_its_cursor_says(engine: Engine) -> None:
    flows = engine.backend.flows
    for _ in range(3):
        await submitted(engine, "a")
    first = await flows.list_flows(limit=1)
    assert first.next_cursor is not None
    assert (await flows.list_flows(limit=0)).entries == ()
    await refused(flows.list_flows(cursor="odd"), "invalid_cursor")
    tag = TestFlow.tag_of(engine, first.entries[0].flow_id)
    wrong = (int(tag[4:-1]) + 1) % 256
    await refused(flows.list_flows(cursor=first.next_cursor, partition=wrong), "invalid_cursor")


# --- tags ----------------------------------------------------------------------------------------


async def test_single_tags(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    flows = engine.backend.flows
    assert await flows.get_flow_tag(flow.flow_id, "app.x") is None
    assert await flows.get_flow_tag(new_uuid(), "app.x") is None
    assert await flows.set_flow_tag(flow.flow_id, "app.x", "1") == 1
    assert await flows.get_flow_tag(flow.flow_id, "app.x") == "1"
    await refused(flows.set_flow_tag(flow.flow_id, "X", "1"), "invalid_tag_key")
    await refused(flows.set_flow_tag(new_uuid(), "app.x", "1"), "flow_not_found")
    assert (await flow.snapshot()).tags == {"app.x": "1"}


# --- eligibility ---------------------------------------------------------------------------------


async def test_eligibility(engine: Engine) -> None:
    flow = await submitted(engine, "a>b a>c d>c e", {"c": AnyOf("let_run")})
    evaluate = engine.backend.flows.evaluate_flow_eligibility

    async def now() -> dict[str, str]:
        return {key: await evaluate(flow.nodes[key]) for key in flow.nodes}

    waits = "blocked_by_dependencies"
    assert await now() == {
        "a": "eligible",
        "b": waits,
        "c": waits,
        "d": "eligible",
        "e": "eligible",
    }
    await flow.claim()
    assert await evaluate(flow.nodes["a"]) == "not_runnable"
    await flow.end("a", "failed")
    assert await evaluate(flow.nodes["b"]) == "not_runnable"
    assert await evaluate(flow.nodes["c"]) == waits
    await flow.end("d")
    assert await evaluate(flow.nodes["c"]) == "eligible"
    assert await evaluate(engine.new_id()) == "not_found"
    assert await evaluate(await engine.create()) == "eligible"


# --- waiting for the end, and events -------------------------------------------------------------


async def test_waiting_for_a_flow(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    flows = engine.backend.flows
    with pytest.raises(TimeoutError_, match="did not finish within"):
        await flows.wait_flow(flow.flow_id, 0.01)
    waiting = asyncio.ensure_future(flows.wait_flow(flow.flow_id, 20))
    await flow.end("a")
    assert not waiting.done()
    await flow.end("b")
    assert await waiting == "completed"
    assert await flows.wait_flow(flow.flow_id, 0.5) == "completed"
    with pytest.raises(NotFoundError):
        await flows.wait_flow(new_uuid(), 1)


async def test_a_flow_that_goes_on_has_not_finished(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    await flow.end("a", "failed")
    flows = engine.backend.flows
    assert await flows.wait_flow(flow.flow_id, 1) == "failed"
    await engine.backend.executions.replay_execution(flow.nodes["a"])
    await refused(flows.wait_flow(flow.flow_id, 0.01), "timeout")
    assert (await flow.snapshot()).finished_at is None


async def test_the_events_of_a_flow(engine: Engine) -> None:
    async with await engine.backend.events.subscribe_flow_events() as feed:
        done = await submitted(engine, "a>b")
        await done.end("a")
        await done.end("b")
        gone = await submitted(engine, "a>b")
        await engine.backend.flows.cancel_flow(gone.flow_id, "not needed")
        seen: list[Any] = [await anext(feed) for _ in range(3)]
    of = {
        each.flow_id: [event for event in seen if event.flow_id == each.flow_id]
        for each in (done, gone)
    }
    (finished,) = of[done.flow_id]
    assert (finished.type, finished.state, finished.namespace) == (
        "flow_finished",
        "completed",
        "default",
    )
    asked, ended = [event for event in seen if event.flow_id == gone.flow_id]
    assert (asked.type, asked.cancellation_policy, asked.reason) == (
        "flow_cancel_requested",
        "cancel_all",
        "not needed",
    )
    assert (ended.type, ended.state) == ("flow_finished", "failed")


async def test_members_name_their_flow_in_events(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("a", "failed")
    outcomes = [event for key in "ab" for event in await engine.events(flow.nodes[key])]
    ends = [event for event in outcomes if event.type == "completion"]
    assert [(event.get("flow_id"), event.get("outcome")) for event in ends] == [
        (flow.flow_id, "failed"),
        (flow.flow_id, "skipped"),
    ]
