"""The idempotency key of suspend; strange names."""

from __future__ import annotations

import msgspec

from flowfabric.core.conditions import Count, CountKind, Single
from flowfabric.core.ids import new_uuid
from tests.support.engine import Engine, refused, untouched
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


async def test_a_key_of_another_lease_is_refused(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(idempotency_key="pause")
    await waits.send(parked)
    claim = await engine.claim()
    async with untouched(engine):
        problem = await refused(
            waits.backend.suspensions.suspend(claim.handle, condition=GO, idempotency_key="pause"),
            "invalid_input",
        )
    assert "suspend_idempotency_key_reused" in problem.detail
    forged = msgspec.structs.replace(
        parked.handle, lease=f"{new_uuid()}/{parked.handle.lease_epoch}", kind="fresh"
    )
    problem = await refused(
        waits.backend.suspensions.suspend(forged, condition=GO, idempotency_key="pause"),
        "invalid_input",
    )
    assert "reused" in problem.detail, "the tokens are for the lease holder alone"
    other = await engine.running(lane="other")
    await waits.park(handle=other, idempotency_key="pause")


async def test_refusals_are_not_remembered(engine: Engine) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    await refused(
        waits.backend.suspensions.suspend(handle, condition=GO, idempotency_key="x"),
        "hmac_secret_not_initialized",
    )
    await waits.backend.secrets.seed_at_boot("ab" * 32)
    await waits.park(handle=handle, idempotency_key="x")


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
        waits.backend.suspensions.suspend(handle, condition=GO, idempotency_key="short"),
        "execution_not_active",
    )
