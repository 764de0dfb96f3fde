"""Step records: what is recorded stays, whatever ends the attempt (11 §17.1)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.steps import (
    NO_STEPS,
    AlreadyRecorded,
    Recorded,
    StepError,
    StepPage,
    StepRecord,
)
from flowfabric.core.ids import ExecutionId, new_uuid
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import mark, reclaim, running

NOW = 1_900_000_000_000
LARGEST = 262_144
RETRY = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 0}}}


async def record(engine: Engine, handle: Handle, key: str, **step: Any) -> Any:
    return await engine.backend.steps.record_step(handle.execution_id, handle, key, **step)


async def steps_of(engine: Engine, execution_id: ExecutionId) -> tuple[StepRecord, ...]:
    page = await engine.backend.steps.read_steps(execution_id)
    assert page.next_after_seq is None
    return page.steps


def a_step(key: str, seq: int, **changed: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "kind": "step",
        "status": "done",
        "codec": "",
        "result": None,
        "error": None,
        "attempt_index": 0,
        "lease_epoch": 1,
        "started_at": NOW,
        "finished_at": NOW,
        "fire_at": None,
        "child_execution_id": None,
    }
    return StepRecord(step_key=key, seq=seq, **(fields | changed))


# --- recording ------------------------------------------------------------------------------


async def test_every_field_of_a_record(engine: Engine) -> None:
    await engine.freeze(NOW)
    handle, child = await running(engine), engine.new_id()
    failed = StepError("no route to host", "transient")
    assert await record(engine, handle, "fetch", result=b"\xff", codec="raw", took_ms=40) == (
        Recorded(1)
    )
    assert await record(engine, handle, "send", status="failed", error=failed) == Recorded(2)
    assert await record(engine, handle, "nap", kind="timer", status="pending", fire_in_ms=90) == (
        Recorded(3, NOW + 90)
    )
    at = {"kind": "timer", "status": "pending", "fire_at": NOW + 5}
    assert await record(engine, handle, "alarm", **at) == Recorded(4, NOW + 5)
    with_child = {"kind": "child", "status": "pending", "child_execution_id": child}
    assert await record(engine, handle, "sub", **with_child) == Recorded(5)
    assert await record(engine, handle, "go", kind="signal", result=b"") == Recorded(6)
    assert await record(engine, handle, "now", kind="value") == Recorded(7)
    pending: dict[str, Any] = {"status": "pending", "finished_at": None}
    assert await steps_of(engine, handle.execution_id) == (
        a_step("fetch", 1, result=b"\xff", codec="raw", started_at=NOW - 40),
        a_step("send", 2, status="failed", error=failed),
        a_step("nap", 3, kind="timer", fire_at=NOW + 90, **pending),
        a_step("alarm", 4, kind="timer", fire_at=NOW + 5, **pending),
        a_step("sub", 5, kind="child", child_execution_id=child, **pending),
        a_step("go", 6, kind="signal", result=b""),
        a_step("now", 7, kind="value"),
    )


async def test_the_first_record_of_a_key_stays(engine: Engine) -> None:
    await engine.freeze(NOW)
    handle = await running(engine)
    await record(engine, handle, "a", result=b"first")
    await record(engine, handle, "b", status="failed", error=StepError("boom"))
    first = a_step("a", 1, result=b"first")
    async with untouched(engine):
        for again in (
            {"result": b"second"},
            {"result": b"first"},
            {"status": "failed", "error": StepError("late")},
            {"status": "pending"},
            {"kind": "value"},
        ):
            assert await record(engine, handle, "a", **again) == AlreadyRecorded(first)
        assert isinstance(await record(engine, handle, "b", result=b"ok"), AlreadyRecorded)


@pytest.mark.parametrize(
    ("end", "ended"),
    [
        ({"result": b"r", "codec": "json"}, {"result": b"r", "codec": "json"}),
        ({"status": "failed", "error": StepError("x", "y")}, {"error": StepError("x", "y")}),
    ],
)
async def test_a_pending_record_is_replaced_once(
    engine: Engine, end: dict[str, Any], ended: dict[str, Any]
) -> None:
    await engine.freeze(NOW)
    handle = await running(engine)
    await record(engine, handle, "nap", kind="timer", status="pending", fire_in_ms=7)
    async with untouched(engine):
        again = await record(engine, handle, "nap", kind="timer", status="pending", fire_in_ms=700)
        assert isinstance(again, AlreadyRecorded)
        # A record of another kind belongs to other code.
        other = await record(engine, handle, "nap", kind="step", **end)
        assert isinstance(other, AlreadyRecorded)
        assert (other.record.kind, other.record.status) == ("timer", "pending")
    await engine.freeze(NOW + 9)
    assert await record(engine, handle, "nap", kind="timer", took_ms=4, **end) == (
        Recorded(1, NOW + 7)
    )
    (found,) = await steps_of(engine, handle.execution_id)
    status = end.get("status", "done")
    times = {"started_at": NOW, "finished_at": NOW + 9, "fire_at": NOW + 7}
    assert found == a_step("nap", 1, kind="timer", status=status, **times, **ended)
    async with untouched(engine):
        assert await record(engine, handle, "nap", kind="timer", result=b"n") == (
            AlreadyRecorded(found)
        )


async def test_a_child_keeps_its_id_when_it_ends(engine: Engine) -> None:
    handle, child = await running(engine), engine.new_id()
    await record(engine, handle, "c", kind="child", status="pending", child_execution_id=child)
    await record(engine, handle, "c", kind="child", result=b"r")
    (found,) = await steps_of(engine, handle.execution_id)
    assert (found.child_execution_id, found.result) == (child, b"r")


async def test_a_repeat_of_ones_own_record_is_recognised(engine: Engine) -> None:
    handle = await running(engine)
    await record(engine, handle, "a", kind="timer", status="pending", fire_in_ms=1)
    await record(engine, handle, "b", result=b"r")
    await engine.backend.executions.delay(handle, 1)
    resumed = (await engine.claim()).handle
    mine = (resumed.lease_epoch, resumed.attempt_index)
    earlier = await record(engine, resumed, "b", result=b"r")
    assert isinstance(earlier, AlreadyRecorded)
    assert not earlier.record.belongs_to(*mine)
    # Whoever ends a pending step owns the record.
    assert await record(engine, resumed, "a", kind="timer") == Recorded(
        1, (await steps_of(engine, handle.execution_id))[0].fire_at
    )
    again = await record(engine, resumed, "a", kind="timer")
    assert isinstance(again, AlreadyRecorded)
    assert again.record.belongs_to(*mine)
    assert not again.record.belongs_to(handle.lease_epoch, handle.attempt_index)


async def test_recording_changes_no_state_and_emits_nothing(engine: Engine) -> None:
    handle = await running(engine)
    vector, events = (
        await engine.vector(handle.execution_id),
        await engine.events(handle.execution_id),
    )
    before = await engine.backend.reads.describe_execution(handle.execution_id)
    await engine.advance(5)
    await record(engine, handle, "a")
    after = await engine.backend.reads.describe_execution(handle.execution_id)
    assert await engine.vector(handle.execution_id) == vector
    assert await engine.events(handle.execution_id) == events
    assert before is not None
    assert after is not None
    assert after.last_mutation_at >= before.last_mutation_at + 5


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "field"),
    [
        ({"step_key": ""}, "step_key"),
        ({"step_key": "k" * 513}, "step_key"),
        ({"kind": "task"}, "kind"),
        ({"status": "running"}, "status"),
        ({"codec": "c" * 65}, "codec"),
        ({"status": "failed"}, "error"),
        ({"error": StepError("x")}, "error"),
        ({"status": "pending", "error": StepError("x")}, "error"),
        ({"status": "failed", "error": StepError("x", "c" * 257)}, "error.category"),
        ({"status": "failed", "error": StepError("x"), "result": b"r"}, "result"),
        ({"status": "pending", "result": b"r"}, "result"),
        ({"took_ms": -1}, "took_ms"),
        ({"kind": "timer", "status": "pending"}, "fire_at"),
        ({"kind": "timer", "status": "pending", "fire_at": 1, "fire_in_ms": 1}, "fire_at"),
        ({"kind": "timer", "status": "done", "fire_at": 1}, "fire_at"),
        ({"status": "pending", "fire_in_ms": 1}, "fire_in_ms"),
        ({"kind": "timer", "status": "pending", "fire_in_ms": -1}, "fire_in_ms"),
        (
            {"child_execution_id": "{fp:0}:00000000-0000-4000-8000-000000000000"},
            "child_execution_id",
        ),
        ({"kind": "child", "child_execution_id": "x"}, "child_execution_id"),
    ],
)
async def test_malformed_steps(engine: Engine, step: dict[str, Any], field: str) -> None:
    handle = await running(engine)
    # The same parameters are used for every backend.
    key, others = step.get("step_key", "a"), {k: v for k, v in step.items() if k != "step_key"}
    async with untouched(engine):
        # The form is checked first, so the fence does not matter.
        for fence in (handle, Fence()):
            error = await refused(
                engine.backend.steps.record_step(handle.execution_id, fence, key, **others),
                "invalid_input",
            )
            assert error.detail.startswith(f"{field}: ")


async def test_a_long_reason_is_cut(engine: Engine) -> None:
    handle = await running(engine)
    await record(engine, handle, "a", status="failed", error=StepError("x" * 9000))
    (found,) = await steps_of(engine, handle.execution_id)
    assert found.error is not None
    assert len(found.error.reason) == 8192


async def test_the_largest_result(engine: Engine) -> None:
    handle = await running(engine)
    async with untouched(engine):
        for size in (LARGEST + 1, 4 * LARGEST):
            await refused(record(engine, handle, "a", result=bytes(size)), "payload_too_large")
    await record(engine, handle, "a", result=bytes(LARGEST))
    (found,) = await steps_of(engine, handle.execution_id)
    assert found.result == bytes(LARGEST)
    # The size is checked before the key.
    async with untouched(engine):
        await refused(record(engine, handle, "a", result=bytes(LARGEST + 1)), "payload_too_large")


async def test_the_fence_is_checked_before_the_size(engine: Engine) -> None:
    handle = await running(engine)
    large, step = bytes(LARGEST + 1), engine.backend.steps.record_step
    stale = Fence(new_uuid(), 1, handle.attempt_id)
    async with untouched(engine):
        await refused(step(engine.new_id(), Fence(), "a", result=large), "execution_not_found")
        await refused(step(handle.execution_id, Fence(), "a", result=large), "fence_required")
        await refused(
            step(handle.execution_id, Fence(handle.lease_id), "a", result=large),
            "partial_fence_triple",
        )
        await refused(step(handle.execution_id, stale, "a", result=large), "stale_lease")
    await engine.advance(TTL + 1)
    async with untouched(engine):
        # A lapsed lease is not marked by this call.
        await refused(step(handle.execution_id, handle, "a", result=large), "lease_expired")


# --- reading --------------------------------------------------------------------------------


async def test_pages_in_order(engine: Engine) -> None:
    handle = await running(engine)
    keys = [f"z{n % 7}-{n}" for n in range(5)]
    for key in keys:
        await record(engine, handle, key)
    read = engine.backend.steps.read_steps

    async def page(after: int, limit: int) -> tuple[list[str], int | None]:
        found = await read(handle.execution_id, after, limit)
        return [step.step_key for step in found.steps], found.next_after_seq

    assert await page(0, 2) == (keys[:2], 2)
    assert await page(2, 2) == (keys[2:4], 4)
    assert await page(4, 2) == (keys[4:], None)
    assert await page(0, 5) == (keys, None)
    assert await page(0, 5000) == (keys, None)
    assert await page(5, 2) == ([], None)
    assert await page(900, 2) == ([], None)
    assert await page(0, 0) == ([], None)


async def test_a_page_has_at_most_a_thousand_records(engine: Engine) -> None:
    handle = await running(engine)
    await asyncio.gather(*(record(engine, handle, f"k{n}") for n in range(1001)))
    page = await engine.backend.steps.read_steps(handle.execution_id, limit=1_000_000)
    assert (len(page.steps), page.next_after_seq) == (1000, 1000)


async def test_a_page_of_large_records_ends_early(engine: Engine) -> None:
    handle = await running(engine)
    for n in range(12):
        await record(engine, handle, f"k{n}", result=bytes(LARGEST) if n else b"")
    found: list[StepRecord] = []
    after: int | None = 0
    pages = 0
    while after is not None:
        page = await engine.backend.steps.read_steps(handle.execution_id, after)
        assert sum(len(step.result or b"") for step in page.steps) <= 5 * LARGEST
        found, after, pages = [*found, *page.steps], page.next_after_seq, pages + 1
    assert [step.seq for step in found] == list(range(1, 13))
    assert pages > 1


async def test_reading_an_execution_without_steps(engine: Engine) -> None:
    assert await steps_of(engine, await engine.create()) == ()


@pytest.mark.parametrize("limit", [0, 10])
async def test_reading_an_unknown_execution(engine: Engine, limit: int) -> None:
    await refused(engine.backend.steps.read_steps(engine.new_id(), 0, limit), "execution_not_found")


@pytest.mark.parametrize("wrong", [{"after_seq": -1}, {"limit": -1}])
async def test_reading_with_negative_numbers(engine: Engine, wrong: dict[str, int]) -> None:
    execution_id = await engine.create()
    await refused(engine.backend.steps.read_steps(execution_id, **wrong), "invalid_input")


# --- what records survive -------------------------------------------------------------------


async def test_a_claim_carries_the_records(engine: Engine) -> None:
    handle = await running(engine, policy=RETRY)
    await record(engine, handle, "a", result=b"r")
    expected = StepPage(await steps_of(engine, handle.execution_id))

    await engine.backend.executions.delay(handle, 1)
    resumed = await engine.claim()
    assert (resumed.handle.kind, resumed.steps) == ("resumed", expected)

    await engine.backend.executions.fail(resumed.handle, "boom", "transient")
    await engine.backend.upkeep.promote_delayed(
        handle.execution_id.tag, "default", [handle.execution_id]
    )
    retried = await engine.claim()
    assert (retried.attempt_type, retried.steps) == ("retry", expected)

    await engine.advance(TTL + 1)
    await mark(engine, [handle.execution_id])
    reclaimed = await reclaim(engine, handle.execution_id)
    assert (reclaimed.handle.kind, reclaimed.steps) == ("reclaimed", expected)

    await engine.backend.leases.revoke_lease(handle.execution_id)
    assert (await engine.claim()).steps == expected


async def test_a_claim_without_records(engine: Engine) -> None:
    handle = await running(engine)
    await engine.backend.executions.delay(handle, 1)
    assert (await engine.claim()).steps is NO_STEPS


async def test_a_claim_carries_a_limited_page(engine: Engine) -> None:
    handle = await running(engine)
    for n in range(4):
        await record(engine, handle, f"k{n}", result=bytes(LARGEST // 2))
    await engine.backend.executions.delay(handle, 1)
    page = (await engine.claim()).steps
    assert page.next_after_seq is not None
    assert page.next_after_seq == len(page.steps)
    assert 0 < len(page.steps) < 4
    rest = await engine.backend.steps.read_steps(handle.execution_id, page.next_after_seq)
    assert [step.seq for step in (*page.steps, *rest.steps)] == [1, 2, 3, 4]


async def test_a_claim_of_many_carries_a_limited_amount(engine: Engine) -> None:
    handles = [await running(engine) for _ in range(30)]
    for handle in handles:
        await record(engine, handle, "a", result=bytes(LARGEST))
        await engine.backend.executions.delay(handle, 1)
    claims = await engine.claim_all(30)
    assert len(claims) == 30
    carried = [claim for claim in claims if claim.steps.steps]
    assert 0 < len(carried) < 30
    # The others say where to begin.
    assert {claim.steps for claim in claims if not claim.steps.steps} == {StepPage((), 0)}


@pytest.mark.parametrize("keep_steps", [False, True])
async def test_a_replay_clears_the_records_unless_they_are_kept(
    engine: Engine, *, keep_steps: bool
) -> None:
    handle = await running(engine)
    await record(engine, handle, "a", result=b"r")
    known = await steps_of(engine, handle.execution_id)
    await engine.backend.executions.complete(handle)
    assert await steps_of(engine, handle.execution_id) == known
    await engine.backend.executions.replay_execution(handle.execution_id, keep_steps=keep_steps)
    left = known if keep_steps else ()
    assert await steps_of(engine, handle.execution_id) == left
    claim = await engine.claim()
    assert claim.steps == StepPage(left)
    again = await record(engine, claim.handle, "b")
    assert again == Recorded(2 if keep_steps else 1)


async def test_a_purge_deletes_the_records(engine: Engine) -> None:
    handle = await running(engine)
    await record(engine, handle, "a", result=b"r")
    await engine.backend.executions.complete(handle)
    await engine.backend.executions.purge_execution(handle.execution_id)
    await refused(engine.backend.steps.read_steps(handle.execution_id), "execution_not_found")
    await engine.create(execution_id=handle.execution_id)
    assert await steps_of(engine, handle.execution_id) == ()
