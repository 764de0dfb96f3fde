"""Suspending: what it writes, what it refuses and in which order, and its idempotency key."""

from __future__ import annotations

import msgspec

from flowfabric.core.contracts.suspension import (
    ResumePolicy,
)
from tests.support.engine import LANE, Engine
from tests.support.storage import indexes, record
from tests.support.suspension import Waits, all_of_waitpoints

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
    stored = await record(engine, execution_id)
    assert stored["current_suspension_id"] == details.suspension_id
    assert stored["current_waitpoint_id"] == details.waitpoint_id
    assert stored["blocking_detail"] == (
        f"suspended: waitpoint {details.waitpoint_id} awaiting waiting_for_approval"
    )
    assert stored["lease"] == handle.lease, "the epoch is kept"
    assert stored["attempt"] == handle.attempt
    assert await indexes(engine, execution_id) == {f"lane:{LANE}:suspended": SENTINEL}
    assert parked.handle == msgspec.structs.replace(handle, kind="suspended")
    (event,) = [e for e in await engine.events(execution_id) if e.type == "released"]
    assert event.fields["reason"] == "suspend"
    assert event.fields["suspension_id"] == details.suspension_id
    assert event.fields["lease_epoch"] == handle.lease_epoch


async def test_stored_waitpoints_and_suspension(engine: Engine) -> None:
    waits = await Waits.open(engine)
    timeout = await engine.now() + HOUR
    await engine.freeze(timeout - HOUR)
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
    assert await indexes(engine, execution_id) == {
        f"lane:{LANE}:suspended": timeout,
        "suspension_timeout": timeout,
    }
    tokens = {w.waitpoint_token.reveal() for w in parked.details.waitpoints}
    assert len(tokens) == 2, "each waitpoint has its own token"
    extra = parked.details.waitpoints[1:]
    assert [w.waitpoint_key for w in extra] == ["b"]


async def test_the_policy_gives_the_timeout_that_suspend_leaves_out(engine: Engine) -> None:
    waits = await Waits.open(engine)
    policy = {"suspension_policy": {"default_timeout_ms": 5000, "timeout_behavior": "cancel"}}
    handle = await engine.running(policy=policy)
    await engine.freeze(await engine.now())
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
