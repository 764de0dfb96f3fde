"""Failing, and claiming the next in the same call (04 S3)."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.executions import RetryScheduled, TerminalFailed
from flowfabric.core.contracts.leases import ClaimedMany, Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from flowfabric.core.text import FAILURE_REASON_LIMIT
from flowfabric.engine.api.executions import Completion, End, EndOutcome, FailedAttempt
from tests.support.engine import TTL, Engine, untouched
from tests.support.leases import event_types, reclaim

RETRIED = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 5000}}}


def _codes(outcomes: list[EndOutcome]) -> list[str | None]:
    return [each.code if isinstance(each, EngineError) else each and each.kind for each in outcomes]


async def _ends(
    engine: Engine, *items: End, max_n: int = 1, request_id: str | None = None
) -> tuple[list[EndOutcome], ClaimedMany]:
    return await engine.backend.claims.complete_and_claim(
        engine.new_id().tag, items, engine.want(), max_n, request_id=request_id
    )


async def _running(engine: Engine, n: int, **create: object) -> list[Handle]:
    return [await engine.running(**create) for _ in range(n)]


async def test_each_end_has_an_outcome_of_its_own(engine: Engine) -> None:
    (retried,) = await _running(engine, 1, policy=RETRIED)
    failed, done, ended = await _running(engine, 3)
    await engine.backend.executions.cancel(ended)
    following = [await engine.create() for _ in range(3)]
    before = await engine.now()
    outcomes, claimed = await _ends(
        engine,
        FailedAttempt(retried, "no route"),
        FailedAttempt(failed, "broken", "permanent"),
        Completion(done, b"r"),
        FailedAttempt(ended, "late"),
        max_n=2,
    )
    assert _codes(outcomes) == [
        "retry_scheduled",
        "terminal_failed",
        None,
        "execution_not_active",
    ]
    retry = outcomes[0]
    assert isinstance(retry, RetryScheduled)
    assert (retry.delay_until >= before + 5000, retry.next_attempt_index) == (True, 1)
    taken = {claim.execution_id for claim in claimed.claims}
    assert (len(taken), taken <= set(following)) == (2, True)
    assert claimed.remaining == 1
    reads = engine.backend.reads
    seen = await reads.read_execution_info(retried.execution_id)
    assert (seen.public_state.value, seen.delay_until) == ("delayed", retry.delay_until)
    assert (seen.failure_reason, seen.failure_category) == ("no route", "transient")
    seen = await reads.read_execution_info(failed.execution_id)
    assert (seen.public_state.value, seen.failure_reason) == ("failed", "broken")
    assert seen.failure_category == "permanent"
    assert await event_types(engine, retried.execution_id) == ["acquired", "released"]
    assert await event_types(engine, failed.execution_id) == ["acquired", "completion"]


async def test_repeating_a_failure_gives_the_same_answer_and_claims(engine: Engine) -> None:
    (retried,) = await _running(engine, 1, policy=RETRIED)
    (failed,) = await _running(engine, 1)
    for _ in range(4):
        await engine.create()
    items, request_id = [FailedAttempt(retried, "x"), FailedAttempt(failed, "x")], new_uuid()
    first = await _ends(engine, *items, max_n=3, request_id=request_id)
    assert _codes(first[0]) == ["retry_scheduled", "terminal_failed"]
    assert len(first[1].claims) == 3
    for again in (items, []):
        async with untouched(engine):
            outcomes, claimed = await _ends(engine, *again, max_n=3, request_id=request_id)
        assert outcomes == first[0][: len(again)]
        assert (claimed.claims, claimed.remaining) == (first[1].claims, 1)


async def test_a_repeated_failure_without_a_claim(engine: Engine) -> None:
    (retried,) = await _running(engine, 1, policy=RETRIED)
    first, _ = await _ends(engine, FailedAttempt(retried, "x"), max_n=0)
    await engine.advance(5000)
    promote = engine.backend.upkeep.promote_delayed
    ids = [retried.execution_id]
    assert await promote(retried.execution_id.tag, "default", ids) == ["promoted"]
    await engine.claim()
    async with untouched(engine):
        assert await _ends(engine, FailedAttempt(retried, "x"), max_n=0) == (
            first,
            ClaimedMany([], 0),
        )


async def test_failures_stand_when_nothing_is_claimed(engine: Engine) -> None:
    first, second = await _running(engine, 2)
    await engine.create()
    await engine.backend.lanes.set_lane_state("default", "paused")
    for handle, max_n in ((first, 5), (second, 0)):
        outcomes, claimed = await _ends(engine, FailedAttempt(handle, "x"), max_n=max_n)
        assert outcomes == [TerminalFailed()]
        assert claimed == ClaimedMany([], 0)


async def test_the_retry_of_a_failure_is_not_claimed_before_it_is_due(engine: Engine) -> None:
    (retried,) = await _running(engine, 1, policy=RETRIED)
    outcomes, claimed = await _ends(engine, FailedAttempt(retried, "x"), max_n=5)
    assert _codes(outcomes) == ["retry_scheduled"]
    assert claimed == ClaimedMany([], 0)


async def test_a_zombie_fails_nothing_and_claims_like_anyone_else(engine: Engine) -> None:
    """The claim part has its own rights: what the worker offers, not what it once held."""
    (zombie,) = await _running(engine, 1, policy=RETRIED)
    await engine.advance(TTL + 1)
    await engine.backend.upkeep.mark_lease_expired_if_due(
        zombie.execution_id.tag, [zombie.execution_id]
    )
    owner = (await reclaim(engine, zombie.execution_id)).handle
    outcomes, claimed = await _ends(engine, FailedAttempt(zombie, "x"))
    assert (_codes(outcomes), claimed.claims) == (["stale_lease"], [])
    following = await engine.create()
    outcomes, claimed = await _ends(engine, FailedAttempt(zombie, "x"))
    assert _codes(outcomes) == ["stale_lease"]
    assert [claim.execution_id for claim in claimed.claims] == [following]
    await engine.backend.leases.renew(owner)


async def test_a_lapsed_lease_is_not_failed_but_may_be_claimed_anew(engine: Engine) -> None:
    (lapsed,) = await _running(engine, 1, policy=RETRIED)
    await engine.advance(TTL + 1)
    outcomes, claimed = await _ends(engine, FailedAttempt(lapsed, "x"))
    assert _codes(outcomes) == ["lease_expired"]
    (claim,) = claimed.claims
    assert (claim.execution_id, claim.handle.kind) == (lapsed.execution_id, "reclaimed")
    assert claim.handle.lease_epoch == lapsed.lease_epoch + 1


@pytest.mark.parametrize("reason", ["", "x" * (FAILURE_REASON_LIMIT + 1)])
async def test_a_reason_is_stored_as_a_single_call_stores_it(engine: Engine, reason: str) -> None:
    alone, among = await _running(engine, 2)
    await engine.backend.executions.fail(alone, reason, "")
    assert (await _ends(engine, FailedAttempt(among, reason, "")))[0] == [TerminalFailed()]
    names = ["failure_reason", "failure_category"]
    read = engine.backend.reads.read_exec_core_fields
    assert await read(alone.execution_id, names) == await read(among.execution_id, names)


async def test_only_the_call_that_also_claims_takes_failures(engine: Engine) -> None:
    (handle,) = await _running(engine, 1)
    items = [FailedAttempt(handle, "x")]
    (error,) = await engine.backend.executions.complete_many(items)  # pyright: ignore[reportArgumentType]
    assert isinstance(error, EngineError)
    assert error.code == "invalid_input"
    await engine.backend.leases.renew(handle)
