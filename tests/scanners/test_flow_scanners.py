"""Scanners of flows: they do the remaining work, and set damaged units aside."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfabric.core.contracts.flows import AnyOf, FlowCancelled
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from flowfabric.scanners import ScannerFilter
from flowfabric.scanners.base import ScanResult
from tests.support.engine import Engine
from tests.support.flows import (
    TestFlow,
    graph,
    set_counters,
    set_units,
    submitted,
    without_followups,
)
from tests.support.scanning import break_record, idle, running
from tests.support.sdk import until
from tests.support.subflows import child, parent

FAN = "root>" + " root>".join(f"c{n}" for n in range(20))
WAITING = PublicState.WAITING


@pytest.fixture(autouse=True)
async def default_units(engine: Engine) -> AsyncIterator[None]:
    """Callers die after their calls, and tests that change how much a call does leave no trace."""
    await without_followups(engine)
    yield
    await set_units(engine)


@pytest.fixture
async def one_unit(engine: Engine) -> None:
    """Calls that do one unit each, so that everything goes through the queues."""
    await set_units(engine, 1)


def told(caplog: pytest.LogCaptureFixture, action: str) -> list[dict[str, Any]]:
    return [r.__dict__ for r in caplog.records if r.__dict__.get("action") == action]


async def forget_cascade(flow: TestFlow, key: str) -> None:
    """As if the engine had lost what it still had to do after a member ended."""
    call = flow.backend.transport.call
    await call("DEL", keys.index(flow.tag, "cascade_backlog"))
    await call("HDEL", keys.core(flow.tag, flow.nodes[key]), "cascaded")


# --- cascade_drain -----------------------------------------------------------------


@pytest.mark.usefixtures("one_unit")
async def test_what_a_call_left_is_done_within_a_second(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric.scanners")
    flow = await submitted(engine, FAN)
    await flow.end("root")
    assert sorted((await flow.states()).values()).count("waiting") == 1
    found = await idle(engine).scan_once("cascade_drain")
    assert found == ScanResult(processed=19)
    drained = told(caplog, "cascade_drained")
    assert sum(each["resolved"] + each["skipped"] for each in drained) == 19
    assert {each["pending"] for each in drained} == {True}, "one unit per call"
    assert {each["partition"] for each in drained} == {flow.tag}
    assert set((await flow.states()).values()) == {"completed", "waiting"}


async def test_a_subflow_and_its_parent_in_another_partition_hear_of_each_other(
    engine: Engine,
) -> None:
    flow = await parent(engine)
    sub = await child(flow, "x", spread=True)
    scanners = idle(engine)
    await scanners.scan_once("cascade_drain")
    await flow.end("a")
    assert await sub.claim() == []
    await scanners.scan_once("cascade_drain")
    await sub.end("x", result=b"1")
    assert await flow.state("s") == "waiting_children"
    await scanners.scan_once("cascade_drain")
    assert await flow.state("s") == "completed"


@pytest.mark.usefixtures("one_unit")
async def test_running_scanners_do_it_by_themselves(engine: Engine) -> None:
    flow = await submitted(engine, FAN)
    async with running(engine.backend):
        await flow.end("root", "failed")

        async def over() -> bool:
            return (await flow.snapshot()).finished_at is not None

        await until(over)
    assert await flow.recount() == {"failed": 1, "skipped": 20}


@pytest.mark.corrupts
async def test_a_damaged_child_is_tried_again_then_parked_and_told_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    flow = await submitted(engine, "a>b a>c c>d")
    await break_record(engine, flow.nodes["b"])
    await flow.end("a")
    assert await flow.state("c") is WAITING
    supervisor = idle(engine)
    results = [await supervisor.scan_once("cascade_drain") for _ in range(8)]
    assert [result.errors for result in results] == [0, 0, 0, 0, 1, 0, 0, 0]
    (record,) = told(caplog, "cascade_parked")
    assert flow.nodes["b"].uuid in record["item"]
    assert record["levelno"] == logging.ERROR
    assert "WRONGTYPE" in record["error"]
    parked = await engine.backend.upkeep.parked_units(flow.tag)
    assert list(parked) == [record["item"]]
    # Another process that takes over tells it, too.
    caplog.clear()
    assert (await idle(engine).scan_once("cascade_drain")).errors == 1
    assert len(told(caplog, "cascade_parked")) == 1


@pytest.mark.corrupts
async def test_a_child_that_is_repaired_in_time_continues(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    key = keys.core(flow.tag, flow.nodes["b"])
    call = engine.backend.transport.call
    await call("RENAME", key, "aside")
    await call("SET", key, "garbage")
    await flow.end("a")
    supervisor = idle(engine)
    await supervisor.scan_once("cascade_drain")
    await call("RENAME", "aside", key)
    await supervisor.scan_once("cascade_drain")
    assert await flow.state("b") is WAITING
    assert await engine.backend.upkeep.parked_units(flow.tag) == {}


# --- cancel_reconciler -------------------------------------------------------------


async def half_cancelled(engine: Engine, **graph: Any) -> TestFlow:
    """A cancelled flow whose canceller died after the first call."""
    flow = await submitted(engine, " ".join(f"n{n}" for n in range(20)), **graph)
    await set_units(engine, 3)
    await engine.backend.calls.fcall(
        *("ff_cancel_flow", flow.tag, (flow.flow_id, "cancel_all", "stop it", 30_000)), op="test"
    )
    return flow


async def test_members_of_a_cancelled_flow_are_cancelled_after_the_grace(engine: Engine) -> None:
    flow = await half_cancelled(engine)
    supervisor = idle(engine)
    assert await supervisor.scan_once("cancel_reconciler") == ScanResult()
    assert (await flow.recount())["cancelled"] == 3
    await engine.advance(30_001)
    assert await supervisor.scan_once("cancel_reconciler") == ScanResult(processed=1)
    assert await flow.recount() == {"cancelled": 20}
    core = await engine.backend.reads.read_exec_core_fields(
        flow.nodes["n19"], ("cancellation_reason",)
    )
    assert core == {"cancellation_reason": "stop it"}
    repeat = await engine.backend.flows.cancel_flow(flow.flow_id)
    assert isinstance(repeat, FlowCancelled)
    assert repeat.pending_members == 0


async def test_the_cancel_reconciler_applies_the_filter(engine: Engine) -> None:
    flow = await half_cancelled(engine)
    await engine.advance(30_001)
    foreign = ScannerFilter(namespace="acme")
    ours = ScannerFilter(namespace="default")
    assert await idle(engine, accept=foreign).scan_once("cancel_reconciler") == ScanResult()
    assert (await flow.recount())["cancelled"] == 3
    found = await idle(engine, accept=ours).scan_once("cancel_reconciler")
    assert found == ScanResult(processed=1)
    assert await flow.recount() == {"cancelled": 20}


@pytest.mark.corrupts
@pytest.mark.parametrize("bad", [b"", b"\xff", b"no-flow", b"11111111-2222-4333-8444-555555555555"])
async def test_malformed_and_lost_flows_leave_the_backlog(
    engine: Engine, caplog: pytest.LogCaptureFixture, bad: bytes
) -> None:
    flow = await half_cancelled(engine)
    key = keys.index(flow.tag, "cancel_backlog")
    await engine.backend.transport.call("ZADD", key, 1, bad)
    await engine.advance(30_001)
    assert await idle(engine).scan_once("cancel_reconciler") == ScanResult(processed=2)
    assert await engine.backend.transport.call("EXISTS", key) == 0
    assert len(told(caplog, "member_malformed")) == (len(bad) != 36)


@pytest.mark.corrupts
async def test_a_flow_that_cannot_be_read_hides_no_other(engine: Engine) -> None:
    flow = await half_cancelled(engine)
    other = "11111111-2222-4333-8444-555555555555"
    call = engine.backend.transport.call
    await call("SET", keys.flow(flow.tag, other), "garbage")
    await call("ZADD", keys.index(flow.tag, "cancel_backlog"), 1, other)
    await engine.advance(30_001)
    assert await idle(engine).scan_once("cancel_reconciler") == ScanResult(processed=1, errors=1)
    assert await flow.recount() == {"cancelled": 20}


# --- dependency_reconciler ---------------------------------------------------------


@pytest.mark.usefixtures("one_unit")
async def test_a_lost_cascade_is_found_repaired_and_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    flow = await submitted(engine, FAN)
    await flow.end("root")
    await forget_cascade(flow, "root")
    supervisor = idle(engine)
    assert await supervisor.scan_once("dependency_reconciler") == ScanResult(
        processed=19, errors=19
    )
    assert await supervisor.scan_once("dependency_reconciler") == ScanResult()
    assert set((await flow.states()).values()) == {"completed", "waiting"}
    records = told(caplog, "dependency_fault")
    assert len(records) == 19
    assert {record["levelno"] for record in records} == {logging.WARNING}


@pytest.mark.usefixtures("one_unit")
async def test_what_is_queued_is_no_fault(engine: Engine) -> None:
    flow = await submitted(engine, FAN)
    await flow.end("root")
    before = await engine.digest()
    assert await idle(engine).scan_once("dependency_reconciler") == ScanResult()
    assert await engine.digest() == before
    await idle(engine).scan_once("cascade_drain")


@pytest.mark.usefixtures("one_unit")
async def test_the_reconciler_reaches_every_member_page_by_page(engine: Engine) -> None:
    """What waits rightly at the head never hides what was lost behind it."""
    rightly = await submitted(engine, "x>" + " x>".join(f"w{n}" for n in range(60)))
    flow_ids = iter(new_uuid, "")
    flow_id = next(each for each in flow_ids if TestFlow.tag_of(engine, each) == rightly.tag)
    # Members of the same millisecond are listed by their ids.
    await engine.advance(1)
    flow = await submitted(engine, FAN, flow_id=flow_id)
    await flow.end("root", "cancelled")
    await forget_cascade(flow, "root")
    supervisor = idle(engine)
    runner = supervisor._runners["dependency_reconciler"]
    first, second, third = [await runner.cycle() for _ in range(3)]
    assert first == ScanResult()
    assert second.errors + third.errors == 19
    assert await flow.recount() == {"cancelled": 1, "skipped": 20}


@pytest.mark.usefixtures("one_unit")
async def test_the_reconciler_applies_the_filter(engine: Engine) -> None:
    flow = await submitted(engine, FAN)
    await flow.end("root")
    await forget_cascade(flow, "root")
    foreign = idle(engine, accept=ScannerFilter(namespace="acme"))
    assert await foreign.scan_once("dependency_reconciler") == ScanResult()
    ours = idle(engine, accept=ScannerFilter(namespace="default"))
    assert (await ours.scan_once("dependency_reconciler")).processed == 19


async def test_a_member_that_waits_for_a_replay_keeps_waiting(engine: Engine) -> None:
    """08 §21.8: the upstream stays failed, so the child is not skipped again."""
    flow = await submitted(engine, "a>b")
    await flow.end("a", "failed")
    await engine.backend.executions.replay_execution(flow.nodes["b"])
    for _ in range(3):
        assert await idle(engine).scan_once("dependency_reconciler") == ScanResult()
    assert await flow.state("b") is PublicState.WAITING_CHILDREN


@pytest.mark.corrupts
@pytest.mark.parametrize(
    ("joins", "deps", "state"),
    [
        ({}, "2 2 0 0 s", WAITING),
        ({}, "2 2 0 0 p", WAITING),
        ({}, "2 1 1 0 i", PublicState.SKIPPED),
        ({"c": AnyOf("let_run")}, "2 1 0 0 s", WAITING),
    ],
)
async def test_a_decided_join_blocks_no_member(
    engine: Engine, joins: Any, deps: str, state: PublicState
) -> None:
    flow = await submitted(engine, "a>c b>c", joins)
    await engine.backend.transport.call("HSET", keys.core(flow.tag, flow.nodes["c"]), "deps", deps)
    assert await idle(engine).scan_once("dependency_reconciler") == ScanResult(
        processed=1, errors=1
    )
    assert await flow.state("c") is state


@pytest.mark.corrupts
async def test_a_lost_upstream_is_logged_and_never_guessed(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    flow = await submitted(engine, "a>b")
    await engine.backend.transport.call("DEL", keys.core(flow.tag, flow.nodes["a"]))
    assert await idle(engine).scan_once("dependency_reconciler") == ScanResult(errors=1)
    (record,) = told(caplog, "scanner_failure")
    assert "its upstream does not exist" in record["error"]
    assert await flow.state("b") is PublicState.WAITING_CHILDREN


@pytest.mark.corrupts
async def test_a_damaged_member_hides_no_other(engine: Engine) -> None:
    flow = await submitted(engine, "a>b a>c")
    await set_units(engine, 1)
    await break_record(engine, flow.nodes["b"])
    await flow.end("a")
    await forget_cascade(flow, "a")
    await engine.backend.transport.call("DEL", keys.index(flow.tag, "cascade_failed"))
    await set_units(engine)
    assert await idle(engine).scan_once("dependency_reconciler") == ScanResult(
        processed=1, errors=2
    )
    assert await flow.state("c") is WAITING


# --- edge_cancel_dispatcher, edge_cancel_reconciler --------------------------------


RACE = " ".join(f"r{n}>join" for n in range(20))
FIRST_WINS = {"join": AnyOf("cancel_remaining")}


async def group_names(flow: TestFlow) -> list[bytes]:
    key = keys.index(flow.tag, "pending_cancel_groups")
    return await flow.backend.transport.call("SMEMBERS", key)


@pytest.mark.usefixtures("one_unit")
async def test_the_dispatcher_cancels_what_the_deciding_call_left(engine: Engine) -> None:
    flow = await submitted(engine, RACE, FIRST_WINS)
    await flow.end("r0")
    assert await flow.state("join") is WAITING
    assert "cancelled" not in await flow.recount()
    foreign = idle(engine, accept=ScannerFilter(namespace="acme"))
    assert await foreign.scan_once("edge_cancel_dispatcher") == ScanResult()
    assert await idle(engine).scan_once("edge_cancel_dispatcher") == ScanResult(processed=1)
    assert await flow.recount() == {"completed": 1, "waiting": 1, "cancelled": 19}
    core = await engine.backend.reads.read_exec_core_fields(
        flow.nodes["r7"], ("cancellation_reason",)
    )
    assert core == {"cancellation_reason": "sibling_quorum_satisfied"}
    assert await group_names(flow) == []
    assert await idle(engine).scan_once("edge_cancel_dispatcher") == ScanResult()


@pytest.mark.usefixtures("one_unit")
async def test_the_reconciler_cancels_nothing_and_forgets_what_is_done(engine: Engine) -> None:
    flow = await submitted(engine, RACE, FIRST_WINS)
    await flow.end("r0")
    before = await engine.digest()
    assert await idle(engine).scan_once("edge_cancel_reconciler") == ScanResult()
    assert await engine.digest() == before
    for n in range(1, 20):
        await flow.end(f"r{n}", "cancelled")
    assert await idle(engine).scan_once("edge_cancel_reconciler") == ScanResult(processed=1)
    assert await group_names(flow) == []


@pytest.mark.corrupts
@pytest.mark.usefixtures("one_unit")
@pytest.mark.parametrize("scanner", ["edge_cancel_dispatcher", "edge_cancel_reconciler"])
async def test_malformed_groups_are_removed_and_hide_nothing(
    engine: Engine, caplog: pytest.LogCaptureFixture, scanner: str
) -> None:
    flow = await submitted(engine, RACE, FIRST_WINS)
    await flow.end("r0")
    elsewhere = next(f for f in iter(new_uuid, "") if TestFlow.tag_of(engine, f) != flow.tag)
    bad = ["", "x", "a|b", f"{flow.flow_id}|", f"|{new_uuid()}", f"{elsewhere}|{new_uuid()}"]
    key = keys.index(flow.tag, "pending_cancel_groups")
    await engine.backend.transport.call("SADD", key, b"\xff|\xfe", *bad)
    found = await idle(engine).scan_once(scanner)
    assert found.errors == 7
    assert len(told(caplog, "member_malformed")) == 1
    assert len(await group_names(flow)) == (scanner == "edge_cancel_reconciler")


# --- flow_projector ----------------------------------------------------------------


async def test_drift_of_counters_is_repaired_and_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    flow = await submitted(engine, "a>b>c")
    await flow.end("a")
    before = await engine.digest()
    supervisor = idle(engine)
    assert await supervisor.scan_once("flow_projector") == ScanResult()
    assert await engine.digest() == before
    await set_counters(engine, flow.flow_id, members_waiting=7, live=0)
    assert await supervisor.scan_once("flow_projector") == ScanResult(processed=1)
    assert (await flow.snapshot()).members == await flow.recount()
    (record,) = told(caplog, "flow_repaired")
    assert record["flow_id"] == flow.flow_id
    assert "members_waiting 7>1" in record["drift"]
    assert await supervisor.scan_once("flow_projector") == ScanResult()


async def test_flows_are_deleted_after_their_retention(engine: Engine) -> None:
    flow, kept = await submitted(engine, "a>b"), await submitted(engine, "a>b")
    for key in ("a", "b"):
        await flow.end(key)
    await engine.advance(86_400_001)
    supervisor = idle(engine)
    assert await supervisor.scan_once("flow_projector") == ScanResult()
    await supervisor.scan_once("retention_trimmer")
    assert await supervisor.scan_once("flow_projector") == ScanResult(processed=1)
    assert await engine.backend.flows.describe_flow(flow.flow_id) is None
    assert await engine.backend.flows.describe_flow(kept.flow_id) is not None


async def test_flows_that_are_due_are_found_among_many(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many flows are not due, a cycle deletes those that are."""
    flows = [await submitted(engine, "a") for _ in range(20)]
    last = max(flows, key=lambda flow: (flow.tag, flow.flow_id))
    await last.end("a")
    await engine.advance(86_400_001)
    monkeypatch.setattr("flowfabric.scanners.flow_jobs._PROJECTED_PER_CYCLE", 2)
    supervisor = idle(engine)
    await supervisor.scan_once("retention_trimmer")
    await supervisor._runners["flow_projector"].cycle()
    assert await engine.backend.flows.describe_flow(last.flow_id) is None


