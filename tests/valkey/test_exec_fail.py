"""fail_execution: the retry decision, every backoff, lineage, and repeats of lost replies."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import RetryScheduled, TerminalFailed
from flowfabric.core.contracts.leases import Fence
from flowfabric.engine.valkey import keys
from tests.conformance.test_exec_fail import again, policy
from tests.support.engine import LANE, Engine, unchanged
from tests.support.executions import promote
from tests.support.storage import indexes, record


async def test_between_attempts(engine: Engine) -> None:
    handle = await engine.running(policy=policy())
    await engine.backend.executions.progress(handle, 40, "half")
    outcome = await engine.backend.executions.fail(handle, "boom", "transient")
    assert isinstance(outcome, RetryScheduled)
    snapshot = await engine.backend.reads.describe_execution(handle.execution_id)
    assert snapshot is not None
    assert snapshot.current_attempt is None
    assert snapshot.current_lease is None
    assert snapshot.blocking_reason == "waiting_for_retry_backoff"
    fields = await engine.backend.reads.read_exec_core_fields(
        handle.execution_id,
        [
            *("pending_retry_reason", "pending_previous_attempt_index", "current_attempt_index"),
            *("current_attempt_id", "delay_until", "current_lease_epoch", "total_attempt_count"),
        ],
    )
    assert fields == {
        "pending_retry_reason": "boom",
        "pending_previous_attempt_index": "0",
        "current_attempt_index": "0",
        "current_attempt_id": None,
        "delay_until": str(outcome.delay_until),
        "current_lease_epoch": "1",
        "total_attempt_count": "1",
    }
    held = await indexes(engine, handle.execution_id)
    assert held == {f"lane:{LANE}:delayed": outcome.delay_until}
    # Progress belongs to an attempt: the next one starts without.
    await again(engine, handle.execution_id)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert (info.progress_pct, info.progress_message) == (None, None)
    assert "pending_retry_reason" not in await record(engine, handle.execution_id)


@pytest.mark.corrupts
@pytest.mark.parametrize("stored", [b"{", b"[]", b"1", b"\xff"])
async def test_an_unreadable_policy_means_no_retry(engine: Engine, stored: bytes) -> None:

    handle = await engine.running(policy=policy())
    key = keys.policy(handle.execution_id.tag, handle.execution_id)
    await engine.backend.transport.call("SET", key, stored)
    assert isinstance(
        await engine.backend.executions.fail(handle, "x", "transient"), TerminalFailed
    )


async def test_a_repeat_without_the_index_after_pauses(engine: Engine) -> None:
    """A resumed attempt takes more than one lease, so epoch and index drift apart."""
    execution_id = await engine.create(policy=policy())
    fences: list[Fence] = []
    for _ in range(3):
        for _ in range(2):
            await engine.backend.executions.delay((await engine.claim()).handle, 1)
        handle = (await engine.claim()).handle
        own = handle.fence
        fences.append(Fence(own.lease_id, own.lease_epoch, own.attempt_id))
        await engine.backend.executions.fail(handle, "x", "transient")
        await engine.advance(10)
        await promote(engine, execution_id)
    assert [fence.lease_epoch for fence in fences] == [3, 6, 9]

    async def repeat(fence: Fence) -> Any:
        return await unchanged(
            engine,
            lambda: engine.backend.executions.fail_execution(
                execution_id, fence, failure_reason="x", failure_category="transient"
            ),
        )

    indexes = [getattr(await repeat(fence), "next_attempt_index", None) for fence in fences]
    assert indexes == [1, 2, 3]
    # An earlier lease of the same attempt did not fail it, and nobody had these two.
    for fence in (
        Fence(fences[1].lease_id, 5, fences[1].attempt_id),
        Fence(fences[1].lease_id, 6, fences[2].attempt_id),
        Fence(fences[1].lease_id, 12, fences[1].attempt_id),
    ):
        assert (await repeat(fence)).code == "execution_not_active"
