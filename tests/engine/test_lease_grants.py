"""Grants: who gets one, what it holds, how it ends (03 §4, §5, D10)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.leases import ClaimGrant
from flowfabric.core.errors import ConfigError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import ExpireReason
from flowfabric.engine.valkey import keys
from tests.engine.probes import (
    OTHER,
    WORKER,
    fields,
    freeze,
    grant,
    grant_fields,
    lapsed,
    lossy,
    paused,
    placed,
    reclaim_grant,
    refused,
    untouched,
    write,
)
from tests.support.engine import TTL, Engine
from tests.support.server import TestServer


async def test_a_grant_reserves_and_moves_nothing(engine: Engine) -> None:
    execution_id = await engine.create()
    record, indexes = await fields(engine, execution_id), await placed(engine, execution_id)
    await freeze(engine, await engine.now())
    held = await grant(engine, execution_id, grant_ttl_ms=700)

    now = await engine.now()
    assert held.expires_at_ms == now + 700
    assert held.partition_key == execution_id.tag
    assert held.grant_key.startswith(keys.grant(execution_id.tag, execution_id) + "#")
    stored = await grant_fields(engine, execution_id)
    assert stored == {
        "worker_id": "w",
        "worker_instance_id": "w-1",
        "lane_id": "default",
        "grant_token": held.grant_key.rpartition("#")[2],
        "created_at": str(now),
        "grant_expires_at": str(now + 700),
    }
    after = await fields(engine, execution_id)
    assert after.pop("grant_expires_at") == str(now + 700)
    assert after == record
    assert (
        await placed(engine, execution_id)
        == indexes
        == {"lane:default:eligible": float(record["created_at"])}
    )
    assert await engine.events(execution_id) == []
    ttl = await engine.backend.transport.call("PTTL", keys.grant(execution_id.tag, execution_id))
    assert isinstance(ttl, int)
    assert 0 < ttl <= 700


async def test_audit_texts_are_stored_verbatim(engine: Engine) -> None:
    execution_id = await engine.create()
    audit = {
        "capability_hash": "c952a6c4",
        "route_snapshot_json": '{"a": [1,  2]}',
        "admission_summary": "budget b ok\n",
    }
    await grant(engine, execution_id, **audit)
    stored = await grant_fields(engine, execution_id)
    assert {name: stored[name] for name in audit} == audit


async def test_two_grants_have_different_tokens(engine: Engine) -> None:
    first = await grant(engine, await engine.create())
    second = await grant(engine, await engine.create())
    assert first.grant_key.rpartition("#")[2] != second.grant_key.rpartition("#")[2]


@pytest.mark.parametrize("ttl", [0, -1, 1.5, "5000", True, None, 2**60])
async def test_a_grant_needs_a_positive_number_of_ms(engine: Engine, ttl: object) -> None:
    # An unknown execution: the number is checked first.
    async with untouched(engine):
        await refused("invalid_input", grant(engine, engine.new_id(), grant_ttl_ms=ttl))


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
        await refused("invalid_input", attempt(engine.new_id(), grant_ttl_ms=0))
        await refused("execution_not_found", attempt(engine.new_id()))
        error = await refused("invalid_capabilities", attempt(execution_id))
        assert error.detail == f"worker:{problem}"
    await engine.backend.executions.cancel_execution(execution_id)
    await refused("execution_not_eligible", attempt(execution_id))
    lost = (await lapsed(engine)).execution_id
    async with untouched(engine):
        ask = engine.backend.claims.issue_reclaim_grant
        missing = ask(engine.new_id(), **WORKER, worker_capabilities=tokens)
        await refused("execution_not_found", missing)
        error = await refused(
            "invalid_capabilities", ask(lost, **WORKER, worker_capabilities=tokens)
        )
        assert error.detail == f"worker:{problem}"


@pytest.mark.corrupts
async def test_check_order_of_a_claim_grant(engine: Engine) -> None:
    """One execution with every fault; each repair uncovers the next refusal."""
    many = ",".join(f"t{i:03}" for i in range(257))
    execution_id = engine.new_id()

    async def attempt(csv: str = many) -> None:
        args = (execution_id, "", "w w-1", csv, 5000, "token", "", "", "", "")
        await engine.backend.calls.fcall("ff_issue_claim_grant", execution_id.tag, args, op="grant")

    await refused("execution_not_found", attempt())
    await engine.create(execution_id=execution_id)
    await grant(engine, execution_id)
    await write(engine, execution_id, required_capabilities=many, state="alnnnr")
    await refused("execution_not_eligible", attempt())
    await write(engine, execution_id, state="ruddnf")
    await refused("execution_not_eligible", attempt())
    await write(engine, execution_id, state="ruewnf")
    await refused("grant_already_exists", attempt())
    await engine.advance(5001)
    await refused("execution_not_in_eligible_set", attempt())
    index = keys.eligible(execution_id.tag, "default", many)
    await engine.backend.transport.call("ZADD", index, 1, execution_id)
    error = await refused("invalid_capabilities", attempt())
    assert error.detail == "required:too_many_tokens"
    await write(engine, execution_id, required_capabilities="a" * 4097)
    index = keys.eligible(execution_id.tag, "default", "a" * 4097)
    await engine.backend.transport.call("ZADD", index, 1, execution_id)
    error = await refused("invalid_capabilities", attempt())
    assert error.detail == "required:too_many_bytes"
    await write(engine, execution_id, required_capabilities="gpu,cuda")
    index = keys.eligible(execution_id.tag, "default", "gpu,cuda")
    await engine.backend.transport.call("ZADD", index, 1, execution_id)
    error = await refused("invalid_capabilities", attempt())
    assert error.detail == "worker:too_many_tokens"
    error = await refused("invalid_capabilities", attempt("b" * 4097))
    assert error.detail == "worker:too_many_bytes"
    await refused("capability_mismatch", attempt("gpu"))
    await attempt("cuda,gpu")


async def test_a_mismatch_names_what_is_missing_and_stamps_one_field(engine: Engine) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["zoo", "gpu", "cuda"]}}
    execution_id = await engine.create(policy=policy)
    before = await engine.dump()
    for _ in range(2):
        await freeze(engine, await engine.now() + 5)
        error = await refused(
            "capability_mismatch", grant(engine, execution_id, worker_capabilities=["gpu"])
        )
        assert error.detail == "cuda,zoo"
        after = await engine.dump()
        core = keys.core(execution_id.tag, execution_id).encode()
        stamp = after[core].pop(b"last_capability_mismatch_at")
        assert int(stamp) == await engine.now()
        assert after == before
    await grant(engine, execution_id, worker_capabilities=["zoo", "gpu", "cuda", "more"])


async def test_capabilities_are_case_sensitive(engine: Engine) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    execution_id = await engine.create(policy=policy)
    await refused("capability_mismatch", grant(engine, execution_id, worker_capabilities=["GPU"]))


@pytest.mark.parametrize("lane_id", ["other", "default "])
async def test_the_lane_must_be_the_executions_own(engine: Engine, lane_id: str) -> None:
    execution_id = await engine.create()
    async with untouched(engine):
        error = await refused("invalid_input", grant(engine, execution_id, lane_id=lane_id))
    assert "lane_mismatch" in error.detail


async def test_one_slot_for_claim_grants(engine: Engine) -> None:
    execution_id = await engine.create()
    await grant(engine, execution_id)
    async with untouched(engine):
        for worker in (WORKER, OTHER):
            await refused("grant_already_exists", grant(engine, execution_id, **worker))
        await refused(
            "grant_already_exists",
            engine.backend.claims.issue_grant_and_claim(execution_id, lease_duration_ms=TTL),
        )


async def test_one_slot_for_a_paused_execution(engine: Engine) -> None:
    execution_id = (await paused(engine)).execution_id
    await grant(engine, execution_id)
    async with untouched(engine):
        await refused("grant_already_exists", grant(engine, execution_id, **OTHER))
        await refused(
            "grant_already_exists",
            engine.backend.claims.issue_grant_and_claim(execution_id, lease_duration_ms=TTL),
        )


async def test_one_slot_for_reclaim_grants(engine: Engine) -> None:
    execution_id = (await lapsed(engine)).execution_id
    await reclaim_grant(engine, execution_id)
    async with untouched(engine):
        for worker in (WORKER, OTHER):
            await refused(
                "grant_already_exists",
                engine.backend.claims.issue_reclaim_grant(execution_id, **worker),
            )


async def test_a_grant_is_valid_through_its_last_millisecond(engine: Engine) -> None:
    execution_id = await engine.create()
    await freeze(engine, await engine.now())
    held = await grant(engine, execution_id, grant_ttl_ms=5000)
    await freeze(engine, held.expires_at_ms)
    await refused("grant_already_exists", grant(engine, execution_id))
    claim = await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
    assert claim.execution_id == execution_id


async def test_a_grant_lapses_one_millisecond_later(engine: Engine) -> None:
    execution_id = await engine.create()
    await freeze(engine, await engine.now())
    held = await grant(engine, execution_id, grant_ttl_ms=5000)
    await freeze(engine, held.expires_at_ms + 1)
    await refused(
        "claim_grant_expired",
        engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
    )
    # The stale grant was removed, so it now looks like one that its time to live removed.
    assert await grant_fields(engine, execution_id) == {}
    assert "grant_expires_at" not in await fields(engine, execution_id)
    await refused(
        "invalid_claim_grant",
        engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
    )
    assert await placed(engine, execution_id) != {}
    await grant(engine, execution_id, **OTHER)


async def test_a_lapsed_grant_is_replaced_without_a_claim_in_between(engine: Engine) -> None:
    execution_id = await engine.create()
    old = await grant(engine, execution_id)
    await engine.advance(5001)
    new = await grant(engine, execution_id, **OTHER)
    await refused(
        "invalid_claim_grant",
        engine.backend.claims.claim_execution(old, **WORKER, lease_ttl_ms=TTL),
    )
    assert (
        await engine.backend.claims.claim_execution(new, **OTHER, lease_ttl_ms=TTL)
    ).attempt_index == 0


async def test_a_grant_whose_key_is_gone_is_invalid(engine: Engine) -> None:
    execution_id = await engine.create()
    held = await grant(engine, execution_id)
    await engine.backend.transport.call("DEL", keys.grant(execution_id.tag, execution_id))
    async with untouched(engine):
        await refused(
            "invalid_claim_grant",
            engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
        )


def _forged(held: ClaimGrant, grant_key: str) -> ClaimGrant:
    return msgspec.structs.replace(held, grant_key=grant_key)


async def test_a_grant_needs_its_worker_and_its_token(engine: Engine) -> None:
    execution_id = await engine.create()
    held = await grant(engine, execution_id)
    name, _, token = held.grant_key.rpartition("#")
    forged = [
        (held, OTHER),
        (_forged(held, name), WORKER),
        (_forged(held, f"{name}#"), WORKER),
        (_forged(held, f"{name}#{token[:-1]}"), WORKER),
        (_forged(held, f"{name}#{token}0"), WORKER),
        (_forged(held, f"{name}#{token.swapcase()[::-1]}"), WORKER),
    ]
    async with untouched(engine):
        for candidate, worker in forged:
            await refused(
                "invalid_claim_grant",
                engine.backend.claims.claim_execution(candidate, **worker, lease_ttl_ms=TTL),
            )
    # Another process of the same worker may use it.
    claim = await engine.backend.claims.claim_execution(
        held, worker_id="w", worker_instance_id="w-2", lease_ttl_ms=TTL
    )
    assert claim.handle.worker_instance_id == "w-2"
    assert "worker:w-2:leases" in await placed(engine, execution_id)


async def test_a_grant_is_consumed_once(engine: Engine) -> None:
    execution_id = await engine.create()
    held = await grant(engine, execution_id)
    claim = await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
    assert await grant_fields(engine, execution_id) == {}
    await engine.backend.executions.delay(claim.handle, 1)
    await refused(
        "invalid_claim_grant",
        engine.backend.claims.claim_resumed_execution(held, **WORKER, lease_ttl_ms=TTL),
    )


async def test_a_lost_grant_reply_is_answered_again(engine: Engine, valkey: TestServer) -> None:
    execution_id = await engine.create()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_issue_claim_grant")
        held = await client.claims.issue_claim_grant(execution_id, **WORKER)
        assert proxy.dropped == 1
    await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)


async def test_a_lost_reclaim_grant_reply_is_answered_again(
    engine: Engine, valkey: TestServer
) -> None:
    execution_id = (await lapsed(engine)).execution_id
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_issue_reclaim_grant")
        outcome = await client.claims.issue_reclaim_grant(execution_id, **OTHER)
        assert proxy.dropped == 1
    assert outcome.kind == "granted"


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_an_execution_that_ends_takes_its_grant_along(engine: Engine, end: str) -> None:
    execution_id = await engine.create(execution_deadline_at=await engine.now() + 1000)
    held = await grant(engine, execution_id, grant_ttl_ms=60_000)
    if end == "cancel":
        await engine.backend.executions.cancel_execution(execution_id)
    else:
        await engine.advance(1001)
        assert await engine.backend.upkeep.expire_execution(
            execution_id.tag, ExpireReason.EXECUTION_DEADLINE, [execution_id]
        ) == ["expired"]
    assert await grant_fields(engine, execution_id) == {}
    async with untouched(engine):
        await refused(
            "execution_not_leaseable",
            engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
        )


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
    await refused("invalid_input", engine.backend.claims.issue_claim_grant(unknown, **worker))
    await refused("invalid_input", engine.backend.claims.issue_reclaim_grant(unknown, **worker))


@pytest.mark.parametrize("state", ["paused", "disabled"])
async def test_a_lane_that_hands_out_nothing_gives_no_grant(engine: Engine, state: str) -> None:
    waiting = await engine.create()
    held = await grant(engine, waiting)
    other = await engine.create()
    await engine.backend.lanes.set_lane_state("default", state)
    async with untouched(engine):
        await refused("execution_not_eligible", grant(engine, other))
        await refused(
            "execution_not_leaseable",
            engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
        )
    await engine.backend.lanes.set_lane_state("default", "draining")
    await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
    await grant(engine, other)
