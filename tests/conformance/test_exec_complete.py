"""complete_execution and complete_many."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import Completed
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.executions import Completion
from tests.support.engine import LANE, Engine, refused, unchanged

ALL_BYTES = bytes(range(256)) * 4


@pytest.mark.parametrize("result", [None, b"", b"\x00\xff", ALL_BYTES])
@pytest.mark.parametrize("encoding", ["", "json", "x" * 200])
async def test_result(engine: Engine, result: bytes | None, encoding: str) -> None:
    handle = await engine.running()
    outcome = await engine.backend.executions.complete(handle, result, encoding)
    assert outcome == Completed(handle.execution_id)
    assert outcome.public_state.value == "completed"
    assert await engine.backend.reads.get_execution_result(handle.execution_id) == result
    info, stored = await engine.backend.reads.read_outcome(handle.execution_id)
    assert stored == result
    assert info.result_encoding == ("" if result is None else encoding)
    (event,) = [e for e in await engine.events(handle.execution_id) if e.type == "completion"]
    assert event.get("result_ref") == (None if result is None else True)


async def test_a_renewal_leaves_no_trace_after_the_end(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.leases.renew(handle)
    await engine.backend.executions.complete(handle)
    names = ["lease_last_renewed_at", "lease_expires_at"]
    fields = await engine.backend.reads.read_exec_core_fields(handle.execution_id, names)
    assert fields == dict.fromkeys(names)


async def test_a_repeat_is_answered_again(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle, b"first")
    answer = await unchanged(engine, lambda: engine.backend.executions.complete(handle, b"second"))
    assert answer == Completed(handle.execution_id)
    assert await engine.backend.reads.get_execution_result(handle.execution_id) == b"first"
    types = [event.type for event in await engine.events(handle.execution_id)]
    assert types == ["acquired", "completion"]


async def test_a_repeat_after_a_replay_and_a_new_run(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    await engine.backend.executions.replay_execution(handle.execution_id)
    answer = await unchanged(engine, lambda: engine.backend.executions.complete(handle))
    assert answer == Completed(handle.execution_id)
    second = (await engine.claim()).handle
    answer = await unchanged(engine, lambda: engine.backend.executions.complete(handle))
    assert answer == Completed(handle.execution_id)
    await engine.backend.executions.complete(second)
    answer = await unchanged(engine, lambda: engine.backend.executions.complete(handle))
    assert answer == Completed(handle.execution_id)


@pytest.mark.parametrize("ending", ["cancel", "fail", "delay"])
async def test_only_the_same_operation_is_a_repeat(engine: Engine, ending: str) -> None:
    handle = await engine.running()
    if ending == "cancel":
        await engine.backend.executions.cancel_execution(handle.execution_id)
        outcome = "cancelled"
    elif ending == "fail":
        await engine.backend.executions.fail(handle, "x", "permanent")
        outcome = "failed"
    else:
        await engine.backend.executions.delay(handle, 2**50)
        outcome = "none"
    answer = await unchanged(engine, lambda: engine.backend.executions.complete(handle))
    assert isinstance(answer, EngineError)
    assert answer.code == "execution_not_active"
    assert answer.details[0] == outcome


async def test_a_resumed_lease_is_another(engine: Engine) -> None:
    first = await engine.running()
    await engine.backend.executions.delay(first, 1)
    second = (await engine.claim()).handle
    assert second.attempt_id == first.attempt_id
    await engine.backend.executions.complete(second)
    # The attempt ended under a later epoch, so the old holder's call is no repeat.
    await refused(engine.backend.executions.complete(first), "execution_not_active")


async def test_result_too_large_keeps_the_lease(engine: Engine) -> None:
    handle = await engine.running()
    answer = await unchanged(
        engine, lambda: engine.backend.executions.complete(handle, bytes(1_048_577))
    )
    assert answer.code == "payload_too_large"
    await engine.backend.executions.complete(handle, bytes(1_048_576))


async def test_unfenced_by_an_operator(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete_execution(
        handle.execution_id, source="operator_override"
    )
    event = (await engine.events(handle.execution_id))[-1]
    assert (event.get("source"), event.get("outcome")) == ("operator_override", "success")


async def many(engine: Engine, count: int) -> list[Handle]:
    for _ in range(count):
        await engine.create()
    return [claim.handle for claim in await engine.claim_all(count)]


def altered(handle: Handle) -> Handle:
    return Handle(
        execution_id=handle.execution_id,
        lease=f"{new_uuid()}/1",
        attempt=handle.attempt,
        lease_ttl_ms=1,
        lane_id=LANE,
        worker_instance_id="w",
    )


async def test_complete_many_answers_each(engine: Engine) -> None:
    handles = await many(engine, 4)
    elsewhere = await engine.running(lane="elsewhere")
    items = [
        Completion(handles[0], b"a", "json"),
        Completion(altered(handles[1])),
        Completion(handles[2], bytes(2_000_000)),
        Completion(elsewhere),
        Completion(handles[0], b"b"),
        Completion(handles[3], b""),
    ]
    outcomes = await engine.backend.executions.complete_many(items)
    codes = [getattr(outcome, "code", "completed") for outcome in outcomes]
    assert codes == [
        *("completed", "stale_lease", "payload_too_large"),
        *("completed", "completed", "completed"),
    ]
    assert await engine.backend.reads.get_execution_result(handles[0].execution_id) == b"a"
    assert await engine.backend.reads.get_execution_result(handles[3].execution_id) == b""
    for kept in (handles[1], handles[2]):
        assert (
            await engine.backend.reads.read_execution_state(kept.execution_id)
        ).value == "active"
    completions = [
        e for e in await engine.events(handles[0].execution_id) if e.type == "completion"
    ]
    assert len(completions) == 1


async def test_complete_many_beyond_one_call(engine: Engine) -> None:
    await engine.backend.executions.create_many([_new(engine) for _ in range(300)])
    handles = [claim.handle for claim in await engine.claim_all(256)]
    handles += [claim.handle for claim in await engine.claim_all(256)]
    outcomes = await engine.backend.executions.complete_many(
        [Completion(handle) for handle in handles]
    )
    assert [outcome.execution_id for outcome in outcomes if isinstance(outcome, Completed)] == [
        handle.execution_id for handle in handles
    ]
    assert len(handles) == 300


def _new(engine: Engine) -> Any:
    from flowfabric.core.contracts.executions import NewExecution

    return NewExecution(execution_id=engine.new_id(), execution_kind="job")


async def test_complete_and_claim_in_one_call(engine: Engine) -> None:
    first, second = await many(engine, 2)
    following = await engine.create()
    items = [Completion(first, b"r"), Completion(second, bytes(2_000_000))]
    outcomes, claimed = await engine.backend.claims.complete_and_claim(
        first.execution_id.tag, items, engine.want(), 5
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], EngineError)
    assert outcomes[1].code == "payload_too_large"
    assert [claim.execution_id for claim in claimed.claims] == [following]
    assert (await engine.backend.reads.read_execution_state(second.execution_id)).value == "active"
