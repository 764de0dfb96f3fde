"""Delivering signals: order of checks, where a signal goes, what is recorded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.conditions import (
    AllOf,
    Count,
    CountKind,
    Single,
)
from flowfabric.core.contracts.suspension import Accepted, DuplicateSignal, Suspended
from flowfabric.core.ids import WaitpointToken, new_uuid
from tests.support.engine import Engine, refused, untouched
from tests.support.leases import running
from tests.support.suspension import Waits

FIELDS = ("signal_category", "source_type", "source_identity", "correlation_id")


# --- what the input alone tells -----------------------------------------------------------------


async def test_bad_input_is_told_before_any_lookup(engine: Engine) -> None:
    deliver: Any = engine.backend.signals.deliver_signal
    ghost, point = engine.new_id(), new_uuid()
    cases: list[tuple[str, Awaitable[Any]]] = [
        ("signal_name", deliver(ghost, point, "", "")),
        ("signal_name", deliver(ghost, point, "", "x" * 257)),
        ("signal_name", deliver(ghost, point, "", "ü" * 129)),
        ("signal_name", deliver(ghost, point, "", "\ud800")),
        *(
            (field, deliver(ghost, point, "", "x", **{field: "y" * 513}))
            for field in (*FIELDS, "idempotency_key", "payload_encoding")
        ),
        ("target_scope", deliver(ghost, point, "", "x", target_scope="flow")),
        ("waitpoint_id", deliver(ghost, "x", "", "x")),
        ("signal_id", deliver(ghost, point, "", "x", signal_id="x")),
        ("dedup_ttl_ms", deliver(ghost, point, "", "x", dedup_ttl_ms=-1)),
        ("resume_delay_ms", deliver(ghost, point, "", "x", resume_delay_ms=-1)),
        ("max_signals", deliver(ghost, point, "", "x", max_signals_per_execution=-1)),
        ("signal_maxlen", deliver(ghost, point, "", "x", signal_maxlen=0)),
        ("created_at", deliver(ghost, point, "", "x", created_at=2**63)),
    ]
    for field, call in cases:
        problem = await refused(call, "invalid_input")
        assert problem.detail.startswith(field), problem.detail
    await refused(deliver(ghost, point, "", "x", payload=b"x" * 65_537), "payload_too_large")
    await refused(deliver(ghost, point, "", "x"), "missing_token")
    await refused(deliver(ghost, point, WaitpointToken(""), "x"), "missing_token")
    await refused(deliver(ghost, point, "no token at all", "x"), "execution_not_found")


async def test_the_largest_of_everything_is_taken(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Single("k"))
    options: dict[str, Any] = dict.fromkeys((*FIELDS, "idempotency_key"), "ü" * 256)
    payload = bytes(range(256)) * 256
    outcome = await waits.send(parked, "ü" * 128, payload=payload, **options)
    assert isinstance(outcome, Accepted)
    claim = await engine.claim()
    (signal,) = await waits.backend.waitpoints.observe_signals(claim.handle)
    assert signal.payload == payload
    assert signal.signal_name == "ü" * 128
    assert {getattr(signal, name) for name in FIELDS} == {"ü" * 256}


@pytest.mark.parametrize("payload", [None, b"", b"\x00", b"\xff\xfe{}", "ü".encode()])
async def test_payloads_are_kept_byte_by_byte(engine: Engine, payload: bytes | None) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Single("k"))
    await waits.send(parked, "x", payload=payload, payload_encoding="raw")
    claim = await engine.claim()
    (signal,) = await waits.backend.waitpoints.observe_signals(claim.handle)
    assert signal.payload == payload, "empty and absent are different"
    assert signal.payload_encoding == ("" if payload is None else "raw")


async def test_a_valid_token_of_another_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    mine = await waits.park(handle=await running(engine))
    other = await waits.park(handle=await running(engine))
    async with untouched(engine):
        await refused(
            waits.signal(other.handle.execution_id, mine.details.waitpoints[0], "go"),
            "invalid_waitpoint_for_execution",
        )
        # Another waitpoint's token is no token at all.
    await refused(
        waits.backend.signals.deliver_signal(
            other.handle.execution_id,
            other.details.waitpoint_id,
            mine.details.waitpoint_token,
            "go",
        ),
        "invalid_token",
    )


# --- where it goes ------------------------------------------------------------------------------


async def terminal(waits: Waits) -> Suspended:
    parked = await waits.park()
    await waits.backend.executions.cancel_execution(parked.handle.execution_id)
    return parked


async def active(waits: Waits) -> Suspended:
    parked = await waits.park()
    await waits.send(parked, idempotency_key="first")
    await waits.engine.claim()
    return parked


async def runnable(waits: Waits) -> Suspended:
    parked = await waits.park()
    await waits.send(parked, idempotency_key="first")
    return parked


async def suspended_again(waits: Waits) -> Suspended:
    parked = await runnable(waits)
    await waits.park(handle=(await waits.engine.claim()).handle)
    return parked


@pytest.mark.parametrize(
    ("situation", "code"),
    [
        (terminal, "target_not_signalable"),
        (active, "target_not_signalable"),
        (runnable, "target_not_signalable"),
        (suspended_again, "waitpoint_closed"),
    ],
)
async def test_too_late(
    engine: Engine, situation: Callable[[Waits], Awaitable[Suspended]], code: str
) -> None:
    waits = await Waits.open(engine)
    parked = await situation(waits)
    async with untouched(engine):
        await refused(waits.send(parked), code)


async def test_an_old_token_cannot_touch_a_newer_suspension(engine: Engine) -> None:
    waits = await Waits.open(engine)
    first = await waits.park(Single("k"))
    await waits.backend.suspensions.resume_execution(first.handle.execution_id)
    claim = await engine.claim()
    second = await waits.park(Single("k"), handle=claim.handle)
    async with untouched(engine):
        await refused(waits.send(first), "waitpoint_closed")
    assert await waits.effect(second) == "resume_condition_satisfied"


# --- duplicates ---------------------------------------------------------------------------------


@pytest.mark.parametrize("situation", [terminal, active, runnable, suspended_again])
async def test_a_repeat_is_recognised_before_the_state_is_looked_at(
    engine: Engine, situation: Callable[[Waits], Awaitable[Suspended]]
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Count(n=2, waitpoints=("k",), count_kind=CountKind.DISTINCT_SIGNALS))
    first = await waits.send(parked, idempotency_key="x")
    assert isinstance(first, Accepted)
    async with untouched(engine):
        again = await waits.send(parked, "other", idempotency_key="x", payload=b"other")
    assert again == DuplicateSignal(first.signal_id)
    await engine.backend.executions.cancel_execution(parked.handle.execution_id)
    assert await waits.send(parked, idempotency_key="x") == DuplicateSignal(first.signal_id)
    late = await situation(waits)
    if situation is not terminal:
        answer = await waits.send(late, idempotency_key="first")
        assert isinstance(answer, DuplicateSignal)


async def test_a_key_belongs_to_its_waitpoint(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(AllOf((Single("a"), Single("b"), Single("c"))))
    assert await waits.effect(parked, at=0, idempotency_key="x") == "appended_to_waitpoint"
    assert await waits.effect(parked, at=1, idempotency_key="x") == "appended_to_waitpoint"


async def test_a_signal_id_is_taken_once_per_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    one = await waits.park(AllOf((Single("a"), Single("b"))), handle=await running(engine))
    two = await waits.park(Single("a"), handle=await running(engine))
    identity = new_uuid()
    assert await waits.effect(one, signal_id=identity, payload=b"1") == "appended_to_waitpoint"
    async with untouched(engine):
        # Explicitly given: a repeat of the caller, also to another waitpoint.
        assert await waits.send(one, signal_id=identity) == DuplicateSignal(identity)
        assert await waits.send(one, at=1, signal_id=identity) == DuplicateSignal(identity)
    assert await waits.effect(two, signal_id=identity, payload=b"2") == "resume_condition_satisfied"
    signal = await waits.backend.waitpoints.read_signal(one.handle.execution_id, identity)
    assert signal is not None
    assert signal.payload == b"1", "the other execution's signal is another one"


# --- what is labelled JSON ----------------------------------------------------------------------

DEEP = b"[" * 101 + b"]" * 101
NOT_JSON = [b"", b"{not json", b'"\xff"', b"[" * 60_000, b"[" * 30_000 + b"]" * 30_000, b"1e999"]


@pytest.mark.parametrize("payload", [*NOT_JSON, DEEP, b'{"a":' * 101 + b"1" + b"}" * 101])
async def test_a_payload_labelled_json_must_be_json(engine: Engine, payload: bytes) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    async with untouched(engine):
        sent = waits.send(parked, payload=payload, payload_encoding="json")
        problem = await refused(sent, "invalid_input")
    assert problem.detail.startswith("payload: ")
    approve = waits.backend.signals.deliver_approval_signal
    where = (parked.handle.execution_id, parked.details.waitpoint_id, "go")
    await refused(approve(*where, payload=payload, payload_encoding="json"), "invalid_input")
    assert (await waits.send(parked, payload=payload)).kind == "accepted", "without the label"
    (signal,) = await waits.backend.waitpoints.observe_signals((await engine.claim()).handle)
    assert (signal.payload, signal.payload_encoding) == (payload, "")


@pytest.mark.parametrize("payload", [b"1", b"[" * 100 + b"]" * 100, b"[" + b"[]," * 5000 + b"[]]"])
@pytest.mark.parametrize("label", ["json", None])
async def test_json_is_labelled(engine: Engine, payload: bytes, label: str | None) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await waits.send(parked, payload=payload, payload_encoding=label)
    (signal,) = await waits.backend.waitpoints.observe_signals((await engine.claim()).handle)
    assert (signal.payload, signal.payload_encoding) == (payload, "json")


# --- limits -------------------------------------------------------------------------------------


async def test_the_policy_limits_signals_over_the_whole_life(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(policy={"max_signals_per_execution": 2})
    parked = await waits.park(handle=handle)
    await waits.send(parked, "noise")
    await waits.send(parked, idempotency_key="k")
    claim = await engine.claim()
    parked = await waits.park(handle=claim.handle)
    async with untouched(engine):
        await refused(waits.send(parked), "signal_limit_exceeded")
    # A trusted caller may decide otherwise.
    await waits.send(parked, "noise", max_signals_per_execution=3)
    await refused(waits.send(parked, max_signals_per_execution=3), "signal_limit_exceeded")
    await waits.send(parked, "noise", max_signals_per_execution=0)
    # An operator has a reserve.
    approve = waits.backend.signals.deliver_approval_signal
    point = parked.details.waitpoint_id
    for number in range(98):
        await approve(claim.execution_id, point, f"noise {number}")
    await refused(approve(claim.execution_id, point, "go"), "signal_limit_exceeded")
