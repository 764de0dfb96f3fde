"""An execution joins a flow, and waits for its members, in the call that creates it."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import Created, Duplicate, NewExecution
from flowfabric.core.contracts.flows import Dependency
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import flow_partition
from tests.support.engine import Engine, refused, untouched
from tests.support.flows import TestFlow, submitted


def id_in(engine: Engine, flow_id: str) -> ExecutionId:
    return ExecutionId.deterministic_for_flow(flow_id, new_uuid(), engine.backend.counts)


def member_of(flow: TestFlow, **fields: Any) -> NewExecution:
    execution_id = id_in(flow.engine, flow.flow_id)
    return NewExecution(
        execution_id=execution_id, execution_kind="job", flow_id=flow.flow_id, **fields
    )


async def create(flow: TestFlow, new: NewExecution, key: str = "new") -> Any:
    outcome = await flow.backend.executions.create_execution(new)
    flow.nodes[key] = new.execution_id
    return outcome


async def test_a_member_without_dependencies_can_run_at_once(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    new = member_of(flow)
    assert await create(flow, new) == Created(new.execution_id, "waiting")  # type: ignore[arg-type]
    assert await flow.claim() == ["a", "new"]
    assert (await flow.snapshot()).node_count == 2


async def test_a_member_waits_for_its_dependencies(engine: Engine) -> None:
    flow = await submitted(engine, "a b")
    upstreams = (
        Dependency(upstream=flow.nodes["a"], input_name="left"),
        Dependency(upstream=flow.nodes["b"], kind="terminal", input_name="right"),
    )
    outcome = await create(flow, member_of(flow, depends_on=upstreams))
    assert outcome.public_state == "waiting_children"
    assert await flow.claim() == ["a", "b"]
    await flow.end("a", result=b"1")
    await flow.end("b", "failed")
    assert await flow.claim() == ["new"]
    inputs = flow.claims["new"].inputs.inputs
    assert {name: each.outcome for name, each in inputs.items()} == {
        "left": "success",
        "right": "failed",
    }
    snapshot = await flow.snapshot()
    assert (snapshot.node_count, snapshot.edge_count, snapshot.graph_revision) == (3, 2, 5)


@pytest.mark.parametrize(("end", "state"), [("success", "waiting"), ("failed", "skipped")])
async def test_an_upstream_that_has_ended_decides_at_once(
    engine: Engine, end: str, state: str
) -> None:
    flow = await submitted(engine, "a")
    await flow.end("a", end, result=b"passed on")
    upstreams = (Dependency(upstream=flow.nodes["a"], data_passing_ref="all"),)
    outcome = await create(flow, member_of(flow, depends_on=upstreams))
    assert outcome.public_state == state
    if state == "waiting":
        assert await flow.claim() == ["new"]
        assert flow.claims["new"].input_payload == b"passed on"
    assert (await flow.snapshot()).members == await flow.recount()


async def test_a_repeat_finds_the_member(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    new = member_of(flow, depends_on=(Dependency(upstream=flow.nodes["a"]),))
    await create(flow, new)
    async with untouched(engine):
        assert await create(flow, new) == Duplicate(new.execution_id)


async def test_a_flow_of_another_partition_is_refused(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    counts = engine.backend.counts
    home = flow_partition(flow.flow_id, counts)
    other = next(each for each in iter(new_uuid, "") if flow_partition(each, counts) != home)
    stranger = id_in(engine, other)
    async with untouched(engine):
        for fields in (
            {"execution_id": stranger},
            {"depends_on": (Dependency(upstream=stranger),)},
        ):
            new: dict[str, Any] = {"execution_id": member_of(flow).execution_id, **fields}
            wrong = NewExecution(execution_kind="job", flow_id=flow.flow_id, **new)
            await refused(engine.backend.executions.create_execution(wrong), "partition_mismatch")


async def test_what_is_refused_writes_nothing(engine: Engine) -> None:
    flow = await submitted(engine, "a")
    solo = await submitted(engine, "b")
    up = Dependency(upstream=flow.nodes["a"])
    absent = id_in(engine, flow.flow_id)
    unknown = next(
        each
        for each in iter(new_uuid, "")
        if TestFlow.tag_of(engine, each) == flow.tag and each != flow.flow_id
    )
    new = member_of(flow)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"flow_id": None, "depends_on": (up,)}, "invalid_input"),
        ({"flow_id": "no uuid"}, "invalid_input"),
        ({"flow_id": unknown}, "flow_not_found"),
        ({"namespace": "other"}, "invalid_input"),
        ({"depends_on": (Dependency(upstream=new.execution_id),)}, "self_referencing_edge"),
        ({"depends_on": (Dependency(upstream=absent),)}, "execution_not_in_flow"),
        ({"depends_on": (up, up)}, "dependency_already_exists"),
        ({"depends_on": (Dependency(upstream=up.upstream, kind="never"),)}, "invalid_input"),  # type: ignore[arg-type]
        ({"depends_on": (Dependency(upstream=up.upstream, input_name="a b"),)}, "invalid_input"),
        (
            {
                "depends_on": (
                    Dependency(upstream=up.upstream, input_name="x", edge_id=new_uuid()),
                    Dependency(upstream=up.upstream, input_name="x", edge_id=new_uuid()),
                )
            },
            "invalid_input",
        ),
    ]
    async with untouched(engine):
        for fields, code in cases:
            given: dict[str, Any] = {
                "execution_id": new.execution_id,
                "flow_id": flow.flow_id,
                **fields,
            }
            wrong = NewExecution(execution_kind="job", **given)
            await refused(engine.backend.executions.create_execution(wrong), code)
    await engine.backend.flows.cancel_flow(solo.flow_id)
    async with untouched(engine):
        late = member_of(solo)
        await refused(engine.backend.executions.create_execution(late), "flow_already_terminal")
