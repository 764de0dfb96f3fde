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
from flowfabric.core.contracts.suspension import Accepted, Duplicate, FreshWaitpoint, Suspended
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import WaitpointToken, new_uuid
from tests.engine.probes import fields, freeze, placed, refused, running, untouched
from tests.support.engine import LANE, Engine
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
        ("created_at", deliver(ghost, point, "", "x", created_at=-1)),
    ]
    for field, call in cases:
        problem = await refused("invalid_input", call)
        assert problem.detail.startswith(field), problem.detail
    await refused("payload_too_large", deliver(ghost, point, "", "x", payload=b"x" * 65_537))
    await refused("missing_token", deliver(ghost, point, "", "x"))
    await refused("missing_token", deliver(ghost, point, WaitpointToken(""), "x"))
    await refused("execution_not_found", deliver(ghost, point, "no token at all", "x"))


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
                code, waits.backend.signals.deliver_signal(execution_id, waitpoint_id, token, "go")
            )
            assert problem.detail == "", "and nothing more is said"
    store = f"ff:sec:{holder.execution_id.tag}:waitpoint_hmac"
    await waits.write(store, **{"secret:k2": "broken"})
    await waits.write(store, **{"secret:k3": "broken", "expires_at:k3": 2**53 - 1})
    for execution_id, waitpoint_id in targets:
        for token in ("k2:" + "0" * 40, "k3:" + "0" * 40):
            await refused(
                "invalid_secret",
                waits.backend.signals.deliver_signal(execution_id, waitpoint_id, token, "go"),
            )
    await engine.backend.transport.call("DEL", store)
    for execution_id, waitpoint_id in targets:
        await refused(
            "invalid_token",
            waits.backend.signals.deliver_signal(execution_id, waitpoint_id, "nonsense", "go"),
        )
        await refused(
            "hmac_secret_not_initialized",
            waits.backend.signals.deliver_signal(
                execution_id, waitpoint_id, "k2:" + "0" * 40, "go"
            ),
        )


