"""Delivering signals: order of checks, where a signal goes, what is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.conditions import (
    AllOf,
    Count,
    CountKind,
    Single,
)
from flowfabric.core.contracts.suspension import FreshWaitpoint
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from tests.support.engine import LANE, Engine, refused, untouched
from tests.support.leases import running
from tests.support.storage import indexes, record
from tests.support.suspension import Waits

# --- the order of checks ------------------------------------------------------------------------


async def test_token_errors_do_not_depend_on_the_waitpoint(engine: Engine) -> None:
    """What a bad token is answered tells nothing about waitpoints, their state or their owner."""
    waits = await Waits.open(engine)
    open_one = await waits.park(handle=await running(engine))
    closed = await waits.park(handle=await running(engine))
    await waits.send(closed)
    ended = await waits.park(handle=await running(engine))
    await engine.backend.executions.cancel_execution(ended.handle.execution_id)
    holder = await running(engine)
    pending = await waits.backend.waitpoints.create_waitpoint(holder, "k", 60_000)
    targets = [
        (open_one.handle.execution_id, open_one.details.waitpoint_id),
        (closed.handle.execution_id, closed.details.waitpoint_id),
        (ended.handle.execution_id, ended.details.waitpoint_id),
        (holder.execution_id, pending.waitpoint_id),
        (open_one.handle.execution_id, closed.details.waitpoint_id),
        (open_one.handle.execution_id, pending.waitpoint_id),
        (open_one.handle.execution_id, new_uuid()),
    ]
    await waits.backend.secrets.rotate_waitpoint_hmac_secret_all("k2", "cd" * 32, 0)
    await engine.advance(1)
    bad = {
        "nonsense": "invalid_token",
        ":" + "0" * 40: "invalid_token",
        "k1:" + "0" * 39: "invalid_token",
        "k1:" + "0" * 41: "invalid_token",
        "k9:" + "0" * 40: "invalid_token",
        "k2:" + "0" * 40: "invalid_token",
        "k2:" + "\ud800" * 40: "invalid_token",
        "k1:" + "0" * 40: "token_expired",
    }
    for token, code in bad.items():
        for execution_id, waitpoint_id in targets:
            problem = await refused(
                waits.backend.signals.deliver_signal(execution_id, waitpoint_id, token, "go"), code
            )
            assert problem.detail == "", "and nothing more is said"
    store = f"ff:sec:{holder.execution_id.tag}:waitpoint_hmac"
    await waits.write(store, **{"secret:k2": "broken"})
    await waits.write(store, **{"secret:k3": "broken", "expires_at:k3": 2**53 - 1})
    for execution_id, waitpoint_id in targets:
        for token in ("k2:" + "0" * 40, "k3:" + "0" * 40):
            await refused(
                waits.backend.signals.deliver_signal(execution_id, waitpoint_id, token, "go"),
                "invalid_secret",
            )
    await engine.backend.transport.call("DEL", store)
    for execution_id, waitpoint_id in targets:
        await refused(
            waits.backend.signals.deliver_signal(execution_id, waitpoint_id, "nonsense", "go"),
            "invalid_token",
        )
        await refused(
            waits.backend.signals.deliver_signal(
                execution_id, waitpoint_id, "k2:" + "0" * 40, "go"
            ),
            "hmac_secret_not_initialized",
        )


async def test_a_failed_check_of_the_token_is_stamped_and_nothing_else(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id = parked.handle.execution_id
    before = await engine.dump()
    await engine.freeze(await engine.now())
    await refused(
        waits.backend.signals.deliver_signal(
            execution_id, parked.details.waitpoint_id, "bad", "go"
        ),
        "invalid_token",
    )
    stamp = (await record(engine, execution_id))["last_hmac_validation_failed_at"]
    assert stamp == str(await engine.now())
    after = await engine.dump()
    core = f"ff:exec:{execution_id.tag}:{execution_id}:core".encode()
    after[core].pop(b"last_hmac_validation_failed_at")
    assert after == before


async def test_failed_checks_are_stamped_at_most_once_per_second(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    began = await engine.now()
    for passed, stamp in ((0, 0), (999, 0), (1000, 1000), (1500, 1000), (2000, 2000)):
        await engine.freeze(began + passed)
        await refused(
            waits.backend.signals.deliver_signal(execution_id, point, "bad", "go"), "invalid_token"
        )
        stored = await record(engine, execution_id)
        assert stored["last_hmac_validation_failed_at"] == str(began + stamp)


@pytest.mark.corrupts
@pytest.mark.parametrize("lost", ["created_at", "waitpoint_key"])
async def test_a_waitpoint_without_what_was_signed(engine: Engine, lost: str) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    key = f"ff:wp:{parked.handle.execution_id.tag}:{parked.details.waitpoint_id}"
    await engine.backend.transport.call("HDEL", key, lost)
    await refused(waits.send(parked), "invalid_token")


@pytest.mark.corrupts
async def test_states_that_cannot_be(engine: Engine) -> None:
    """An active waitpoint outside its suspension never resumes anything."""
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id = parked.handle.execution_id
    key = f"ff:wp:{execution_id.tag}:{parked.details.waitpoint_id}"
    current = f"ff:exec:{execution_id.tag}:{execution_id}:suspension:current"
    await waits.write(key, suspension_id=new_uuid())
    async with untouched(engine):
        await refused(waits.send(parked), "waitpoint_closed")
    await waits.write(key, suspension_id=parked.details.suspension_id, state="expired")
    async with untouched(engine):
        await refused(waits.send(parked), "waitpoint_closed")
    await waits.write(key, state="active")
    condition = (await waits.suspension(execution_id))["resume_condition_json"]
    await engine.backend.transport.call("HDEL", current, "resume_condition_json")
    async with untouched(engine):
        problem = await refused(waits.send(parked), "waitpoint_not_found")
    assert problem.http_status == 409
    await waits.write(current, resume_condition_json="{")
    async with untouched(engine):
        await refused(waits.send(parked), "corruption")
    await waits.write(current, resume_condition_json=condition)
    await waits.send(parked)
    await waits.write(key, state="active")
    async with untouched(engine):
        await refused(waits.send(parked), "target_not_signalable")


@pytest.mark.corrupts
async def test_a_waitpoint_that_was_left_pending_by_an_ended_execution(engine: Engine) -> None:
    """An ending closes a bounded number of them; the rest waits for its own expiry."""
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    await engine.backend.executions.complete(handle)
    await waits.write(f"ff:wp:{handle.execution_id.tag}:{pending.waitpoint_id}", state="pending")
    async with untouched(engine):
        await refused(waits.signal(handle.execution_id, pending), "target_not_signalable")


async def test_how_long_a_key_is_remembered(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Count(n=9, waitpoints=("k",), count_kind=CountKind.DISTINCT_SIGNALS))
    await waits.send(parked, idempotency_key="day")
    await waits.send(parked, idempotency_key="short", dedup_ttl_ms=5000)
    await waits.send(parked, idempotency_key="none", dedup_ttl_ms=0)
    prefix = f"ff:sigdedup:{parked.handle.execution_id.tag}:{parked.details.waitpoint_id}:"
    call = engine.backend.transport.call
    left: Any = await call("PTTL", prefix + "day")
    assert 86_390_000 < left <= 86_400_000
    left = await call("PTTL", prefix + "short")
    assert 0 < left <= 5000
    assert await call("EXISTS", prefix + "none") == 0
    assert (await waits.send(parked, idempotency_key="none")).kind == "accepted"
    assert (await waits.send(parked, idempotency_key="day", dedup_ttl_ms=0)).kind == "accepted"
    await call("DEL", prefix + "short")
    assert (await waits.send(parked, idempotency_key="short")).kind == "accepted"


async def test_without_a_policy_ten_thousand(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id = parked.handle.execution_id
    index = f"ff:exec:{execution_id.tag}:{execution_id}:signals"
    many = [part for i in range(9_999) for part in (1, f"x{i}")]
    await engine.backend.transport.call("ZADD", index, *many)
    await waits.send(parked, "noise")
    await refused(waits.send(parked), "signal_limit_exceeded")
    await engine.backend.transport.call("DEL", index)


async def test_waitpoints_of_one_suspension_have_their_own_tokens(engine: Engine) -> None:
    waits = await Waits.open(engine)
    bindings = [FreshWaitpoint(new_uuid(), key) for key in "abc"]
    parked = await waits.park(AllOf(tuple(Single(key) for key in "abc")), waitpoints=bindings)
    first, second, _ = parked.details.waitpoints
    with pytest.raises(EngineError, match="invalid_token"):
        await waits.backend.signals.deliver_signal(
            parked.handle.execution_id, first.waitpoint_id, second.waitpoint_token, "x"
        )
    for at, effect in enumerate(["appended_to_waitpoint"] * 2 + ["resume_condition_satisfied"]):
        assert await waits.effect(parked, "x", at=at) == effect
    assert list(await indexes(engine, parked.handle.execution_id)) == [f"lane:{LANE}:eligible"]
