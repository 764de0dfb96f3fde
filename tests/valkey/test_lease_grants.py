"""Grants: who gets one, what it contains, how it ends (03 §4, §5, D10)."""

from __future__ import annotations

import msgspec
import pytest

from flowfabric.core.contracts.leases import ClaimGrant
from flowfabric.core.state import ExpireReason
from flowfabric.engine.valkey import keys
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import OTHER, WORKER, grant, lapsed
from tests.support.server import TestServer
from tests.support.storage import grant_fields, indexes, lossy, record, write


async def test_a_grant_reserves_and_moves_nothing(engine: Engine) -> None:
    execution_id = await engine.create()
    fields, placed = await record(engine, execution_id), await indexes(engine, execution_id)
    await engine.freeze(await engine.now())
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
    after = await record(engine, execution_id)
    assert after.pop("grant_expires_at") == str(now + 700)
    assert after == fields
    assert (
        await indexes(engine, execution_id)
        == placed
        == {"lane:default:eligible": float(fields["created_at"])}
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


@pytest.mark.corrupts
async def test_check_order_of_a_claim_grant(engine: Engine) -> None:
    """One execution with every fault; each repair uncovers the next refusal."""
    many = ",".join(f"t{i:03}" for i in range(257))
    execution_id = engine.new_id()

    async def attempt(csv: str = many) -> None:
        args = (execution_id, "", "w w-1", csv, 5000, "token", "", "", "", "")
        await engine.backend.calls.fcall("ff_issue_claim_grant", execution_id.tag, args, op="grant")

    await refused(attempt(), "execution_not_found")
    await engine.create(execution_id=execution_id)
    await grant(engine, execution_id)
    await write(engine, execution_id, required_capabilities=many, state="alnnnr")
    await refused(attempt(), "execution_not_eligible")
    await write(engine, execution_id, state="ruddnf")
    await refused(attempt(), "execution_not_eligible")
    await write(engine, execution_id, state="ruewnf")
    await refused(attempt(), "grant_already_exists")
    await engine.advance(5001)
    await refused(attempt(), "execution_not_in_eligible_set")
    index = keys.eligible(execution_id.tag, "default", many)
    await engine.backend.transport.call("ZADD", index, 1, execution_id)
    error = await refused(attempt(), "invalid_capabilities")
    assert error.detail == "required:too_many_tokens"
    await write(engine, execution_id, required_capabilities="a" * 4097)
    index = keys.eligible(execution_id.tag, "default", "a" * 4097)
    await engine.backend.transport.call("ZADD", index, 1, execution_id)
    error = await refused(attempt(), "invalid_capabilities")
    assert error.detail == "required:too_many_bytes"
    await write(engine, execution_id, required_capabilities="gpu,cuda")
    index = keys.eligible(execution_id.tag, "default", "gpu,cuda")
    await engine.backend.transport.call("ZADD", index, 1, execution_id)
    error = await refused(attempt(), "invalid_capabilities")
    assert error.detail == "worker:too_many_tokens"
    error = await refused(attempt("b" * 4097), "invalid_capabilities")
    assert error.detail == "worker:too_many_bytes"
    await refused(attempt("gpu"), "capability_mismatch")
    await attempt("cuda,gpu")


async def test_a_mismatch_names_what_is_missing_and_stamps_one_field(engine: Engine) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["zoo", "gpu", "cuda"]}}
    execution_id = await engine.create(policy=policy)
    before = await engine.dump()
    for _ in range(2):
        await engine.freeze(await engine.now() + 5)
        error = await refused(
            grant(engine, execution_id, worker_capabilities=["gpu"]), "capability_mismatch"
        )
        assert error.detail == "cuda,zoo"
        after = await engine.dump()
        core = keys.core(execution_id.tag, execution_id).encode()
        stamp = after[core].pop(b"last_capability_mismatch_at")
        assert int(stamp) == await engine.now()
        assert after == before
    await grant(engine, execution_id, worker_capabilities=["zoo", "gpu", "cuda", "more"])


async def test_a_grant_lapses_one_millisecond_later(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.freeze(await engine.now())
    held = await grant(engine, execution_id, grant_ttl_ms=5000)
    await engine.freeze(held.expires_at_ms + 1)
    await refused(
        engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
        "claim_grant_expired",
    )
    # The stale grant was removed, so it now looks like one that its time to live removed.
    assert await grant_fields(engine, execution_id) == {}
    assert "grant_expires_at" not in await record(engine, execution_id)
    await refused(
        engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
        "invalid_claim_grant",
    )
    assert await indexes(engine, execution_id) != {}
    await grant(engine, execution_id, **OTHER)


async def test_a_grant_without_its_key_is_invalid(engine: Engine) -> None:
    execution_id = await engine.create()
    held = await grant(engine, execution_id)
    await engine.backend.transport.call("DEL", keys.grant(execution_id.tag, execution_id))
    async with untouched(engine):
        await refused(
            engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
            "invalid_claim_grant",
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
                engine.backend.claims.claim_execution(candidate, **worker, lease_ttl_ms=TTL),
                "invalid_claim_grant",
            )
    # Another process of the same worker may use it.
    claim = await engine.backend.claims.claim_execution(
        held, worker_id="w", worker_instance_id="w-2", lease_ttl_ms=TTL
    )
    assert claim.handle.worker_instance_id == "w-2"
    assert "worker:w-2:leases" in await indexes(engine, execution_id)


async def test_a_grant_is_consumed_once(engine: Engine) -> None:
    execution_id = await engine.create()
    held = await grant(engine, execution_id)
    claim = await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
    assert await grant_fields(engine, execution_id) == {}
    await engine.backend.executions.delay(claim.handle, 1)
    await refused(
        engine.backend.claims.claim_resumed_execution(held, **WORKER, lease_ttl_ms=TTL),
        "invalid_claim_grant",
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
            engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
            "execution_not_leaseable",
        )
