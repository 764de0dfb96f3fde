"""Suspending: what it writes, what it refuses and in which order, and its idempotency key."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import (
    AllOf,
    Condition,
    Count,
    OperatorOnly,
    Single,
    TimeoutOnly,
    all_of_waitpoints,
)
from flowfabric.core.contracts.suspension import (
    FreshWaitpoint,
    ResumePolicy,
    UsePending,
)
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import StateVector
from tests.engine.probes import fields, freeze, placed, refused, untouched
from tests.support.engine import LANE, Engine
from tests.support.suspension import GO, Waits

HOUR = 3_600_000
SENTINEL = 9_999_999_999_999


# --- effects ------------------------------------------------------------------------------------


async def test_a_suspended_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": HOUR}})
    parked = await waits.park(handle=handle, reason_code="waiting_for_approval")
    execution_id, details = handle.execution_id, parked.details
    vector = await engine.vector(execution_id)
    assert vector.code == "puna" + "ni"
    stored = await fields(engine, execution_id)
    assert stored["current_suspension_id"] == details.suspension_id
    assert stored["current_waitpoint_id"] == details.waitpoint_id
    assert stored["blocking_detail"] == (
        f"suspended: waitpoint {details.waitpoint_id} awaiting waiting_for_approval"
    )
    assert stored["lease"] == handle.lease, "the epoch is kept"
    assert stored["attempt"] == handle.attempt
    assert await placed(engine, execution_id) == {f"lane:{LANE}:suspended": SENTINEL}
    assert parked.handle == msgspec.structs.replace(handle, kind="suspended")
    (event,) = [e for e in await engine.events(execution_id) if e.type == "released"]
    assert event.fields["reason"] == "suspend"
    assert event.fields["suspension_id"] == details.suspension_id
    assert event.fields["lease_epoch"] == handle.lease_epoch


async def test_what_people_see_of_it(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(reason_code="waiting_for_callback")
    execution_id = parked.handle.execution_id
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.public_state == "suspended"
    assert info.state_vector.blocking_reason == "waiting_for_callback"
    assert info.blocking_detail.endswith("awaiting waiting_for_callback")
    why = await engine.backend.reads.explain_execution(execution_id)
    assert why.waitpoints == (parked.details.waitpoint_id,)
    assert why.blocking_reason == "waiting_for_callback"
    described = await engine.backend.reads.describe_execution(execution_id)
    assert described is not None
    assert described.current_waitpoint == parked.details.waitpoint_id
    assert described.current_lease is None
    assert described.current_attempt is not None
    assert described.current_attempt.attempt_id == parked.handle.attempt_id
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert attempt.attempt_state == "suspended"
    assert attempt.suspension_id == parked.details.suspension_id
    assert attempt.suspended_at is not None
    await waits.send(parked)
    described = await engine.backend.reads.describe_execution(execution_id)
    assert described is not None
    assert described.current_waitpoint is None


async def test_stored_waitpoints_and_suspension(engine: Engine) -> None:
    waits = await Waits.open(engine)
    timeout = await engine.now() + HOUR
    await freeze(engine, timeout - HOUR)
    policy = ResumePolicy(consume_matched_signals=False, resume_delay_ms=5)
    parked = await waits.park(
        all_of_waitpoints(["a", "b"]),
        timeout_at=timeout,
        timeout_behavior="escalate",
        requested_by="operator",
        resume_policy=policy,
        continuation_metadata_pointer="s3://x",
    )
    execution_id = parked.handle.execution_id
    for key, waitpoint in zip("ab", await waits.waitpoints(parked), strict=True):
        token = waitpoint.pop("waitpoint_token")
        assert waitpoint == {
            "execution_id": execution_id,
            "attempt_index": "0",
            "suspension_id": parked.details.suspension_id,
            "waitpoint_key": key,
            "state": "active",
            "created_at": str(timeout - HOUR),
            "activated_at": str(timeout - HOUR),
            "expires_at": str(timeout),
        }
        assert token.startswith("k1:")
    stored = await waits.suspension(execution_id)
    assert stored["timeout_at"] == str(timeout)
    assert stored["timeout_behavior"] == "escalate"
    assert stored["requested_by"] == "operator"
    assert stored["continuation_metadata_pointer"] == "s3://x"
    assert msgspec.json.decode(stored["resume_policy_json"], type=ResumePolicy) == policy
    assert await placed(engine, execution_id) == {
        f"lane:{LANE}:suspended": timeout,
        "suspension_timeout": timeout,
    }
    tokens = {w.waitpoint_token.reveal() for w in parked.details.waitpoints}
    assert len(tokens) == 2, "each waitpoint has its own token"
    extra = parked.details.additional_waitpoints
    assert [w.waitpoint_key for w in extra] == ["b"]


@pytest.mark.parametrize(
    ("reason_code", "blocking"),
    [
        ("waiting_for_signal", "waiting_for_signal"),
        ("step_boundary", "waiting_for_signal"),
        ("whatever", "waiting_for_signal"),
        ("waiting_for_approval", "waiting_for_approval"),
        ("waiting_for_callback", "waiting_for_callback"),
        ("waiting_for_tool_result", "waiting_for_tool_result"),
        ("waiting_for_operator_review", "paused_by_operator"),
        ("manual_pause", "paused_by_operator"),
        ("paused_by_policy", "paused_by_policy"),
        ("paused_by_budget", "waiting_for_budget"),
    ],
)
async def test_reasons(engine: Engine, reason_code: str, blocking: str) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(reason_code=reason_code)
    vector = await engine.vector(parked.handle.execution_id)
    assert vector.blocking_reason == blocking
    assert StateVector.from_code(vector.code) == vector


async def test_without_bindings_each_key_gets_its_waitpoint(engine: Engine) -> None:
    waits = await Waits.open(engine)
    tree = AllOf((Single("b"), Count(n=1, waitpoints=("a", "b")), Single("c")))
    parked = await waits.park(tree)
    assert [w.waitpoint_key for w in parked.details.waitpoints] == ["b", "a", "c"]
    alone = await waits.park(OperatorOnly(), waitpoints=[FreshWaitpoint(new_uuid())])
    assert alone.details.waitpoint_key == f"wpk:{alone.details.waitpoint_id}"


async def test_the_policy_gives_the_timeout_that_suspend_leaves_out(engine: Engine) -> None:
    waits = await Waits.open(engine)
    policy = {"suspension_policy": {"default_timeout_ms": 5000, "timeout_behavior": "cancel"}}
    handle = await engine.running(policy=policy)
    await freeze(engine, await engine.now())
    now = await engine.now()
    parked = await waits.park(handle=handle)
    stored = await waits.suspension(handle.execution_id)
    assert (stored["timeout_at"], stored["timeout_behavior"]) == (str(now + 5000), "cancel")
    (waitpoint,) = await waits.waitpoints(parked)
    assert waitpoint["expires_at"] == str(now + 5000)
    # The caller's own behaviour, or timeout, comes first.
    handle = await engine.running(policy=policy)
    await waits.park(handle=handle, timeout_behavior="escalate")
    stored = await waits.suspension(handle.execution_id)
    assert (stored["timeout_at"], stored["timeout_behavior"]) == (str(now + 5000), "escalate")
    handle = await engine.running(policy=policy)
    await waits.park(handle=handle, timeout_at=now + 9)
    stored = await waits.suspension(handle.execution_id)
    assert (stored["timeout_at"], stored["timeout_behavior"]) == (str(now + 9), "fail")
    for execution_id in (parked.handle.execution_id, handle.execution_id):
        await engine.backend.executions.cancel_execution(execution_id)


# --- refusals before the engine is asked --------------------------------------------------------


async def test_a_suspended_handle_comes_first(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await refused(
        "already_suspended",
        engine.backend.suspensions.suspend(parked.handle, condition=GO, waitpoints=[]),
    )


async def test_details_of_bad_input(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    now = await engine.now()
    past = now - 700_000
    deep: Condition = Single("k")
    for _ in range(5):
        deep = AllOf((deep,))
    one = FreshWaitpoint(new_uuid(), "k")
    many = [FreshWaitpoint(new_uuid(), str(i)) for i in range(65)]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"condition": GO, "waitpoints": []}, "waitpoints_empty"),
        (
            {"condition": GO, "waitpoints": [FreshWaitpoint(new_uuid(), "x")]},
            "waitpoint_key_mismatch",
        ),
        ({"condition": GO, "waitpoints": [FreshWaitpoint(new_uuid())]}, "waitpoint_key_mismatch"),
        (
            {"condition": GO, "waitpoints": [one, FreshWaitpoint(new_uuid(), "")]},
            "additional_waitpoint_binding_empty_key at waitpoints[1]",
        ),
        (
            {"condition": GO, "waitpoints": [one, UsePending(new_uuid())]},
            "additional_waitpoint_binding_must_be_fresh at waitpoints[1]",
        ),
        ({"condition": TimeoutOnly(), "timeout_at": None}, "timeout_only_without_deadline"),
        # A time long past is told before what is wrong with the tree.
        ({"condition": GO, "timeout_at": past}, "timeout_at_in_past"),
        *(({"condition": GO, "timeout_at": at}, "timeout_at_in_past") for at in (0, -1, 1 - 2**53)),
        ({"condition": deep, "timeout_at": past}, "timeout_at_in_past"),
        ({"condition": deep, "timeout_at": now}, "exceeds cap 4 at path"),
        ({"condition": all_of_waitpoints(map(str, range(65)))}, "too_many_waitpoints"),
        (
            {
                "condition": all_of_waitpoints(map(str, range(65))),
                "waitpoints": many,
                "timeout_at": past,
            },
            "timeout_at_in_past",
        ),
        (
            {"condition": all_of_waitpoints("kl"), "waitpoints": [one, one, many[0]]},
            "referenced_waitpoint_key_missing_binding: l",
        ),
        (
            {
                "condition": all_of_waitpoints("kl"),
                "waitpoints": [one, FreshWaitpoint(one.waitpoint_id, "l")],
            },
            f"duplicate_waitpoint_binding: {one.waitpoint_id}",
        ),
        (
            {
                "condition": all_of_waitpoints("kl"),
                "waitpoints": [
                    one,
                    FreshWaitpoint(new_uuid(), "l"),
                    FreshWaitpoint(new_uuid(), "k"),
                ],
            },
            "duplicate_waitpoint_binding: k",
        ),
        ({"condition": Single("ü" * 129)}, "waitpoint_key_too_long"),
        ({"condition": Single("k\ud800")}, "waitpoint_key"),
        ({"condition": GO, "waitpoints": [FreshWaitpoint("x", "k")]}, "waitpoint_id"),
        ({"condition": GO, "suspension_id": "x"}, "suspension_id"),
        ({"condition": GO, "timeout_behavior": "explode"}, "timeout_behavior"),
        ({"condition": GO, "timeout_behavior": ""}, "timeout_behavior"),
        ({"condition": GO, "requested_by": "me"}, "requested_by"),
        ({"condition": GO, "timeout_at": 2**53}, "timeout_at"),
        ({"condition": GO, "timeout_at": 1.5}, "timeout_at"),
        ({"condition": GO, "resume_policy": ResumePolicy(resume_target="x")}, "resume_policy"),
        ({"condition": GO, "resume_policy": ResumePolicy(resume_delay_ms=-1)}, "resume_delay_ms"),
        ({"condition": GO, "idempotency_key": "x" * 1025}, "idempotency_key"),
        ({"condition": GO, "reason_code": "\ud800"}, "reason_code"),
    ]
    async with untouched(engine):
        for options, detail in cases:
            problem = await refused(
                "invalid_input", waits.backend.suspensions.suspend(handle, **options)
            )
            assert detail in problem.detail, (problem.detail, detail)


async def test_a_time_is_past_by_the_engines_clock(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(lane="later")
    now = await engine.now()
    await freeze(engine, now)
    await refused(
        "invalid_input",
        waits.backend.suspensions.suspend(handle, condition=GO, timeout_at=now - 600_001),
    )
    parked = await waits.park(handle=handle, timeout_at=now - 600_000)
    assert await waits.expire(parked.handle.execution_id) == "fail"
    await engine.advance(86_400_000)
    handle = await engine.running()
    problem = await refused(
        "invalid_input", waits.backend.suspensions.suspend(handle, condition=GO, timeout_at=now)
    )
    assert problem.detail == "timeout_at_in_past"


async def test_a_handle_of_another_backend(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    foreign = msgspec.structs.replace(handle, backend="postgres")
    async with untouched(engine):
        problem = await refused(
            "invalid_input", waits.backend.suspensions.suspend(foreign, condition=Single("k", ""))
        )
        assert "empty signal name" in problem.detail, "the input is judged first"
        calls = [
            waits.backend.suspensions.suspend(foreign, condition=GO),
            waits.backend.waitpoints.create_waitpoint(foreign, "k", 1),
            waits.backend.waitpoints.observe_signals(foreign),
            waits.backend.waitpoints.close_waitpoint(
                handle.execution_id, new_uuid(), handle=foreign
            ),
        ]
        for call in calls:
            await refused("handle_from_other_backend", call)
