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
)
from flowfabric.core.contracts.suspension import (
    FreshWaitpoint,
    ResumePolicy,
    UsePending,
)
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import StateVector
from tests.support.engine import Engine, refused, untouched
from tests.support.suspension import GO, Waits, all_of_waitpoints


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


# --- refusals before the engine is asked --------------------------------------------------------


async def test_a_suspended_handle_comes_first(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await refused(
        engine.backend.suspensions.suspend(parked.handle, condition=GO, waitpoints=[]),
        "already_suspended",
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
                waits.backend.suspensions.suspend(handle, **options), "invalid_input"
            )
            assert detail in problem.detail, (problem.detail, detail)


async def test_a_time_is_past_by_the_engines_clock(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(lane="later")
    now = await engine.now()
    await engine.freeze(now)
    await refused(
        waits.backend.suspensions.suspend(handle, condition=GO, timeout_at=now - 600_001),
        "invalid_input",
    )
    parked = await waits.park(handle=handle, timeout_at=now - 600_000)
    assert await waits.expire(parked.handle.execution_id) == "fail"
    await engine.advance(86_400_000)
    handle = await engine.running()
    problem = await refused(
        waits.backend.suspensions.suspend(handle, condition=GO, timeout_at=now), "invalid_input"
    )
    assert problem.detail == "timeout_at_in_past"


async def test_a_handle_of_another_backend(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    foreign = msgspec.structs.replace(handle, backend="postgres")
    async with untouched(engine):
        problem = await refused(
            waits.backend.suspensions.suspend(foreign, condition=Single("k", "")), "invalid_input"
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
            await refused(call, "handle_from_other_backend")
