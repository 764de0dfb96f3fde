"""Claims by grant: fresh, resumed and the operator's fused form (03 §6, §7, §8, D1 to D5)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.capabilities import log_digest
from flowfabric.core.contracts.leases import Claim, ResumeGrant
from flowfabric.core.ids import ExecutionId
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import OTHER, WORKER, a_grant, fused, grant, paused

RETRY = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 10}}}


async def claim_fresh(engine: Engine, execution_id: ExecutionId, **options: Any) -> Claim:
    arguments: dict[str, Any] = WORKER | {"lease_ttl_ms": TTL} | options
    return await engine.backend.claims.claim_execution(
        await grant(engine, execution_id), **arguments
    )


async def test_a_bare_claim_has_the_defaults(engine: Engine) -> None:
    claim = await claim_fresh(engine, await engine.create())
    assert (claim.input_payload, claim.payload_encoding, claim.tags) == (b"", "", {})
    assert (claim.namespace, claim.attempt_timeout_ms) == ("default", None)


async def test_minted_ids_differ(engine: Engine) -> None:
    one = await claim_fresh(engine, await engine.create())
    two = await claim_fresh(engine, await engine.create())
    ids = {one.handle.lease_id, two.handle.lease_id, one.handle.attempt_id, two.handle.attempt_id}
    assert len(ids) == 4


async def test_a_retry_attempt_has_its_lineage(engine: Engine) -> None:
    handle = await engine.running(policy=RETRY)
    execution_id = handle.execution_id
    started = (await engine.backend.reads.read_execution_info(execution_id)).started_at
    await engine.backend.executions.progress(handle, 40, "half")
    await engine.backend.executions.fail(handle, "boom", "transient")
    await engine.advance(11)
    assert await engine.backend.upkeep.promote_delayed(
        execution_id.tag, "default", [execution_id]
    ) == ["promoted"]
    claim = await claim_fresh(engine, execution_id, **OTHER | {"worker_id": "w"})
    assert (claim.attempt_type, claim.attempt_index, claim.handle.lease_epoch) == ("retry", 1, 2)
    first, second = await engine.backend.reads.read_attempts(execution_id)
    assert (first.attempt_state, first.failure_reason) == ("ended_failure", "boom")
    assert (first.attempt_id, first.lease_epoch) == (handle.attempt_id, 1)
    assert first.worker_instance_id == "w-1"
    assert (second.attempt_state, second.attempt_type) == ("started", "retry")
    assert (second.retry_reason, second.previous_attempt_index) == ("boom", 0)
    assert second.failure_reason is None
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.started_at == started
    assert (info.progress_pct, info.progress_message) == (None, None)
    assert (info.retry_count, info.total_attempt_count) == (1, 2)


async def test_a_replay_of_an_execution_that_never_ran_is_a_replay(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.backend.executions.replay_execution(execution_id, reason="again")
    await engine.freeze(await engine.now())
    claim = await claim_fresh(engine, execution_id)
    assert (claim.attempt_type, claim.attempt_index) == ("replay", 0)
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert (attempt.attempt_type, attempt.replay_reason) == ("replay", "again")
    assert attempt.previous_attempt_index is None
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.started_at == str(await engine.now())


async def test_an_execution_that_never_ran_can_end_and_be_replayed_repeatedly(
    engine: Engine,
) -> None:
    execution_id = await engine.create()
    for letter in ("f", "p", "p"):
        await engine.backend.executions.cancel_execution(execution_id)
        assert (await engine.vector(execution_id)).code == f"tunnc{letter}"
        await engine.backend.executions.replay_execution(execution_id)
    assert (await claim_fresh(engine, execution_id)).attempt_index == 0


@pytest.mark.parametrize("ttl", [0, -5, "x", 1.5, True, 2**60])
async def test_a_lease_needs_a_positive_number_of_ms(engine: Engine, ttl: Any) -> None:
    unknown = engine.new_id()
    backend = engine.backend
    async with untouched(engine):
        for work in (
            backend.claims.claim_execution(a_grant(unknown), **WORKER, lease_ttl_ms=ttl),
            backend.claims.claim_resumed_execution(a_grant(unknown), **WORKER, lease_ttl_ms=ttl),
            backend.claims.issue_grant_and_claim(unknown, lease_duration_ms=ttl),
        ):
            await refused(work, "invalid_input")


@pytest.mark.parametrize("field", ["lease_id", "attempt_id"])
async def test_given_ids_must_be_uuids(engine: Engine, field: str) -> None:
    ids: dict[str, Any] = {field: "no-uuid"}
    await refused(
        engine.backend.claims.claim_execution(
            a_grant(engine.new_id()), **WORKER, lease_ttl_ms=TTL, **ids
        ),
        "invalid_input",
    )


async def test_a_wrong_lane_is_refused_and_leaves_the_grant(engine: Engine) -> None:
    fresh, resumable = await engine.create(), (await paused(engine, lane="second")).execution_id
    backend = engine.backend
    one, two = await grant(engine, fresh), await grant(engine, resumable)
    async with untouched(engine):
        elsewhere: dict[str, Any] = WORKER | {"lease_ttl_ms": TTL, "lane_id": "x"}
        error = await refused(backend.claims.claim_execution(one, **elsewhere), "invalid_input")
        assert "lane_mismatch" in error.detail
        error = await refused(
            backend.claims.claim_resumed_execution(two, **elsewhere), "invalid_input"
        )
        assert "lane_mismatch" in error.detail
        error = await refused(fused(engine, fresh, lane_id="x"), "invalid_input")
        assert "lane_mismatch" in error.detail
    await backend.claims.claim_execution(one, **WORKER, lease_ttl_ms=TTL, lane_id="default")
    await backend.claims.claim_resumed_execution(two, **WORKER, lease_ttl_ms=TTL, lane_id="second")


async def test_a_resume_grant_is_consumed_on_its_lane(engine: Engine) -> None:
    handle = await paused(engine)
    held = await grant(engine, handle.execution_id)
    resume = ResumeGrant(
        execution_id=held.execution_id,
        partition_key=held.partition_key,
        grant_key=held.grant_key,
        expires_at_ms=held.expires_at_ms,
        lane_id="default",
    )
    claim = await engine.backend.claims.claim_from_resume_grant(resume, **WORKER, lease_ttl_ms=TTL)
    assert claim.handle.kind == "resumed"


async def test_a_paused_lane_resumes_nothing(engine: Engine) -> None:
    held = await grant(engine, (await paused(engine)).execution_id)
    await engine.backend.lanes.set_lane_state("default", "paused")
    async with untouched(engine):
        await refused(
            engine.backend.claims.claim_resumed_execution(held, **WORKER, lease_ttl_ms=TTL),
            "execution_not_leaseable",
        )


async def test_a_grant_that_is_returned_is_free_for_others(engine: Engine) -> None:
    claims = engine.backend.claims
    execution_id = await engine.create()
    held = await grant(engine, execution_id)
    async with untouched(engine):
        await claims.release_grant(a_grant(execution_id))
    await claims.release_grant(held)
    async with untouched(engine):
        await claims.release_grant(held)
    await refused(claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL), "invalid_claim_grant")
    assert [claim.execution_id for claim in await engine.claim_all()] == [execution_id]
    await refused(claims.release_grant(a_grant(engine.new_id())), "execution_not_found")


async def test_a_worker_that_lacks_capabilities_is_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    needs = {"routing_requirements": {"required_capabilities": ["cuda", "gpu"]}}
    execution_id = await engine.create(policy=needs)
    with caplog.at_level("INFO", "flowfabric"):
        await refused(
            engine.backend.claims.issue_claim_grant(
                execution_id, **WORKER, worker_capabilities=["gpu"]
            ),
            "capability_mismatch",
        )
    (record,) = [r for r in caplog.records if getattr(r, "action", "") == "capability_mismatch"]
    assert {
        name: getattr(record, name)
        for name in ("execution_id", "worker_id", "worker_caps_hash", "required")
    } == {
        "execution_id": execution_id,
        "worker_id": "w",
        "worker_caps_hash": log_digest("gpu"),
        "required": "cuda",
    }
