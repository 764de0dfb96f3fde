"""Suspending: what it writes, what it refuses and in which order, and its idempotency key."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import (
    AllOf,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    all_of_waitpoints,
)
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.suspension import (
    FreshWaitpoint,
    ResumePolicy,
    Suspended,
    UsePending,
)
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import StateVector
from tests.engine.probes import fields, freeze, placed, refused, running, untouched, write
from tests.support.engine import LANE, TTL, Engine
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
    info = await engine.backend.read_execution_info(execution_id)
    assert info.public_state == "suspended"
    assert info.state_vector.blocking_reason == "waiting_for_callback"
    assert info.blocking_detail.endswith("awaiting waiting_for_callback")
    why = await engine.backend.explain_execution(execution_id)
    assert why.waitpoints == (parked.details.waitpoint_id,)
    assert why.blocking_reason == "waiting_for_callback"
    described = await engine.backend.describe_execution(execution_id)
    assert described is not None
    assert described.current_waitpoint == parked.details.waitpoint_id
    assert described.current_lease is None
    assert described.current_attempt is not None
    assert described.current_attempt.attempt_id == parked.handle.attempt_id
    (attempt,) = await engine.backend.read_attempts(execution_id)
    assert attempt.attempt_state == "suspended"
    assert attempt.suspension_id == parked.details.suspension_id
    assert attempt.suspended_at is not None
    await waits.send(parked)
    described = await engine.backend.describe_execution(execution_id)
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
        await engine.backend.cancel_execution(execution_id)


# --- refusals before the engine is asked --------------------------------------------------------


async def test_a_suspended_handle_comes_first(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await refused(
        "already_suspended", engine.backend.suspend(parked.handle, condition=GO, waitpoints=[])
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
        ({"condition": GO, "timeout_at": 0}, "timeout_at"),
        ({"condition": GO, "timeout_at": 2**53}, "timeout_at"),
        ({"condition": GO, "timeout_at": 1.5}, "timeout_at"),
        ({"condition": GO, "resume_policy": ResumePolicy(resume_target="x")}, "resume_policy"),
        ({"condition": GO, "resume_policy": ResumePolicy(resume_delay_ms=-1)}, "resume_delay_ms"),
        ({"condition": GO, "idempotency_key": "x" * 1025}, "idempotency_key"),
        ({"condition": GO, "reason_code": "\ud800"}, "reason_code"),
    ]
    async with untouched(engine):
        for options, detail in cases:
            problem = await refused("invalid_input", waits.backend.suspend(handle, **options))
            assert detail in problem.detail, (problem.detail, detail)


async def test_a_time_is_past_by_the_engines_clock(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(lane="later")
    now = await engine.now()
    await freeze(engine, now)
    await refused(
        "invalid_input",
        waits.backend.suspend(handle, condition=GO, timeout_at=now - 600_001),
    )
    parked = await waits.park(handle=handle, timeout_at=now - 600_000)
    assert await waits.expire(parked.handle.execution_id) == "fail"
    await engine.advance(86_400_000)
    handle = await engine.running()
    problem = await refused(
        "invalid_input", waits.backend.suspend(handle, condition=GO, timeout_at=now)
    )
    assert problem.detail == "timeout_at_in_past"


async def test_a_handle_of_another_backend(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    foreign = msgspec.structs.replace(handle, backend="postgres")
    async with untouched(engine):
        problem = await refused(
            "invalid_input", waits.backend.suspend(foreign, condition=Single("k", ""))
        )
        assert "empty signal name" in problem.detail, "the input is judged first"
        calls = [
            waits.backend.suspend(foreign, condition=GO),
            waits.backend.create_waitpoint(foreign, "k", 1),
            waits.backend.observe_signals(foreign),
            waits.backend.close_waitpoint(handle.execution_id, new_uuid(), handle=foreign),
        ]
        for call in calls:
            await refused("handle_from_other_backend", call)


# --- refusals of the engine, in order -----------------------------------------------------------


def fence(handle: Handle, **changes: Any) -> Fence:
    return msgspec.structs.replace(handle.fence, **changes)


async def test_a_missing_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    ghost = engine.new_id()
    await refused(
        "execution_not_found",
        waits.backend.suspend_by_triple(ghost, Fence("", None, "", None), condition=GO),
    )
    nonsense: Any = "nonsense"
    await refused(
        "invalid_input", waits.backend.suspend_by_triple(nonsense, handle.fence, condition=GO)
    )


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"lease_id": "", "lease_epoch": None, "attempt_id": ""}, "fence_required"),
        ({"lease_id": ""}, "partial_fence_triple"),
        ({"lease_epoch": None}, "partial_fence_triple"),
        ({"attempt_id": ""}, "partial_fence_triple"),
        ({"lease_id": new_uuid()}, "stale_lease"),
        ({"lease_epoch": 2}, "stale_lease"),
        ({"attempt_id": new_uuid()}, "stale_lease"),
        ({"lease_id": new_uuid(), "attempt_index": 7}, "stale_lease"),
        ({"attempt_index": 7}, "invalid_lease_for_suspend"),
    ],
)
async def test_the_fence(engine: Engine, changes: dict[str, Any], code: str) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    async with untouched(engine):
        await refused(
            code,
            waits.backend.suspend_by_triple(
                handle.execution_id, fence(handle, **changes), condition=GO
            ),
        )


async def test_by_triple_the_handle_comes_from_the_record(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(lane="gpu")
    outcome = await waits.backend.suspend_by_triple(
        handle.execution_id, fence(handle, attempt_index=None), condition=GO
    )
    assert isinstance(outcome, Suspended)
    assert outcome.handle.attempt_index == 0
    assert outcome.handle.lane_id == "gpu"
    assert outcome.handle.worker_instance_id == "w-1"
    assert outcome.handle.lease == handle.lease
    assert outcome.handle.kind == "suspended"


@pytest.mark.corrupts
async def test_a_record_without_an_attempt_index(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await write(engine, handle.execution_id, attempt=handle.attempt_id)
    async with untouched(engine):
        await refused(
            "corruption",
            waits.backend.suspend_by_triple(
                handle.execution_id, fence(handle, attempt_index=None), condition=GO
            ),
        )


async def test_not_active_is_told_before_the_rest(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    fresh = msgspec.structs.replace(parked.handle, kind="fresh")
    async with untouched(engine):
        problem = await refused("execution_not_active", waits.backend.suspend(fresh, condition=GO))
    assert problem.details == ("none", "1", "suspended", fresh.attempt_id)


async def test_a_revoked_and_a_lapsed_lease(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await engine.backend.revoke_lease(handle.execution_id)
    await engine.advance(TTL)
    async with untouched(engine):
        await refused("lease_revoked", waits.backend.suspend(handle, condition=GO))
    handle = await engine.running(lane="other")
    await freeze(engine, int((await fields(engine, handle.execution_id))["lease_expires_at"]))
    await refused("lease_expired", waits.backend.suspend(handle, condition=GO))
    vector = await engine.vector(handle.execution_id)
    assert vector.ownership_state == "lease_expired_reclaimable", "the refused call has marked it"


@pytest.mark.corrupts
async def test_an_open_suspension_is_not_replaced(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    key = f"ff:exec:{handle.execution_id.tag}:{handle.execution_id}:suspension:current"
    await waits.write(key, suspension_id=new_uuid())
    async with untouched(engine):
        await refused(
            "already_suspended",
            waits.backend.suspend(handle, condition=GO, waitpoints=[UsePending(new_uuid())]),
        )


async def test_a_closed_suspension_is_replaced(engine: Engine) -> None:
    waits = await Waits.open(engine)
    first = await waits.park()
    await waits.send(first)
    claim = await engine.claim()
    second = await waits.park(Single("other"), handle=claim.handle)
    assert second.details.suspension_id != first.details.suspension_id
    stored = await waits.suspension(claim.execution_id)
    assert stored["suspension_id"] == second.details.suspension_id
    assert "closed_at" not in stored
    members: Any = await engine.backend.transport.call(
        "SMEMBERS", f"ff:exec:{claim.execution_id.tag}:{claim.execution_id}:waitpoints"
    )
    assert len(members) == 2, "the old waitpoint stays in the index"


async def raw_suspend(waits: Waits, handle: Handle, **options: Any) -> Any:
    """The function itself, past the checks of the client."""
    known: dict[str, Any] = {
        "suspension_id": new_uuid(),
        "waitpoints": [["fresh", new_uuid(), "k"]],
        "referenced": ["k"],
        "condition": '{"Single":{"waitpoint_key":"k","matcher":"Wildcard"}}',
        "policy": "{}",
        "reason_code": "x",
        "requested_by": "worker",
        "timeout_behavior": "fail",
        "behavior_given": False,
        "pointer": "",
        "idem": "",
    }
    args = (handle.execution_id, handle.wire, msgspec.msgpack.encode(known | options))
    return await waits.backend.fcall("ff_suspend", handle.execution_id.tag, args, op="suspend")


@pytest.mark.parametrize("extra", [["fresh", "", "x"], ["fresh", "x", ""]])
async def test_a_malformed_extra_binding_is_told_first(engine: Engine, extra: list[str]) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    ghost = msgspec.structs.replace(handle, execution_id=engine.new_id())
    two = [["fresh", new_uuid(), "k"], extra]
    for holder in (handle, ghost):
        await refused(
            "additional_waitpoint_binding_malformed", raw_suspend(waits, holder, waitpoints=two)
        )


async def test_pending_with_extras_is_told_before_the_pending_one_is_looked_up(
    engine: Engine,
) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    bindings = [UsePending(new_uuid()), FreshWaitpoint(new_uuid(), "l")]
    async with untouched(engine):
        await refused(
            "use_pending_with_extras_unsupported",
            waits.backend.suspend(handle, condition=all_of_waitpoints("kl"), waitpoints=bindings),
        )


@pytest.mark.parametrize("state", ["active", "pending"])
async def test_a_fresh_waitpoint_never_takes_a_live_ones_place(engine: Engine, state: str) -> None:
    waits = await Waits.open(engine)
    if state == "active":
        taken = (await waits.park()).details.waitpoint_id
    else:
        holder = await engine.running()
        taken = (await waits.backend.create_waitpoint(holder, "x", 1000)).waitpoint_id
    handle = await engine.running()
    binding = FreshWaitpoint(taken, "k")
    async with untouched(engine):
        await refused(
            "waitpoint_already_exists",
            waits.backend.suspend(handle, condition=GO, waitpoints=[binding]),
        )


async def test_a_closed_waitpoint_may_be_replaced_by_its_own_execution_only(
    engine: Engine,
) -> None:
    waits = await Waits.open(engine)
    first = await waits.park()
    await waits.send(first)
    again = FreshWaitpoint(first.details.waitpoint_id, "k")
    claim = await engine.claim()
    await engine.advance(1)
    second = await waits.park(handle=claim.handle, waitpoints=[again])
    (stored,) = await waits.waitpoints(second)
    assert "signal_count" not in stored
    assert "close_reason" not in stored
    problem = await refused("invalid_token", waits.send(first))
    assert problem.code == "invalid_token", "the old token does not reach the new waitpoint"
    await waits.send(second)
    neighbour = await running(engine)
    async with untouched(engine):
        await refused(
            "waitpoint_already_exists",
            waits.backend.suspend(neighbour, condition=GO, waitpoints=[again]),
        )


async def test_nothing_is_written_without_a_usable_key(engine: Engine) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    store = f"ff:sec:{handle.execution_id.tag}:waitpoint_hmac"

    async def refuses(code: str) -> None:
        async with untouched(engine):
            await refused(code, waits.backend.suspend(handle, condition=GO))
            await refused(code, waits.backend.create_waitpoint(handle, "k", 1000))

    await refuses("hmac_secret_not_initialized")
    await waits.write(store, current_kid="k1")
    await refuses("hmac_secret_not_initialized")
    for broken in ("", "abc", "zz" * 16, "ab cd"):
        await waits.write(store, **{"secret:k1": broken})
        await refuses("invalid_secret")
    await waits.write(store, **{"secret:k1": "ab" * 100})
    assert isinstance(await waits.backend.suspend(handle, condition=GO), Suspended)


# --- idempotency --------------------------------------------------------------------------------


async def test_a_repeat_gives_the_first_answer_verbatim(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    first = await waits.park(handle=handle, idempotency_key="pause-1")
    async with untouched(engine):
        for condition in (GO, Single("other")):
            again = await waits.backend.suspend(
                handle, condition=condition, idempotency_key="pause-1", reason_code="x"
            )
            assert again == first
    await waits.send(first)
    async with untouched(engine):
        again = await waits.backend.suspend(handle, condition=GO, idempotency_key="pause-1")
    assert again == first, "also after the resume"


async def test_the_suspension_id_is_the_key_by_default(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    identity = new_uuid()
    first = await waits.park(handle=handle, suspension_id=identity)
    assert await waits.backend.suspend(handle, condition=GO, suspension_id=identity) == first


async def test_no_key_is_no_dedup(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await waits.park(handle=handle, idempotency_key="")
    await refused(
        "execution_not_active", waits.backend.suspend(handle, condition=GO, idempotency_key="")
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
            waits.backend.suspend(claim.handle, condition=GO, idempotency_key="pause"),
        )
    assert "suspend_idempotency_key_reused" in problem.detail
    forged = msgspec.structs.replace(
        parked.handle, lease=f"{new_uuid()}/{parked.handle.lease_epoch}", kind="fresh"
    )
    problem = await refused(
        "invalid_input", waits.backend.suspend(forged, condition=GO, idempotency_key="pause")
    )
    assert "reused" in problem.detail, "the tokens are for the lease holder alone"
    other = await engine.running(lane="other")
    await waits.park(handle=other, idempotency_key="pause")


async def test_refusals_are_not_remembered(engine: Engine) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    await refused(
        "hmac_secret_not_initialized",
        waits.backend.suspend(handle, condition=GO, idempotency_key="x"),
    )
    await waits.backend.seed_at_boot("ab" * 32)
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
        "PTTL", f"ff:dedup:suspend:{handle.execution_id.tag}:{handle.execution_id}:x"
    )
    assert ttl - 5_000 < left <= ttl


@pytest.mark.corrupts
@pytest.mark.parametrize("damage", ["string", "garbage", "number"])
async def test_an_unreadable_entry_is_a_miss(engine: Engine, damage: str) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    key = f"ff:dedup:suspend:{handle.execution_id.tag}:{handle.execution_id}:x"
    if damage == "string":
        await engine.backend.transport.call("SET", key, "x")
    elif damage == "garbage":
        await waits.write(key, reply=b"\xc1", lease=handle.lease)
    else:
        await waits.write(key, reply=msgspec.msgpack.encode(7), lease=handle.lease)
    first = await waits.park(handle=handle, idempotency_key="x")
    assert await waits.backend.suspend(handle, condition=GO, idempotency_key="x") == first


async def test_strange_keys_and_names(engine: Engine) -> None:
    waits = await Waits.open(engine)
    for key in ("a|b", "ü\x00\x01", '"\\/', "{fp:1}", " "):
        parked = await waits.park(
            Count(n=1, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=(key,), signal_name=key)
        )
        assert parked.details.waitpoint_key == key
        assert await waits.effect(parked, "x") == "signal_ignored_matcher_failed"
        assert await waits.effect(parked, key) == "resume_condition_satisfied"
        await engine.backend.complete((await engine.claim()).handle)


async def test_core_is_named_like_elsewhere(engine: Engine) -> None:
    """Fields that only this concern writes are told by their documented names."""
    waits = await Waits.open(engine)
    parked = await waits.park()
    names = ("current_suspension_id", "current_waitpoint_id", "lifecycle_phase", "waitpointed")
    found = await engine.backend.read_exec_core_fields(parked.handle.execution_id, names)
    assert found["current_suspension_id"] == parked.details.suspension_id
    assert found["current_waitpoint_id"] == parked.details.waitpoint_id
    assert found["lifecycle_phase"] == "suspended"
    assert found["waitpointed"] is None