async def test_a_flow_that_continues_is_not_deleted(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    await flow.end("a")
    await engine.advance(86_400_001)
    supervisor = idle(engine)
    await supervisor.scan_once("retention_trimmer")
    extended = await engine.backend.flows.extend_flow(flow.flow_id, graph("b").nodes)
    flow.nodes = extended.nodes
    await supervisor.scan_once("flow_projector")
    assert (await flow.snapshot()).members == {"completed": 1, "waiting": 1}
    await flow.end("b")
    await engine.advance(86_400_001)
    await supervisor.scan_once("retention_trimmer")
    await supervisor.scan_once("flow_projector")
    assert await engine.backend.flows.describe_flow(flow.flow_id) is None


async def test_a_cancelled_flow_without_members_is_deleted(engine: Engine) -> None:
    flow_id = new_uuid()
    await engine.backend.flows.create_flow(flow_id, "empty")
    await engine.backend.flows.cancel_flow(flow_id)
    await engine.advance(86_400_001)
    assert await idle(engine).scan_once("flow_projector") == ScanResult(processed=1)
    assert await engine.backend.flows.describe_flow(flow_id) is None


async def test_the_projector_comes_round_to_every_flow(engine: Engine) -> None:
    flows = [await submitted(engine, "a") for _ in range(130)]
    for flow in flows:
        await set_counters(engine, flow.flow_id, members_waiting=2)
    runner = idle(engine)._runners["flow_projector"]
    # Repairs do not count against what a cycle may look at.
    assert (await runner.cycle()).processed == 130
    last = max(flows, key=lambda flow: (flow.tag, flow.flow_id))
    await set_counters(engine, last.flow_id, members_waiting=2)
    assert [(await runner.cycle()).processed for _ in range(2)] == [0, 1]


# --- all of them -------------------------------------------------------------------


async def test_idle_scanners_of_flows_change_nothing(engine: Engine) -> None:
    flow = await submitted(engine, "a>b>c")
    await flow.end("a")
    before = await engine.digest()
    supervisor = idle(engine)
    for name in supervisor.status():
        assert await supervisor.scan_once(name) == ScanResult()
    assert await engine.digest() == before
