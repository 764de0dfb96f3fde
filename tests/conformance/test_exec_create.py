"""create_execution: what is stored, where it waits, and what is refused without a trace."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from flowfabric.core.contracts.executions import Created, Duplicate, NewExecution
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.policy import ExecutionPolicy, RoutingRequirements, TimeoutPolicy, parse_policy
from flowfabric.core.state import PublicState
from tests.support.engine import LANE, Engine, refused, unchanged

U64 = 2**64 - 1
MAX_MS = 2**53 - 1


def new(engine: Engine, **fields: Any) -> NewExecution:
    lane = fields.get("lane_id", LANE)
    fields.setdefault("execution_id", engine.new_id(lane))
    fields.setdefault("execution_kind", "job")
    return NewExecution(**fields)


async def test_priority_then_age(engine: Engine) -> None:
    first = await engine.create()
    await engine.advance(1)
    second = await engine.create()
    await engine.advance(1)
    urgent = await engine.create(priority=9000)
    claims = await engine.claim_all(3)
    assert [claim.execution_id for claim in claims] == [urgent, first, second]


async def test_own_delay_wins_over_the_policy(engine: Engine) -> None:
    now = await engine.now()
    outcome = await engine.backend.executions.create_execution(
        new(engine, delay_until=1, policy=parse_policy({"delay_until": now + 60_000}))
    )
    assert isinstance(outcome, Created)
    assert outcome.public_state is PublicState.WAITING


async def test_durations_beyond_exact_numbers_are_capped(engine: Engine) -> None:
    execution_id = await engine.create(
        idempotency_key="k",
        policy={
            "delay_until": 2**63 - 1,
            "dedup_window_ms": U64,
            "timeout_policy": {"execution_deadline_ms": U64, "attempt_timeout_ms": U64},
            "stream_policy": {"retention_ttl_ms": U64},
        },
    )
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.execution_deadline_at, info.delay_until) == (MAX_MS, MAX_MS)
    other = await engine.create(
        policy={"timeout_policy": {"attempt_timeout_ms": U64, "execution_deadline_ms": U64}}
    )
    claim = await engine.claim()
    assert claim.attempt_timeout_ms == MAX_MS
    await engine.backend.executions.complete(claim.handle)
    await engine.backend.executions.replay_execution(other)
    assert (await engine.backend.reads.read_execution_info(other)).execution_deadline_at == MAX_MS


async def test_payload_limit_is_inclusive(engine: Engine) -> None:
    execution_id = await engine.create(input_payload=b"\xff" * 1_048_576)
    context = await engine.backend.reads.read_execution_context(execution_id)
    assert context.input_payload == b"\xff" * 1_048_576
    error = await unchanged(engine, lambda: engine.create(input_payload=bytes(1_048_577)))
    assert error.code == "payload_too_large"
    error = await unchanged(engine, lambda: engine.create(input_payload=bytes(10_000_000)))
    assert error.code == "payload_too_large"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"execution_kind": ""}, "execution_kind"),
        ({"execution_kind": "x" * 1025}, "execution_kind"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": "a:b"}, "namespace"),
        ({"namespace": "a b"}, "namespace"),
        ({"lane_id": ""}, "lane"),
        ({"lane_id": "x" * 65}, "lane"),
        ({"lane_id": "ünicode"}, "lane"),
        ({"lane_id": "tab\t"}, "lane"),
        ({"priority": "7"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"idempotency_key": "x" * 1025}, "idempotency_key"),
        ({"creator_identity": "x" * 1025}, "creator_identity"),
        ({"tags": {"": "v"}}, "tags"),
        ({"tags": {"k": "v" * 4097}}, "tags"),
        ({"tags": {f"k{i}": "v" for i in range(129)}}, "tags"),
        ({"delay_until": "soon"}, "delay_until"),
        ({"delay_until": 2**63}, "delay_until"),
        ({"execution_deadline_at": 1.5}, "execution_deadline_at"),
        ({"partition_id": 5}, "partition_id"),
    ],
)
async def test_invalid_input(engine: Engine, fields: dict[str, Any], part: str) -> None:
    item = new(engine, execution_id=engine.new_id(), **fields)
    error = await unchanged(engine, lambda: engine.backend.executions.create_execution(item))
    assert isinstance(error, EngineError)
    assert error.code == "invalid_input"
    assert error.detail.startswith(part)


async def test_partition_of_the_id(engine: Engine) -> None:
    beyond = ExecutionId.trusted("{fp:256}:11111111-2222-4333-8444-555555555555")
    await refused(
        engine.backend.executions.create_execution(new(engine, execution_id=beyond)),
        "invalid_input",
    )
    execution_id = engine.new_id()
    outcome = await engine.backend.executions.create_execution(
        new(engine, execution_id=execution_id, partition_id=execution_id.partition)
    )
    assert isinstance(outcome, Created)


BAD_CAPABILITIES: list[tuple[Any, str]] = [
    (("gpu", None), "required:non_string_token"),
    ("gpu", "required:not_array"),
    ({"x": 1}, "required:not_array"),
    (("a,b",), "required:comma_in_token"),
    (("a b",), "required:control_or_whitespace"),
    (("task:x",), "required:reserved prefix"),
    (("",), "required:empty_token"),
    (tuple(f"t{i}" for i in range(257)), "required:too_many_tokens"),
    (("x" * 4097,), "required:too_many_bytes"),
]


@pytest.mark.parametrize(("tokens", "detail"), BAD_CAPABILITIES)
async def test_policy_objects_are_checked_too(engine: Engine, tokens: Any, detail: str) -> None:
    policy = ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=tokens))
    item = new(engine, policy=policy)
    error = await unchanged(engine, lambda: engine.backend.executions.create_execution(item))
    assert (error.code, error.detail) == ("invalid_capabilities", detail)


@pytest.mark.parametrize(
    "policy",
    [
        ExecutionPolicy(max_reclaim_count=-1),
        ExecutionPolicy(timeout_policy=TimeoutPolicy(attempt_timeout_ms="5s")),  # pyright: ignore[reportArgumentType]
        ExecutionPolicy(budget_ids=("not-a-uuid",)),
    ],
)
async def test_broken_policy_objects(engine: Engine, policy: ExecutionPolicy) -> None:
    item = new(engine, policy=policy)
    error = await unchanged(engine, lambda: engine.backend.executions.create_execution(item))
    assert error.code == "invalid_policy_json"


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (ExecutionPolicy(budget_ids=("no",)), "budget_ids[0]"),
        (ExecutionPolicy(budget_ids=tuple(new_uuid() for _ in range(17))), "budget_ids"),
        (ExecutionPolicy(quota_policy_id="no"), "quota_policy_id"),
    ],
)
async def test_limits_that_are_malformed_are_refused(
    engine: Engine, policy: ExecutionPolicy, field: str
) -> None:
    item = new(engine, policy=policy)
    error = await unchanged(engine, lambda: engine.backend.executions.create_execution(item))
    assert error.code == "invalid_policy_json"
    assert error.detail.startswith(field)


@pytest.mark.parametrize("state", ["draining", "disabled"])
async def test_lane_not_accepting(engine: Engine, state: str) -> None:
    known = await engine.create(lane="closed", idempotency_key="k")
    await engine.backend.lanes.set_lane_state("closed", state)
    item = new(engine, lane_id="closed")
    error = await unchanged(engine, lambda: engine.backend.executions.create_execution(item))
    assert (error.code, error.detail) == ("lane_not_accepting", state)
    # What was accepted before is still recognised: duplicates are found first.
    again = new(engine, lane_id="closed", idempotency_key="k")
    assert await engine.backend.executions.create_execution(again) == Duplicate(known)
    await engine.backend.lanes.set_lane_state("closed", "paused")
    assert isinstance(await engine.backend.executions.create_execution(item), Created)


async def test_an_id_of_another_namespace_is_refused_without_naming_it(engine: Engine) -> None:
    theirs = await engine.create(namespace="theirs")
    known = await engine.create()
    for execution_id, namespace in ((theirs, "default"), (theirs, "ours"), (known, "ours")):
        item = new(engine, execution_id=execution_id, namespace=namespace)
        error = await unchanged(engine, partial(engine.backend.executions.create_execution, item))
        expected = "execution_id: exists in another namespace"
        assert (error.code, error.detail) == ("invalid_input", expected)
    for execution_id, namespace in ((theirs, "theirs"), (known, "default")):
        item = new(engine, execution_id=execution_id, namespace=namespace)
        assert await engine.backend.executions.create_execution(item) == Duplicate(execution_id)


async def test_new_lanes_and_partitions_are_registered(engine: Engine) -> None:
    first = engine.new_id("one")
    items = [
        new(engine, execution_id=first, lane_id="one"),
        # Another lane's execution may live in the same partition.
        new(engine, execution_id=ExecutionId.solo("one", engine.backend.counts), lane_id="two"),
        new(engine, lane_id="three"),
    ]
    await engine.backend.executions.create_many(items)
    lanes, _ = await engine.backend.lanes.list_lanes()
    assert {"one", "two", "three"} <= set(lanes)
    assert {first.tag, items[2].execution_id.tag} <= set(
        await engine.backend.places.used_partitions()
    )
