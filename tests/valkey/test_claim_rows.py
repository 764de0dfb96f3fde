"""What a claim carries beside the handle."""

from __future__ import annotations

from flowfabric.core.ids import new_uuid
from tests.support.engine import Engine


async def test_a_claim_tells_the_time_that_is_left(engine: Engine) -> None:
    start, tag = await engine.now(), engine.new_id().tag
    timed = {"timeout_policy": {"attempt_timeout_ms": 60_000, "execution_deadline_ms": 90_000}}
    for policy in (timed, timed, None):
        await engine.freeze(start := start + 1)
        await engine.create(policy=policy)
    claims = (await engine.backend.claims.claim_many(engine.want(), tag, 3)).claims
    told = [(claim.attempt_timeout_ms, claim.execution_deadline_at) for claim in claims]
    assert told == [(60_000, start + 89_998), (60_000, start + 89_999), (None, None)]
    await engine.freeze(start + 20_000)
    await engine.backend.executions.delay(claims[0].handle, 1)
    await engine.freeze(start + 25_000)
    request_id = new_uuid()
    (resumed,) = (
        await engine.backend.claims.claim_many(engine.want(), tag, 1, request_id=request_id)
    ).claims
    assert (resumed.handle.kind, resumed.execution_id) == ("resumed", claims[0].execution_id)
    assert (resumed.attempt_timeout_ms, resumed.execution_deadline_at) == (40_000, start + 89_998)
    await engine.freeze(start + 26_000)
    (again,) = (
        await engine.backend.claims.claim_many(engine.want(), tag, 1, request_id=request_id)
    ).claims
    assert again.attempt_timeout_ms == 39_000
