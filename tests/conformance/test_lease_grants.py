"""Grants: who gets one, what it contains, how it ends (03 §4, §5, D10)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import ClaimGrant
from flowfabric.core.errors import ConfigError
from flowfabric.core.ids import ExecutionId
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import OTHER, WORKER, grant, lapsed, paused, reclaim_grant


async def test_two_grants_have_different_tokens(engine: Engine) -> None:
    first = await grant(engine, await engine.create())
    second = await grant(engine, await engine.create())
    assert first.grant_key.rpartition("#")[2] != second.grant_key.rpartition("#")[2]


@pytest.mark.parametrize("ttl", [0, -1, 1.5, "5000", True, None, 2**60])
async def test_a_grant_needs_a_positive_number_of_ms(engine: Engine, ttl: object) -> None:
    # An unknown execution: the number is checked first.
    async with untouched(engine):
        await refused(grant(engine, engine.new_id(), grant_ttl_ms=ttl), "invalid_input")


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([f"t{i}" for i in range(257)], "too_many_tokens"),
        (["a" * 4097], "too_many_bytes"),
        (["a,b"], "comma_in_token"),
        ([""], "empty_token"),
        ([5], "non_string_token"),
        ("gpu", "not_array"),
        (None, "not_array"),
    ],
)
async def test_the_workers_own_list_is_looked_at_last(
    engine: Engine, tokens: Any, problem: str
) -> None:
    async def attempt(execution_id: ExecutionId, **options: Any) -> object:
        return await grant(engine, execution_id, worker_capabilities=tokens, **options)

    execution_id = await engine.create()
    async with untouched(engine):
        await refused(attempt(engine.new_id(), grant_ttl_ms=0), "invalid_input")
        await refused(attempt(engine.new_id()), "execution_not_found")
        error = await refused(attempt(execution_id), "invalid_capabilities")
        assert error.detail == f"worker:{problem}"
    await engine.backend.executions.cancel_execution(execution_id)
    await refused(attempt(execution_id), "execution_not_eligible")
    lost = (await lapsed(engine)).execution_id
    async with untouched(engine):
        ask = engine.backend.claims.issue_reclaim_grant
        missing = ask(engine.new_id(), **WORKER, worker_capabilities=tokens)
        await refused(missing, "execution_not_found")
        error = await refused(
            ask(lost, **WORKER, worker_capabilities=tokens), "invalid_capabilities"
        )
        assert error.detail == f"worker:{problem}"


async def test_capabilities_are_case_sensitive(engine: Engine) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    execution_id = await engine.create(policy=policy)
    await refused(grant(engine, execution_id, worker_capabilities=["GPU"]), "capability_mismatch")


@pytest.mark.parametrize("lane_id", ["other", "default "])
async def test_the_lane_must_be_the_executions_own(engine: Engine, lane_id: str) -> None:
    execution_id = await engine.create()
    async with untouched(engine):
        error = await refused(grant(engine, execution_id, lane_id=lane_id), "invalid_input")
    assert "lane_mismatch" in error.detail


async def test_one_slot_for_claim_grants(engine: Engine) -> None:
    execution_id = await engine.create()
    await grant(engine, execution_id)
    async with untouched(engine):
        for worker in (WORKER, OTHER):
            await refused(grant(engine, execution_id, **worker), "grant_already_exists")
        await refused(
            engine.backend.claims.issue_grant_and_claim(execution_id, lease_duration_ms=TTL),
            "grant_already_exists",
        )


async def test_one_slot_for_a_paused_execution(engine: Engine) -> None:
    execution_id = (await paused(engine)).execution_id
    await grant(engine, execution_id)
    async with untouched(engine):
        await refused(grant(engine, execution_id, **OTHER), "grant_already_exists")
        await refused(
            engine.backend.claims.issue_grant_and_claim(execution_id, lease_duration_ms=TTL),
            "grant_already_exists",
        )


async def test_one_slot_for_reclaim_grants(engine: Engine) -> None:
    execution_id = (await lapsed(engine)).execution_id
    await reclaim_grant(engine, execution_id)
    async with untouched(engine):
        for worker in (WORKER, OTHER):
            await refused(
                engine.backend.claims.issue_reclaim_grant(execution_id, **worker),
                "grant_already_exists",
            )


async def test_a_grant_is_valid_through_its_last_millisecond(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.freeze(await engine.now())
    held = await grant(engine, execution_id, grant_ttl_ms=5000)
    await engine.freeze(held.expires_at_ms)
    await refused(grant(engine, execution_id), "grant_already_exists")
    claim = await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
    assert claim.execution_id == execution_id


async def test_a_lapsed_grant_is_replaced_without_a_claim_in_between(engine: Engine) -> None:
    execution_id = await engine.create()
    old = await grant(engine, execution_id)
    await engine.advance(5001)
    new = await grant(engine, execution_id, **OTHER)
    await refused(
        engine.backend.claims.claim_execution(old, **WORKER, lease_ttl_ms=TTL),
        "invalid_claim_grant",
    )
    assert (
        await engine.backend.claims.claim_execution(new, **OTHER, lease_ttl_ms=TTL)
    ).attempt_index == 0


@pytest.mark.parametrize("partition_key", ["", "fp:7", "{fp:x}", "{fp:7", "{fp:70000}"])
async def test_a_malformed_partition_key_is_refused_locally(
    engine: Engine, partition_key: str
) -> None:
    held = ClaimGrant(
        execution_id=engine.new_id(), partition_key=partition_key, grant_key="k", expires_at_ms=1
    )
    with pytest.raises(ConfigError) as caught:
        await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
    assert caught.value.field == "partition_key"


async def test_another_executions_partition_is_refused_locally(engine: Engine) -> None:
    execution_id = engine.new_id()
    other = next(f"{{fp:{index}}}" for index in range(2) if f"{{fp:{index}}}" != execution_id.tag)
    held = ClaimGrant(
        execution_id=execution_id, partition_key=other, grant_key="k", expires_at_ms=1
    )
    with pytest.raises(ConfigError):
        await engine.backend.claims.claim_resumed_execution(held, **WORKER, lease_ttl_ms=TTL)


@pytest.mark.parametrize(
    "worker",
    [
        {"worker_id": "", "worker_instance_id": "i"},
        {"worker_id": "a b", "worker_instance_id": "i"},
        {"worker_id": "w", "worker_instance_id": ""},
        {"worker_id": "w", "worker_instance_id": "i\n"},
        {"worker_id": "w" * 257, "worker_instance_id": "i"},
    ],
)
async def test_identities_are_checked_first(engine: Engine, worker: dict[str, Any]) -> None:
    unknown: ExecutionId = engine.new_id()
    await refused(engine.backend.claims.issue_claim_grant(unknown, **worker), "invalid_input")
    await refused(engine.backend.claims.issue_reclaim_grant(unknown, **worker), "invalid_input")


@pytest.mark.parametrize("state", ["paused", "disabled"])
async def test_a_lane_that_hands_out_nothing_gives_no_grant(engine: Engine, state: str) -> None:
    waiting = await engine.create()
    held = await grant(engine, waiting)
    other = await engine.create()
    await engine.backend.lanes.set_lane_state("default", state)
    async with untouched(engine):
        await refused(grant(engine, other), "execution_not_eligible")
        await refused(
            engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
            "execution_not_leaseable",
        )
    await engine.backend.lanes.set_lane_state("default", "draining")
    await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
    await grant(engine, other)
