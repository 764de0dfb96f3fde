"""`flowfabric flows`, and `flow show`, `cancel`, `replay`, `release`, `delete` and `retry`."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from flowfabric.core.contracts.flows import AnyOf, FlowGraph, GraphEdge, GraphNode, Quorum
from flowfabric.core.ids import new_uuid
from flowfabric.core.text import iso
from flowfabric.engine.valkey import keys
from tests.support.command import Cli, Done
from tests.support.engine import Engine
from tests.support.flows import TestFlow, drained, graph, set_units, submitted
from tests.support.scanning import break_record, idle
from tests.support.subflows import child, parent
from tests.support.subflows import drained as settle_subflow
from tests.support.terminal import in_terminal


def ok(done: Done) -> Done:
    assert (done.code, done.err) == (0, "")
    return done


async def tree(cli: Cli, flow: TestFlow, *more: str) -> list[str]:
    """The lines of the graph, without ids."""
    done = ok(await cli("flow", "show", flow.flow_id, *more))
    at = next(n for n, line in enumerate(done.lines) if line.startswith("NODE "))
    return [re.sub(r"\d+-[0-9a-f-]{36}", "ID", line) for line in done.lines[at + 1 :]]


def cells(lines: list[str]) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in lines]


async def fan_out(engine: Engine, width: int, *, task: str = "part") -> TestFlow:
    nodes = [GraphNode(key="split", execution_kind="split")]
    nodes += [GraphNode(key=f"part-{n}", execution_kind=task) for n in range(width)]
    nodes.append(GraphNode(key="merge", execution_kind="merge"))
    edges = [GraphEdge(frm="split", to=f"part-{n}", input_name="whole") for n in range(width)]
    edges += [GraphEdge(frm=f"part-{n}", to="merge", input_name=f"p{n}") for n in range(width)]
    whole = FlowGraph(flow_id=new_uuid(), flow_kind="fan", nodes=tuple(nodes), edges=tuple(edges))
    return TestFlow(engine, await engine.backend.flows.submit_flow(whole))  # pyright: ignore[reportArgumentType]


async def test_flows_lists_the_newest_first(cli: Cli, engine: Engine) -> None:
    assert ok(await cli("flows")).out == "No flows yet.\n"
    first = await submitted(engine, "a>b")
    await engine.advance(7_200_000)
    second = await submitted(engine, "a b c")
    await engine.backend.flows.set_flow_tags(second.flow_id, {"app.team": "images"})
    await second.end("a", "cancelled")
    header, newer, older = cells(ok(await cli("flows")).lines)
    assert header == ["ID", "KIND", "STATE", "DONE", "AGE"]
    assert newer[:4] == [second.flow_id, "test", "open", "1/3"]
    assert older == [first.flow_id, "test", "blocked", "0/2", "2h"]
    row, older = ok(await cli("flows", "--json")).objects
    assert (row["flow_id"], row["ended_count"], row["node_count"]) == (second.flow_id, 1, 3)
    assert older["created_at_iso"] == iso(older["created_at"])
    await engine.backend.flows.cancel_flow(first.flow_id)
    for options, expected in (
        (("--status", "cancelled"), [first.flow_id]),
        (("--status", "active"), [second.flow_id]),
        (("--tag", "app.team=images"), [second.flow_id]),
        (("--tag", "app.team=sounds"), []),
        (("--namespace", "default", "--limit", "1"), [second.flow_id]),
        (("--namespace", "other"), []),
    ):
        found = ok(await cli("flows", "--json", *options)).objects
        assert [each["flow_id"] for each in found] == expected, options
    assert ok(await cli("flows", "--status", "failed")).out == "No flow matches.\n"
    refused = await cli("flows", "--status", "done")
    assert refused.code == 2
    assert "'done' is not one of active, completed, failed, cancelled" in refused.err


async def test_without_data_there_are_none(cli: Cli) -> None:
    del cli.environment["FF_URL"]
    done = ok(await cli("flows"))
    assert done.lines[0].startswith("No flows: ")
    assert ok(await cli("flows", "--json")).out == ""
    assert not (cli.folder / ".flowfabric").exists()


async def test_a_diamond_is_a_tree_under_what_all_goes_through(cli: Cli, engine: Engine) -> None:
    flow = await submitted(engine, "a>b>d a>c>d d>e")
    await flow.end("a")
    await flow.end("b")
    assert cells(await tree(cli, flow)) == [
        ["a", "job", "completed", "ID"],
        ["├─ b", "job", "completed", "ID"],
        ["├─ c", "job", "active", "ID"],
        ["└─ d", "job", "waiting_children", "ID", "b, c; 1 of 2 satisfied"],
        ["↓ e", "job", "waiting_children", "ID"],
    ]
    head = ok(await cli("flow", "show", flow.flow_id)).lines
    assert head[0] == "test  running  2 of 5 members ended"
    assert head[1] == flow.flow_id
    assert "members    2 completed, 2 waiting_children, 1 active" in "\n".join(head)


async def test_the_tree_names_joins_inputs_and_kinds(cli: Cli, engine: Engine) -> None:
    joins = {"race": AnyOf("cancel_remaining"), "vote": Quorum(2, "let_run")}
    flow = await submitted(engine, "a>race b>race a>vote b>vote c>vote", joins)
    await engine.backend.flows.extend_flow(
        flow.flow_id,
        [GraphNode(key="clean", execution_kind="clean")],
        [
            GraphEdge(frm="race", to="clean", kind="terminal", input_name="winner"),
            GraphEdge(frm="c", to="clean", kind="failure_only"),
        ],
    )
    lines = {row[0].lstrip("├└─│↓ "): row[-1] for row in cells(await tree(cli, flow))}
    assert lines["race"] == "any of a, b, then cancels the rest; 0 of 2 satisfied"
    assert lines["vote"] == "2 of a, b, c; 0 of 3 satisfied"
    assert lines["clean"] == "c (failure), winner=race (any outcome); 0 of 2 satisfied"


async def test_the_tree_names_the_flow_that_a_member_runs(cli: Cli, engine: Engine) -> None:
    flow = await parent(engine, "a>s>z")
    sub = await child(flow, "x", spread=True)
    await settle_subflow(engine, flow, sub)
    rows = cells(await tree(cli, flow))
    assert rows[1][1:3] == ["subflow", "waiting_children"]
    assert rows[1][-1] == f"before=a; runs flow {sub.flow_id}"
    waits = f"starts when node {flow.nodes['s'].compact} no longer waits for others"
    shown = (await cli("flow", "show", sub.flow_id)).out
    assert shown.startswith("test  open")
    assert f"it {waits}" in shown
    member = await cli("show", sub.nodes["x"].compact)
    assert f"its flow is a subflow and {waits}" in member.out
    await flow.end("a")
    await settle_subflow(engine, flow, sub)
    assert waits not in (await cli("flow", "show", sub.flow_id)).out


async def test_equal_branches_are_one_line_with_counts(cli: Cli, engine: Engine) -> None:
    flow = await fan_out(engine, 40)
    await flow.end("split")
    await flow.claim()
    await flow.end("part-3", "failed")
    for number in (0, 1, 2):
        await flow.end(f"part-{number}")
    split, parts, merge = cells(await tree(cli, flow))
    assert split[:3] == ["split", "split", "completed"]
    assert parts == [
        *("├─ part ×40", "part", "36 active, 3 completed, 1 failed", "-"),
        "whole=split; failed: part-3",
    ]
    assert merge[:3] == ["└─ merge", "merge", "skipped"]
    assert merge[-1] == "part ×40; impossible: 3 of 40 satisfied, 1 failed"
    assert len(await tree(cli, flow, "--full")) == 42


async def test_a_thousand_chains_fold_level_by_level(cli: Cli, engine: Engine) -> None:
    keys = " ".join(f"root>x{n}>y{n}>end" for n in range(300))
    flow = await submitted(engine, keys)
    rows = cells(await tree(cli, flow))
    heads = ["root", "├─ job ×300", "│", "└─ end"]
    assert [row[0] for row in rows] == heads
    assert rows[2][1] == "↓ job ×300"
    detail: Any
    (detail,) = ok(await cli("flow", "show", flow.flow_id, "--json")).objects
    assert (len(detail["nodes"]), len(detail["edges"])) == (602, 900)
    assert detail["nodes"][0]["state"] == "waiting"
    assert detail["flow"]["created_at_iso"] == iso(detail["flow"]["created_at"])
    assert detail["edges"][0]["created_at_iso"]


async def test_a_flow_is_found_by_the_start_of_its_id(cli: Cli, engine: Engine) -> None:
    flows = engine.backend.flows
    first, second = f"abcdef01{new_uuid()[8:]}", f"abcdef02{new_uuid()[8:]}"
    for flow_id in (first, second):
        await flows.submit_flow(graph("a", flow_id=flow_id))
    assert ok(await cli("flow", "show", "ABCDEF01…")).lines[1] == first
    unclear = await cli("flow", "show", "abcdef")
    assert unclear.code == 1
    assert "more than one flow id starts with 'abcdef':" in unclear.err
    assert first in unclear.err
    assert second in unclear.err
    missing = await cli("flow", "show", "dead", "--json")
    assert (missing.code, missing.error["code"]) == (1, "flow_not_found")
    assert "`flowfabric flows` lists flows" in missing.error["hint"]
    unknown = await cli("flow", "show", new_uuid(), "--json")
    assert unknown.error["code"] == "flow_not_found"
    elsewhere = await cli("flow", "show", first, "--namespace", "other", "--json")
    assert elsewhere.error["code"] == "flow_not_found"
    for text in ("abc", "not an id"):
        refused = await cli("flow", "show", text)
        assert refused.code == 2
        assert "`flowfabric flows` lists flows" in refused.err


async def test_ids_of_members_and_flows_lead_to_each_other(cli: Cli, engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    alone = await engine.create()
    member = flow.nodes["b"]
    for text in (str(member), member.compact, member.uuid, member.uuid[:13]):
        wrong = await cli("flow", "show", text)
        assert wrong.code in (1, 2)
        assert "hint: this is the id of an execution in a flow: run " in wrong.err
        assert f"`flowfabric flow show {flow.flow_id}`" in wrong.err
    wrong = await cli("flow", "cancel", alone.compact)
    assert f"without a flow: run `flowfabric show {alone.compact}`" in wrong.err
    for text in (flow.flow_id, flow.flow_id[:13]):
        wrong = await cli("show", text, "--json")
        assert (wrong.code, wrong.error["code"]) == (1, "execution_not_found")
        hint = f"this is the id of a flow: run `flowfabric flow show {flow.flow_id}`"
        assert wrong.error["hint"] == hint


async def test_watch_prints_changes_until_the_flow_finishes(cli: Cli, engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    async with cli.start("flow", "show", flow.flow_id, "--watch") as running:
        await running.line("b  waiting_children")
        await flow.end("a")
        await running.line("a  completed")
        await flow.end("b")
        await running.line("b  completed")
        done = await running.end()
    assert done.code == 0
    assert sum("a  completed" in line for line in done.lines) == 1


async def test_watch_on_a_terminal_redraws_and_leaves_the_final_tree(
    cli: Cli, engine: Engine
) -> None:
    flow = await submitted(engine, "a>b")
    async with in_terminal(cli, "flow", "show", flow.flow_id, "--watch", rows=20) as terminal:
        await terminal.until("0 of 2 members ended")
        await flow.end("a")
        await terminal.until("1 of 2 members ended")
        await flow.end("b")
        await terminal.until("finished ")
        assert await terminal.end() == 0


async def test_cancel_waits_for_every_member(cli: Cli, engine: Engine) -> None:
    flow = await fan_out(engine, 300)
    await flow.end("split")
    done = ok(await cli("flow", "cancel", flow.flow_id, "--wait", "--reason", "mistake"))
    assert done.out == f"{flow.flow_id}  cancelled  301 cancelled, 1 completed\n"
    assert "reason     mistake" in ok(await cli("flow", "show", flow.flow_id)).out
    (again,) = ok(await cli("flow", "cancel", flow.flow_id, "--json")).objects
    assert (again["outcome"], again["cancellation_policy"]) == ("cancelled", "cancel_all")
    assert (again["total_members"], again["pending_members"]) == (302, 0)


async def test_cancel_without_waiting_leaves_the_rest_to_the_engine(
    cli: Cli, engine: Engine
) -> None:
    flow = await fan_out(engine, 300)
    await set_units(engine, 20)
    try:
        done = ok(await cli("flow", "cancel", flow.flow_id))
    finally:
        await set_units(engine)
    assert re.fullmatch(
        rf"{flow.flow_id}  cancelled  .*; the engine cancels the rest in the background\n", done.out
    )
    # Nothing has to wait for the command, which has ended.
    await idle(engine).scan_once("cancel_reconciler")
    assert (await flow.snapshot()).members == {"cancelled": 302}


@pytest.mark.corrupts
async def test_cancel_names_the_members_that_it_could_not_cancel(cli: Cli, engine: Engine) -> None:
    flow = await submitted(engine, "a b c")
    await break_record(engine, flow.nodes["b"])
    done = await cli("flow", "cancel", flow.flow_id, "--wait")
    assert done.code == 1
    assert "partially_cancelled: 1 member could not be cancelled:" in done.err
    assert flow.nodes["b"].compact in done.err
    assert "flowfabric show ID" in done.err
    done = await cli("flow", "cancel", flow.flow_id, "--wait", "--json")
    assert (done.code, done.error["code"]) == (1, "partially_cancelled")
    assert done.error["details"] == [str(flow.nodes["b"])]
    (told,) = done.objects
    assert told["outcome"] == "partially_cancelled"
    assert told["members"]["cancelled"] == 2


async def test_cancel_that_takes_too_long_continues(cli: Cli, engine: Engine) -> None:
    flow = await fan_out(engine, 900)
    await set_units(engine, 1)
    try:
        done = await cli("flow", "cancel", flow.flow_id, "--timeout", "100ms")
    finally:
        await set_units(engine)
    assert done.code == 1
    problem = "timeout: the flow is cancelled, but some members did not end within 0.1 s"
    assert problem in done.err
    assert (await flow.snapshot()).public_flow_state == "cancelled"


@pytest.mark.parametrize(
    ("policy", "ends"), [("flow_only", "waiting_children"), ("cancel_pending", "cancelled")]
)
async def test_cancel_by_policy(cli: Cli, engine: Engine, policy: str, ends: str) -> None:
    flow = await submitted(engine, "a>b")
    await flow.claim()
    ok(await cli("flow", "cancel", flow.flow_id, "--policy", policy))
    assert await flow.states() == {"a": "active", "b": ends}
    refused = await cli("flow", "cancel", flow.flow_id, "--policy", "gently")
    assert refused.code == 2
    assert "'gently' is not one of cancel_all, cancel_pending, flow_only" in refused.err


async def test_release_lets_a_held_flow_run(cli: Cli, engine: Engine) -> None:
    held = graph("a>b c")
    flow_id = held.flow_id
    await engine.backend.flows.submit_flow(
        FlowGraph(flow_id=flow_id, flow_kind="test", nodes=held.nodes, edges=held.edges, hold=True)
    )
    shown = ok(await cli("flow", "show", flow_id))
    assert shown.lines[0].split()[:2] == ["test", "held"]
    assert f"flowfabric flow release {flow_id}" in shown.out
    assert (
        ok(await cli("flow", "release", flow_id)).out == f"{flow_id}  blocked  2 members can run\n"
    )


async def test_replay_reruns_what_failed_and_reopens_what_was_skipped(
    cli: Cli, engine: Engine
) -> None:
    flow = await submitted(engine, "a>b>c x")
    await flow.end("a", "failed")
    await flow.end("x")
    assert (await flow.states())["c"] == "skipped"
    done = ok(await cli("flow", "replay", flow.flow_id))
    assert done.out == f"{flow.flow_id}  replayed 1 member, waiting for them again: 2\n"
    states = await flow.states()
    assert states == {
        "a": "waiting",
        "b": "waiting_children",
        "c": "waiting_children",
        "x": "completed",
    }


async def test_delete_asks_and_refuses_a_flow_that_runs(cli: Cli, engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    unconfirmed = await cli("flow", "delete", flow.flow_id)
    assert (unconfirmed.code, "delete the flow and 2 members" in unconfirmed.err) == (2, True)
    running = await cli("flow", "delete", flow.flow_id, "--yes", "--json")
    assert (running.code, running.error["code"]) == (1, "flow_not_terminal")
    await flow.end("a")
    await flow.end("b")
    done = ok(await cli("flow", "delete", flow.flow_id, "--yes"))
    assert done.out == f"{flow.flow_id}  deleted\n"
    assert ok(await cli("flows", "--json")).out == ""


@pytest.mark.corrupts
async def test_what_was_given_up_is_shown_and_tried_again(cli: Cli, engine: Engine) -> None:
    assert ok(await cli("flow", "retry")).out == "nothing to retry\n"
    flow = await submitted(engine, "a>b")
    core = keys.core(flow.tag, flow.nodes["b"])
    await engine.backend.transport.call("HSET", core, "priority", "high")
    await flow.end("a")
    await drained(engine, flow.tag)
    for _ in range(6):
        await engine.backend.flows.drain_cascade(flow.nodes["a"].partition)
    findings: Any = (await cli("doctor", "--json")).objects[0]
    (found,) = [each for each in findings["checks"] if each["name"] == "flows"]
    assert found["grade"] == "broken"
    assert f"1 update failed too often, such as an edge of flow {flow.flow_id}" in found["detail"]
    assert "flowfabric flow retry" in found["advice"]
    again = await cli("flow", "retry", "--json")
    assert (again.code, again.error["code"]) == (1, "retry_failed")
    assert again.objects == [{"retried": 1, "failed": 1}]
    await engine.backend.transport.call("HDEL", core, "priority")
    for _ in range(2):
        await engine.backend.flows.drain_cascade(flow.nodes["a"].partition)
    assert await flow.state("b") == "waiting"
    assert "no queued updates" in (await cli("doctor")).out


async def test_show_of_a_member_names_its_flow_and_its_open_upstreams(
    cli: Cli, engine: Engine
) -> None:
    joins = {"c": Quorum(2, "let_run")}
    flow = await submitted(engine, "a>c b>c x>c a>d", joins)
    await flow.end("a")
    out = ok(await cli("show", flow.nodes["c"])).out
    assert re.search(rf"flow +{flow.flow_id} \(test, running\)\n", out)
    assert re.search(r"node +c\n", out)
    assert "it waits for 1 of 2 upstreams: b (active), x (active)" in out
    assert "Upstreams (2 of 3 open)" in out
    assert re.search(r"b +job +active +not yet +success +- ", out)
    assert re.search(r"a +job +completed +yes +success ", out)
    (detail,) = ok(await cli("show", flow.nodes["c"], "--json")).objects
    place = detail["membership"]
    assert (place["flow_id"], place["node"], place["open_count"]) == (flow.flow_id, "c", 2)
    assert place["upstreams"][0]["state"] == "active"
    assert detail["why_not_running"]["join"]["policy"]["k"] == 2
    await asyncio.gather(flow.end("b", "failed"), flow.end("x", "failed"))
    skipped = ok(await cli("show", flow.nodes["c"])).out
    assert re.search(r"b +job +failed +never +success ", skipped)


async def test_show_of_a_held_member_says_how_to_release_it(cli: Cli, engine: Engine) -> None:
    held = graph("a>b")
    done = await engine.backend.flows.submit_flow(
        FlowGraph(
            flow_id=held.flow_id, flow_kind="test", nodes=held.nodes, edges=held.edges, hold=True
        )
    )
    for key in ("a", "b"):
        out = ok(await cli("show", done.nodes[key])).out
        assert f"its flow is held. Release it with `flowfabric flow release {held.flow_id}`" in out


async def test_flow_without_a_command_is_its_help(cli: Cli) -> None:
    done = await cli("flow")
    for name in ("show", "cancel", "replay", "release", "delete"):
        assert f"\n  {name} " in done.out + done.err
