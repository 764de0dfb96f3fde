"""The idempotency key of suspend; strange names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import Count, CountKind, Single
from flowfabric.core.ids import new_uuid
from flowfabric.engine.valkey.keys import suspend_dedup
from tests.engine.probes import freeze, refused, untouched
from tests.support.engine import Engine
from tests.support.suspension import GO, Waits


async def test_a_repeat_gives_the_first_answer_verbatim(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    first = await waits.park(handle=handle, idempotency_key="pause-1")
    async with untouched(engine):
        for condition in (GO, Single("other")):
            again = await waits.backend.suspensions.suspend(
                handle, condition=condition, idempotency_key="pause-1", reason_code="x"
            )
            assert again == first
    await waits.send(first)
    async with untouched(engine):
        again = await waits.backend.suspensions.suspend(
            handle, condition=GO, idempotency_key="pause-1"
        )
    assert again == first, "also after the resume"


async def test_the_suspension_id_is_the_key_by_default(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    identity = new_uuid()
    first = await waits.park(handle=handle, suspension_id=identity)
    assert (
        await waits.backend.suspensions.suspend(handle, condition=GO, suspension_id=identity)
        == first
    )


async def test_no_key_is_no_dedup(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await waits.park(handle=handle, idempotency_key="")
    await refused(
        "execution_not_active",
        waits.backend.suspensions.suspend(handle, condition=GO, idempotency_key=""),
    )
    names: Any = await engine.backend.transport.call("KEYS", "ff:dedup:suspend:*")
    assert names == []


async def test_a_key_of_another_lease_is_refused(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(idempotency_key="pause")
    await waits.send(parked)
    claim = await engine.claim()
    async with untouched(engine):
        problem = await refused(
            "invalid_input",
            waits.backend.suspensions.suspend(claim.handle, condition=GO, idempotency_key="pause"),
        )
    assert "suspend_idempotency_key_reused" in problem.detail
    forged = msgspec.structs.replace(
        parked.handle, lease=f"{new_uuid()}/{parked.handle.lease_epoch}", kind="fresh"
    )
    problem = await refused(
        "invalid_input",
        waits.backend.suspensions.suspend(forged, condition=GO, idempotency_key="pause"),
    )
    assert "reused" in problem.detail, "the tokens are for the lease holder alone"
    other = await engine.running(lane="other")
    await waits.park(handle=other, idempotency_key="pause")


async def test_refusals_are_not_remembered(engine: Engine) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    await refused(
        "hmac_secret_not_initialized",
        waits.backend.suspensions.suspend(handle, condition=GO, idempotency_key="x"),
    )
    await waits.backend.secrets.seed_at_boot("ab" * 32)
    await waits.park(handle=handle, idempotency_key="x")


@pytest.mark.parametrize(
    ("timeout_in", "ttl"),
    [
        (None, 604_800_000),
        (5_000, 65_000),
        (-5_000, 60_000),
        (10**9, 604_800_000),
        (604_740_000, 604_800_000),
    ],
)
async def test_how_long_a_key_lives(engine: Engine, timeout_in: int | None, ttl: int) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await freeze(engine, await engine.now())
    timeout = None if timeout_in is None else await engine.now() + timeout_in
    await waits.park(handle=handle, idempotency_key="x", timeout_at=timeout)
    left: Any = await engine.backend.transport.call(
        "PTTL", suspend_dedup(handle.execution_id.tag, handle.execution_id)
    )
    assert ttl - 5_000 < left <= ttl


@pytest.mark.corrupts
@pytest.mark.parametrize("damage", ["string", "garbage", "number"])
async def test_an_unreadable_entry_is_a_miss(engine: Engine, damage: str) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    key = suspend_dedup(handle.execution_id.tag, handle.execution_id)
    if damage == "string":
        await engine.backend.transport.call("SET", key, "x")
    elif damage == "garbage":
        await waits.write(key, x=b"\xc1")
    else:
        stored: dict[str, object] = {"reply": 7, "lease": handle.lease, "expires_at": 2**45}
        await waits.write(key, x=msgspec.msgpack.encode(stored))
    first = await waits.park(handle=handle, idempotency_key="x")
    assert (
        await waits.backend.suspensions.suspend(handle, condition=GO, idempotency_key="x") == first
    )


async def test_strange_keys_and_names(engine: Engine) -> None:
    waits = await Waits.open(engine)
    for key in ("a|b", "ü\x00\x01", '"\\/', "{fp:1}", " "):
        parked = await waits.park(
            Count(n=1, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=(key,), signal_name=key)
        )
        assert parked.details.waitpoint_key == key
        assert await waits.effect(parked, "x") == "signal_ignored_matcher_failed"
        assert await waits.effect(parked, key) == "resume_condition_satisfied"
        await engine.backend.executions.complete((await engine.claim()).handle)


async def test_core_is_named_like_elsewhere(engine: Engine) -> None:
    """Fields that only this concern writes are told by their documented names."""
    waits = await Waits.open(engine)
    parked = await waits.park()
    names = ("current_suspension_id", "current_waitpoint_id", "lifecycle_phase", "waitpointed")
    found = await engine.backend.reads.read_exec_core_fields(parked.handle.execution_id, names)
    assert found["current_suspension_id"] == parked.details.suspension_id
    assert found["current_waitpoint_id"] == parked.details.waitpoint_id
    assert found["lifecycle_phase"] == "suspended"
    assert found["waitpointed"] is None


async def test_answers_go_with_the_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(policy={"stream_policy": {"retention_ttl_ms": 1}})
    await waits.park(handle=handle, idempotency_key="x")
    await engine.backend.executions.cancel_execution(handle.execution_id)
    await engine.advance(2)
    assert await waits.trim(handle.execution_id) == ["purged"]
    names: Any = await engine.backend.transport.call("KEYS", "ff:dedup:*")
    assert names == []


async def test_an_execution_keeps_so_many_answers(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    for number in range(105):
        parked = await waits.park(handle=handle, idempotency_key=f"k-{number}")
        await waits.send(parked)
        handle = (await engine.claim()).handle
    name = suspend_dedup(handle.execution_id.tag, handle.execution_id)
    assert await engine.backend.transport.call("HLEN", name) == 5


async def test_an_answer_ends_before_others_of_its_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    now = await engine.now()
    parked = await waits.park(handle=handle, idempotency_key="short", timeout_at=now + 1000)
    await waits.send(parked)
    claim = await engine.claim()
    await waits.park(handle=claim.handle, idempotency_key="long")
    await engine.advance(62_000)
    # The lease is over, and there is no answer left that could be given again.
    await refused(
        "execution_not_active",
        waits.backend.suspensions.suspend(handle, condition=GO, idempotency_key="short"),
    )
