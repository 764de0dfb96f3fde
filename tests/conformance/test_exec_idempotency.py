"""At most once per id and per key, and batches in which one item never affects another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.executions import Created, Duplicate, NewExecution
from flowfabric.core.errors import ConflictError, EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import parse_policy
from tests.support.engine import LANE, Engine, unchanged
from tests.support.executions import trim

DAY = 86_400_000


def new(engine: Engine, **fields: Any) -> NewExecution:
    fields.setdefault("execution_id", engine.new_id(fields.get("lane_id", LANE)))
    return NewExecution(execution_kind="job", **fields)


async def test_same_id_is_a_duplicate_whatever_else_differs(engine: Engine) -> None:
    execution_id = await engine.create(input_payload=b"first", tags={"a.b": "1"}, priority=1)
    before = await engine.dump()
    other = new(
        engine,
        execution_id=execution_id,
        input_payload=b"second",
        tags={"c.d": "2"},
        priority=9,
        idempotency_key="fresh",
        policy=parse_policy({"max_replay_count": 1}),
    )
    assert await engine.backend.executions.create_execution(other) == Duplicate(execution_id)
    assert await engine.dump() == before


async def test_same_key_gives_the_first_id(engine: Engine) -> None:
    first = await engine.create(idempotency_key="k", input_payload=b"1")
    before = await engine.dump()
    again = await engine.backend.executions.create_execution(new(engine, idempotency_key="k"))
    assert again == Duplicate(first)
    assert await engine.dump() == before


@pytest.mark.parametrize(
    ("stored", "given", "conflict"),
    [
        (b"a", b"a", False),
        (b"a", b"b", True),
        (bytes(32), bytes(31), True),
        (b"", b"b", False),
        (b"a", b"", False),
    ],
)
async def test_a_digest_tells_a_repeat_from_another_request(
    engine: Engine, stored: bytes, given: bytes, *, conflict: bool
) -> None:
    first = await engine.create(idempotency_key="k", idempotency_digest=stored)
    repeat = new(engine, idempotency_key="k", idempotency_digest=given)
    answer = await unchanged(engine, lambda: engine.backend.executions.create_execution(repeat))
    if not conflict:
        assert answer == Duplicate(first)
        return
    assert isinstance(answer, ConflictError)
    assert (answer.code, answer.details) == ("idempotency_conflict", ("k", first))
    assert not answer.retryable


async def test_a_digest_without_a_key_means_nothing(engine: Engine) -> None:
    ids = [await engine.create(idempotency_digest=digest) for digest in (b"a", b"b")]
    assert len(set(ids)) == 2


async def test_a_conflict_in_a_batch_affects_no_other_item(engine: Engine) -> None:
    items = [
        new(engine, idempotency_key="k", idempotency_digest=b"a"),
        new(engine, idempotency_key="k", idempotency_digest=b"b"),
        new(engine, idempotency_key="k", idempotency_digest=b"a"),
        new(engine),
    ]
    outcomes = await engine.backend.executions.create_many(items)
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Created, ConflictError, Duplicate, Created]
    assert len(await engine.claim_all()) == 2


async def test_the_key_of_a_trimmed_execution_is_free_for_any_request(engine: Engine) -> None:
    first = await engine.create(idempotency_key="k", idempotency_digest=b"a")
    await engine.backend.executions.cancel_execution(first)
    await engine.advance(DAY)
    assert await trim(engine, first) == "purged"
    second = await engine.create(idempotency_key="k", idempotency_digest=b"b")
    repeat = new(engine, idempotency_key="k", idempotency_digest=b"b")
    assert await engine.backend.executions.create_execution(repeat) == Duplicate(second)


async def test_keys_are_scoped_by_partition_and_namespace(engine: Engine) -> None:
    first = await engine.create(idempotency_key="k")
    namespaced = await engine.create(idempotency_key="k", namespace="tenant")
    elsewhere = await engine.create(idempotency_key="k", lane="elsewhere")
    assert len({first, namespaced, elsewhere}) == 3
    assert elsewhere.partition != first.partition
    for lane, namespace, expected in (
        (LANE, "default", first),
        (LANE, "tenant", namespaced),
        ("elsewhere", "default", elsewhere),
    ):
        repeat = new(engine, idempotency_key="k", lane_id=lane, namespace=namespace)
        assert await engine.backend.executions.create_execution(repeat) == Duplicate(expected)


async def test_keys_are_compared_bytewise(engine: Engine) -> None:
    ids = {await engine.create(idempotency_key=key) for key in ("k", "K", "k ", "ü", "a:b")}
    assert len(ids) == 5


async def test_window_zero_is_no_dedup(engine: Engine) -> None:
    policy = {"dedup_window_ms": 0}
    first = await engine.create(idempotency_key="k", policy=policy)
    second = await engine.create(idempotency_key="k", policy=policy)
    assert first != second


async def test_a_trimmed_target_is_a_miss(engine: Engine) -> None:
    first = await engine.create(idempotency_key="k")
    await engine.backend.executions.cancel_execution(first)
    await engine.advance(DAY)
    assert await trim(engine, first) == "purged"
    second = await engine.create(idempotency_key="k")
    assert second != first
    repeat = await engine.backend.executions.create_execution(new(engine, idempotency_key="k"))
    assert repeat == Duplicate(second)


async def test_a_finished_execution_still_answers_for_its_key(engine: Engine) -> None:
    handle = await engine.running(idempotency_key="k")
    await engine.backend.executions.complete(handle)
    repeat = await engine.backend.executions.create_execution(new(engine, idempotency_key="k"))
    assert repeat == Duplicate(handle.execution_id)


async def test_concurrent_creates_make_one(engine: Engine) -> None:
    items = [new(engine, idempotency_key="k") for _ in range(20)]
    outcomes = await asyncio.gather(
        *(engine.backend.executions.create_execution(item) for item in items)
    )
    created = [outcome for outcome in outcomes if isinstance(outcome, Created)]
    assert len(created) == 1
    assert {outcome.execution_id for outcome in outcomes} == {created[0].execution_id}


async def test_duplicates_inside_one_batch(engine: Engine) -> None:
    shared = engine.new_id()
    items = [
        new(engine, execution_id=shared),
        new(engine, execution_id=shared, input_payload=b"other"),
        new(engine, idempotency_key="k"),
        new(engine, idempotency_key="k"),
    ]
    outcomes = await engine.backend.executions.create_many(items)
    assert [type(outcome) for outcome in outcomes] == [Created, Duplicate, Created, Duplicate]
    assert outcomes[1] == Duplicate(shared)
    assert outcomes[3] == Duplicate(items[2].execution_id)
    assert (await engine.backend.reads.read_execution_context(shared)).input_payload == b""
    assert len(await engine.claim_all()) == 2


async def test_one_bad_item_affects_no_other(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_state("closed", "disabled")
    beyond = ExecutionId.trusted("{fp:300}:11111111-2222-4333-8444-555555555555")
    items = [
        new(engine),
        NewExecution(execution_id=engine.new_id(), execution_kind=""),
        new(engine, lane_id="elsewhere"),
        new(engine, input_payload=bytes(2_000_000)),
        new(engine, lane_id="closed", execution_id=engine.new_id()),
        new(engine, execution_id=beyond),
        new(engine, delay_until=await engine.now() + 60_000),
    ]
    outcomes = await engine.backend.executions.create_many(items)
    codes = [getattr(outcome, "code", "created") for outcome in outcomes]
    assert codes == [
        "created",
        "invalid_input",
        "created",
        "payload_too_large",
        "lane_not_accepting",
        "invalid_input",
        "created",
    ]
    stored = b" ".join(await engine.dump())
    for item, outcome in zip(items, outcomes, strict=True):
        assert (item.execution_id.encode() in stored) == isinstance(outcome, Created)
        if isinstance(outcome, Created):
            assert outcome.execution_id == item.execution_id


async def test_a_long_batch_keeps_its_order(engine: Engine) -> None:
    items = [new(engine, lane_id=f"lane-{i % 3}") for i in range(600)]
    outcomes = await engine.backend.executions.create_many(items)
    assert not any(isinstance(outcome, EngineError) for outcome in outcomes)
    created = [outcome.execution_id for outcome in outcomes if isinstance(outcome, Created)]
    assert created == [item.execution_id for item in items]


async def test_an_empty_batch(engine: Engine) -> None:
    assert await engine.backend.executions.create_many([]) == []
