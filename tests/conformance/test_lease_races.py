"""Two calls that meet, in both orders (02 §18, 03 §16); the server serialises them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Claim, NotReclaimable
from flowfabric.core.state import ExpireReason
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import (
    OTHER,
    WORKER,
    event_types,
    grant,
    lapsed,
    mark,
    reclaim,
    reclaim_grant,
    running,
)

FIRST_OR_SECOND = pytest.mark.parametrize("first", [True, False])
RETRY = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 5}}}


@FIRST_OR_SECOND
async def test_renew_and_expiry_scan(engine: Engine, first: bool) -> None:
    handle = await running(engine)
    await engine.advance(TTL - 2000)
    if first:
        await engine.backend.leases.renew(handle)
        await engine.advance(2001)
        async with untouched(engine):
            assert await mark(engine, [handle.execution_id]) == ["not_yet_expired"]
        await engine.backend.executions.complete(handle)
    else:
        await engine.advance(2001)
        assert await mark(engine, [handle.execution_id]) == ["marked_expired"]
        async with untouched(engine):
            await refused(engine.backend.leases.renew(handle), "lease_expired")


@FIRST_OR_SECOND
async def test_complete_and_revoke(engine: Engine, first: bool) -> None:
    handle = await running(engine)
    if first:
        await engine.backend.executions.complete(handle)
        async with untouched(engine):
            outcome = await engine.backend.leases.revoke_lease(handle.execution_id)
        assert outcome.kind == "already_satisfied"
    else:
        assert (await engine.backend.leases.revoke_lease(handle.execution_id)).kind == "revoked"
        async with untouched(engine):
            await refused(engine.backend.executions.complete(handle), "lease_revoked")


@FIRST_OR_SECOND
async def test_expiry_and_revoke(engine: Engine, first: bool) -> None:
    handle = await running(engine)
    await engine.advance(TTL + 1)
    if first:
        await mark(engine, [handle.execution_id])
        outcome = await engine.backend.leases.revoke_lease(handle.execution_id)
        assert outcome.kind == "already_satisfied"
    else:
        await engine.backend.leases.revoke_lease(handle.execution_id)
        assert await mark(engine, [handle.execution_id]) == ["already_revoked"]
    claim = await reclaim(engine, handle.execution_id)
    attempts = await engine.backend.reads.read_attempts(handle.execution_id)
    reason = "lease_expired" if first else "lease_revoked"
    assert attempts[claim.attempt_index].reclaim_reason == reason


async def test_a_timer_scan_that_comes_after_a_new_claim(engine: Engine) -> None:
    policy = RETRY | {"timeout_policy": {"attempt_timeout_ms": 1000}}
    handle = await running(engine, policy=policy)
    execution_id = handle.execution_id
    await engine.advance(1001)
    # The scan has read the id as due; before it acts, the attempt fails and is claimed again.
    await engine.backend.executions.fail(handle, "boom", "transient")
    await engine.advance(6)
    await engine.backend.upkeep.promote_delayed(execution_id.tag, "default", [execution_id])
    claim = await engine.claim()
    async with untouched(engine):
        assert await engine.backend.upkeep.expire_execution(
            execution_id.tag, ExpireReason.ATTEMPT_TIMEOUT, [execution_id]
        ) == ["not_yet_due"]
    await engine.backend.executions.complete(claim.handle)


@FIRST_OR_SECOND
async def test_purge_and_replay(engine: Engine, first: bool) -> None:
    handle = await running(engine)
    execution_id = handle.execution_id
    await engine.backend.executions.complete(handle, b"r")
    await engine.advance(86_400_001)
    tag = execution_id.tag
    if first:
        assert await engine.backend.upkeep.trim_retention(tag, "default", [execution_id]) == [
            "purged"
        ]
        await refused(
            engine.backend.executions.replay_execution(execution_id), "execution_not_found"
        )
    else:
        await engine.backend.executions.replay_execution(execution_id)
        async with untouched(engine):
            verdicts = await engine.backend.upkeep.trim_retention(tag, "default", [execution_id])
            assert verdicts == ["not_terminal"]
        assert (await engine.claim()).attempt_index == 1


async def test_two_creates_with_one_key(engine: Engine) -> None:
    items = [
        NewExecution(execution_id=engine.new_id(), execution_kind="job", idempotency_key="k")
        for _ in range(2)
    ]
    outcomes = await asyncio.gather(
        *(engine.backend.executions.create_execution(item) for item in items)
    )
    assert sorted(outcome.kind for outcome in outcomes) == ["created", "duplicate"]
    assert len({outcome.execution_id for outcome in outcomes}) == 1


@FIRST_OR_SECOND
async def test_two_reclaimers(engine: Engine, first: bool) -> None:
    handle = await lapsed(engine)
    execution_id = handle.execution_id
    if first:
        await reclaim_grant(engine, execution_id)
        await refused(
            engine.backend.claims.issue_reclaim_grant(execution_id, **WORKER),
            "grant_already_exists",
        )
        # A live grant keeps the claim cycle away too.
        assert await engine.claim_all() == []
    else:
        held = await reclaim_grant(engine, execution_id)
        await engine.advance(5001)
        (taken,) = await engine.claim_all()
        assert taken.handle.kind == "reclaimed"
        outcome = await engine.backend.claims.reclaim_execution(held, **OTHER, lease_ttl_ms=TTL)
        assert isinstance(outcome, NotReclaimable)


async def test_two_schedulers_one_execution(engine: Engine) -> None:
    execution_id = await engine.create()
    results = await asyncio.gather(
        grant(engine, execution_id),
        grant(engine, execution_id, **OTHER),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == ["ClaimGrant", "ContentionError"]


async def test_many_claimers_take_each_execution_once(engine: Engine) -> None:
    made = {await engine.create() for _ in range(40)}

    async def worker(number: int) -> list[Claim]:
        taken: list[Claim] = []
        while claims := await engine.claim_all(3, worker=f"w{number}", instance=f"w{number}-1"):
            taken += claims
        return taken

    crews = await asyncio.gather(*(worker(number) for number in range(5)))
    taken = [claim for crew in crews for claim in crew]
    assert len(taken) == 40
    assert {claim.execution_id for claim in taken} == made
    for claim in taken:
        assert claim.handle.lease_epoch == 1


async def test_verbs_of_one_holder_in_one_breath(engine: Engine) -> None:
    """Whichever ends the attempt first wins; the others learn it; one completion."""
    handle = await running(engine)
    backend = engine.backend
    verbs: list[Callable[[], Awaitable[object]]] = [
        lambda: backend.executions.complete(handle),
        lambda: backend.executions.fail(handle, "r", "permanent"),
        lambda: backend.executions.cancel(handle),
        lambda: backend.leases.renew(handle),
        lambda: backend.executions.cancel_execution(handle.execution_id),
    ]
    results = await asyncio.gather(*(verb() for verb in verbs), return_exceptions=True)
    assert not isinstance(results[0], BaseException)
    assert [isinstance(result, BaseException) for result in results] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert (await event_types(engine, handle.execution_id)).count("completion") == 1
