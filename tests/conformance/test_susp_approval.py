"""Signals that the engine vouches for, and bridges that compare the token themselves."""

from __future__ import annotations

from typing import Any

from flowfabric.core.conditions import Count, CountKind
from flowfabric.core.contracts.suspension import Accepted, DuplicateSignal, UsePending
from flowfabric.core.ids import new_uuid
from tests.support.engine import Engine, refused, untouched
from tests.support.leases import running
from tests.support.suspension import Waits


async def test_two_operators_are_two_sources(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Count(n=2, waitpoints=("k",), count_kind=CountKind.DISTINCT_SOURCES))
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    effects: list[Any] = []
    for who in ("ann", "ann", "b" * 512):
        outcome = await waits.backend.signals.deliver_approval_signal(
            execution_id, point, "approved", decided_by=who
        )
        effects.append(outcome.effect if isinstance(outcome, Accepted) else "duplicate")
    assert effects == ["appended_to_waitpoint", "duplicate", "resume_condition_satisfied"]


TWO_OPERATORS = Count(n=2, waitpoints=("k",), count_kind=CountKind.DISTINCT_OPERATORS)


async def test_one_token_is_not_two_people(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(TWO_OPERATORS)
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    async with untouched(engine):
        problem = await refused(
            waits.send(parked, source_type="operator", source_identity="ann"), "invalid_input"
        )
        assert "source_type" in problem.detail
    for kind in ("external", "Operator", "operator ", ""):
        for who in ("ann", "bob"):
            effect = await waits.effect(parked, source_type=kind, source_identity=who)
            assert effect == "signal_ignored_matcher_failed"
    effects: list[Any] = []
    for who in ("ann", "bob"):
        outcome = await waits.backend.signals.deliver_approval_signal(
            execution_id, point, "go", decided_by=who
        )
        effects.append(outcome.effect if isinstance(outcome, Accepted) else "duplicate")
    assert effects == ["appended_to_waitpoint", "resume_condition_satisfied"]
    observed = await waits.backend.waitpoints.observe_signals((await engine.claim()).handle)
    assert [signal.source_identity for signal in observed] == ["ann", "bob"]


async def test_early_answers_of_a_token_holder_are_not_operators(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    for who in ("ann", "bob"):
        await waits.signal(handle.execution_id, pending, source_identity=who)
    await waits.backend.signals.deliver_approval_signal(
        handle.execution_id, pending.waitpoint_id, "go", decided_by="ann"
    )
    bound = [UsePending(pending.waitpoint_id)]
    parked = await waits.park(TWO_OPERATORS, handle=handle, waitpoints=bound)
    outcome = await waits.backend.signals.deliver_approval_signal(
        parked.handle.execution_id, pending.waitpoint_id, "go", decided_by="bob"
    )
    assert isinstance(outcome, Accepted)
    assert outcome.resumed


async def test_a_token_holder_cannot_use_up_the_key_of_an_approval(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(TWO_OPERATORS)
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    for key in ("approval:go:ann", f"approval:{point}:approval:go:ann", f"{point}:approval:go:ann"):
        assert (await waits.send(parked, idempotency_key=key)).kind == "accepted"
    outcome = await waits.backend.signals.deliver_approval_signal(
        execution_id, point, "go", decided_by="ann"
    )
    assert isinstance(outcome, Accepted), outcome
    assert outcome.effect == "appended_to_waitpoint"
    repeated = await waits.backend.signals.deliver_approval_signal(
        execution_id, point, "go", decided_by="ann"
    )
    assert repeated == DuplicateSignal(outcome.signal_id)


async def test_a_token_holder_cannot_use_up_the_room_for_an_approval(engine: Engine) -> None:
    waits = await Waits.open(engine)
    approve = waits.backend.signals.deliver_approval_signal
    limited = await engine.running(policy={"max_signals_per_execution": 3})
    parked = await waits.park(TWO_OPERATORS, handle=limited)
    for _ in range(3):
        await waits.send(parked, "noise")
    await refused(waits.send(parked, "noise"), "signal_limit_exceeded")
    for who in ("ann", "bob"):
        await approve(limited.execution_id, parked.details.waitpoint_id, "go", decided_by=who)
    assert (await engine.claim()).execution_id == limited.execution_id

    early = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(early, "k", 60_000)
    for _ in range(64):
        await waits.signal(early.execution_id, pending, "noise", payload=b"x" * 65_536)
    for _ in range(1000 - 64):
        await waits.signal(early.execution_id, pending, "noise")
    await refused(waits.signal(early.execution_id, pending), "signal_limit_exceeded")
    await approve(early.execution_id, pending.waitpoint_id, "go", payload=b"x" * 65_536)


async def test_a_token_holder_cannot_push_out_an_approval(engine: Engine) -> None:
    """A handler that starts again judges by the signals that the waitpoint lists."""
    waits = await Waits.open(engine)
    parked = await waits.park(TWO_OPERATORS)
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    approve = waits.backend.signals.deliver_approval_signal
    await approve(execution_id, point, "go", decided_by="ann")
    for _ in range(5):
        await waits.send(parked, "noise", signal_maxlen=3)
    await approve(execution_id, point, "go", decided_by="bob", maxlen=3)
    (wait,) = await waits.backend.waitpoints.read_waits(execution_id, "k")
    told = await waits.backend.waitpoints.read_wait_signals(execution_id, wait)
    assert [signal.source_identity for signal in told] == ["ann", "", "", "bob"]


async def test_approvals_refused(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(lane="gpu")
    parked = await waits.park(handle=handle)
    other = await waits.park(handle=await running(engine, lane="gpu"))
    execution_id, point = handle.execution_id, parked.details.waitpoint_id
    approve = waits.backend.signals.deliver_approval_signal
    async with untouched(engine):
        await refused(approve(engine.new_id(), point, "x", lane_id="cpu"), "execution_not_found")
        await refused(approve(execution_id, new_uuid(), "x", lane_id="cpu"), "waitpoint_not_found")
        await refused(approve(execution_id, other.details.waitpoint_id, "x"), "waitpoint_not_found")
        problem = await refused(approve(execution_id, point, "x", lane_id="cpu"), "invalid_input")
        assert "lane_mismatch" in problem.detail
        await refused(approve(execution_id, point, ""), "invalid_input")
        await refused(approve(execution_id, "x", "x"), "invalid_input")
        await refused(
            approve(execution_id, point, "x", idempotency_suffix="x" * 513), "invalid_input"
        )
        await refused(approve(execution_id, point, "x", payload=b"x" * 65_537), "payload_too_large")
    await approve(execution_id, point, "go", lane_id="gpu")
    await refused(approve(execution_id, point, "again"), "target_not_signalable")


async def test_an_approval_outlives_the_key(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await waits.backend.secrets.rotate_waitpoint_hmac_secret_all("k2", "cd" * 32, 0)
    await engine.advance(1)
    await refused(waits.send(parked), "token_expired")
    outcome = await waits.backend.signals.deliver_approval_signal(
        parked.handle.execution_id, parked.details.waitpoint_id, "go"
    )
    assert isinstance(outcome, Accepted)
    assert outcome.resumed


async def test_a_bridge_compares_and_delivers(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    deliver = waits.backend.signals.verify_and_deliver
    async with untouched(engine):
        await refused(deliver(execution_id, new_uuid(), "x", "go"), "waitpoint_token_not_found")
        for wrong in ("", "ü", "\ud800", "k1:" + "0" * 40):
            await refused(deliver(execution_id, point, wrong, "go"), "invalid_token")
    outcome = await deliver(execution_id, point, parked.details.waitpoint_token, "go", payload=b"x")
    assert isinstance(outcome, Accepted)
    assert outcome.resumed
    await refused(
        deliver(execution_id, point, parked.details.waitpoint_token, "go"),
        "waitpoint_token_not_found",
    )