async def test_a_failed_check_of_the_token_is_stamped_and_nothing_else(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id = parked.handle.execution_id
    before = await engine.dump()
    await freeze(engine, await engine.now())
    await refused(
        "invalid_token",
        waits.backend.signals.deliver_signal(
            execution_id, parked.details.waitpoint_id, "bad", "go"
        ),
    )
    stamp = (await fields(engine, execution_id))["last_hmac_validation_failed_at"]
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
        await freeze(engine, began + passed)
        await refused(
            "invalid_token", waits.backend.signals.deliver_signal(execution_id, point, "bad", "go")
        )
        stored = await fields(engine, execution_id)
        assert stored["last_hmac_validation_failed_at"] == str(began + stamp)


@pytest.mark.corrupts
@pytest.mark.parametrize("lost", ["created_at", "waitpoint_key"])
async def test_a_waitpoint_without_what_was_signed(engine: Engine, lost: str) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    key = f"ff:wp:{parked.handle.execution_id.tag}:{parked.details.waitpoint_id}"
    await engine.backend.transport.call("HDEL", key, lost)
    await refused("invalid_token", waits.send(parked))


async def test_a_valid_token_of_another_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    mine = await waits.park(handle=await running(engine))
    other = await waits.park(handle=await running(engine))
    async with untouched(engine):
        await refused(
            "invalid_waitpoint_for_execution",
            waits.signal(other.handle.execution_id, mine.details.waitpoints[0], "go"),
        )
        # Another waitpoint's token is no token at all.
    await refused(
        "invalid_token",
        waits.backend.signals.deliver_signal(
            other.handle.execution_id,
            other.details.waitpoint_id,
            mine.details.waitpoint_token,
            "go",
        ),
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
        await refused(code, waits.send(parked))


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
        await refused("waitpoint_closed", waits.send(parked))
    await waits.write(key, suspension_id=parked.details.suspension_id, state="expired")
    async with untouched(engine):
        await refused("waitpoint_closed", waits.send(parked))
    await waits.write(key, state="active")
    condition = (await waits.suspension(execution_id))["resume_condition_json"]
    await engine.backend.transport.call("HDEL", current, "resume_condition_json")
    async with untouched(engine):
        problem = await refused("waitpoint_not_found", waits.send(parked))
    assert problem.http_status == 409
    await waits.write(current, resume_condition_json="{")
    async with untouched(engine):
        await refused("corruption", waits.send(parked))
    await waits.write(current, resume_condition_json=condition)
    await waits.send(parked)
    await waits.write(key, state="active")
    async with untouched(engine):
        await refused("target_not_signalable", waits.send(parked))


@pytest.mark.corrupts
async def test_a_waitpoint_that_was_left_pending_by_an_ended_execution(engine: Engine) -> None:
    """An ending closes a bounded number of them; the rest waits for its own expiry."""
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    await engine.backend.executions.complete(handle)
    await waits.write(f"ff:wp:{handle.execution_id.tag}:{pending.waitpoint_id}", state="pending")
    async with untouched(engine):
        await refused("target_not_signalable", waits.signal(handle.execution_id, pending))


async def test_an_old_token_cannot_touch_a_newer_suspension(engine: Engine) -> None:
    waits = await Waits.open(engine)
    first = await waits.park(Single("k"))
    await waits.backend.suspensions.resume_execution(first.handle.execution_id)
    claim = await engine.claim()
    second = await waits.park(Single("k"), handle=claim.handle)
    async with untouched(engine):
        await refused("waitpoint_closed", waits.send(first))
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
    assert again == Duplicate(first.signal_id)
    await engine.backend.executions.cancel_execution(parked.handle.execution_id)
    assert await waits.send(parked, idempotency_key="x") == Duplicate(first.signal_id)
    late = await situation(waits)
    if situation is not terminal:
        answer = await waits.send(late, idempotency_key="first")
        assert isinstance(answer, Duplicate)


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
        assert await waits.send(one, signal_id=identity) == Duplicate(identity)
        assert await waits.send(one, at=1, signal_id=identity) == Duplicate(identity)
    assert await waits.effect(two, signal_id=identity, payload=b"2") == "resume_condition_satisfied"
    signal = await waits.backend.waitpoints.read_signal(one.handle.execution_id, identity)
    assert signal is not None
    assert signal.payload == b"1", "the other execution's signal is another one"


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


# --- what is labelled JSON ----------------------------------------------------------------------

DEEP = b"[" * 101 + b"]" * 101
NOT_JSON = [b"", b"{not json", b'"\xff"', b"[" * 60_000, b"[" * 30_000 + b"]" * 30_000, b"1e999"]


@pytest.mark.parametrize("payload", [*NOT_JSON, DEEP, b'{"a":' * 101 + b"1" + b"}" * 101])
async def test_a_payload_labelled_json_must_be_json(engine: Engine, payload: bytes) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    async with untouched(engine):
        sent = waits.send(parked, payload=payload, payload_encoding="json")
        problem = await refused("invalid_input", sent)
    assert problem.detail.startswith("payload: ")
    approve = waits.backend.signals.deliver_approval_signal
    where = (parked.handle.execution_id, parked.details.waitpoint_id, "go")
    await refused("invalid_input", approve(*where, payload=payload, payload_encoding="json"))
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
        await refused("signal_limit_exceeded", waits.send(parked))
    # A trusted caller may decide otherwise.
    await waits.send(parked, "noise", max_signals_per_execution=3)
    await refused("signal_limit_exceeded", waits.send(parked, max_signals_per_execution=3))
    await waits.send(parked, "noise", max_signals_per_execution=0)
    # An operator has a reserve.
    approve = waits.backend.signals.deliver_approval_signal
    point = parked.details.waitpoint_id
    for number in range(98):
        await approve(claim.execution_id, point, f"noise {number}")
    await refused("signal_limit_exceeded", approve(claim.execution_id, point, "go"))


async def test_without_a_policy_ten_thousand(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id = parked.handle.execution_id
    index = f"ff:exec:{execution_id.tag}:{execution_id}:signals"
    many = [part for i in range(9_999) for part in (1, f"x{i}")]
    await engine.backend.transport.call("ZADD", index, *many)
    await waits.send(parked, "noise")
    await refused("signal_limit_exceeded", waits.send(parked))
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
    assert list(await placed(engine, parked.handle.execution_id)) == [f"lane:{LANE}:eligible"]
