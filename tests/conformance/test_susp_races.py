"""Two calls at once, in both orders; and calls whose reply never arrived."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.suspension import (
    Accepted,
    AlreadySatisfiedSuspension,
    DuplicateSignal,
    Suspended,
    UsePending,
)
from flowfabric.core.errors import EngineError
from flowfabric.engine.api.backend import Backend
from tests.support.engine import Engine, refused
from tests.support.leases import running
from tests.support.suspension import Waits


async def told(call: Awaitable[Any]) -> str:
    try:
        answer = await call
    except EngineError as error:
        return error.code
    return answer if isinstance(answer, str) else str(answer) if answer is False else "ok"


async def test_satisfying_signals_at_once(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    answers = await asyncio.gather(*(told(waits.send(parked)) for _ in range(20)))
    assert sorted(answers) == ["ok"] + ["target_not_signalable"] * 19
    claim = await engine.claim()
    assert len(await waits.backend.waitpoints.observe_signals(claim.handle)) == 1


async def test_one_key_at_once(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    answers = await asyncio.gather(*(waits.send(parked, idempotency_key="x") for _ in range(20)))
    (accepted,) = [answer for answer in answers if isinstance(answer, Accepted)]
    assert answers.count(DuplicateSignal(accepted.signal_id)) == 19


async def test_suspend_and_signal_in_both_orders(engine: Engine) -> None:
    """A signal to a pending waitpoint is never lost, whenever the suspension comes."""
    rng = random.Random(random.getrandbits(64))
    waits = await Waits.open(engine)
    for _ in range(20):
        handle = await running(engine)
        pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
        calls: list[Awaitable[Any]] = [
            waits.backend.suspensions.suspend(
                handle, condition=Single("k"), waitpoints=[UsePending(pending.waitpoint_id)]
            ),
            waits.signal(handle.execution_id, pending, "go"),
        ]
        rng.shuffle(calls)
        outcomes = await asyncio.gather(*calls)
        (outcome,) = [o for o in outcomes if isinstance(o, Suspended | AlreadySatisfiedSuspension)]
        if isinstance(outcome, AlreadySatisfiedSuspension):
            assert len(await waits.backend.waitpoints.observe_signals(handle)) == 1
            await engine.backend.executions.complete(handle)
        else:
            claim = await engine.claim()
            assert len(await waits.backend.waitpoints.observe_signals(claim.handle)) == 1
            await engine.backend.executions.complete(claim.handle)


@pytest.mark.parametrize("scan_first", [True, False])
async def test_activation_and_expiry(engine: Engine, scan_first: bool) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    tag = handle.execution_id.tag
    binding = UsePending(pending.waitpoint_id)
    if scan_first:
        await engine.advance(1001)
        assert await waits.backend.suspensions.expire_waitpoints(tag, [pending.waitpoint_id]) == [
            "closed"
        ]
        await refused(
            waits.backend.suspensions.suspend(handle, condition=Single("k"), waitpoints=[binding]),
            "waitpoint_not_pending",
        )
        return
    await waits.backend.suspensions.suspend(handle, condition=Single("k"), waitpoints=[binding])
    await engine.advance(1001)
    verdicts = await waits.backend.suspensions.expire_waitpoints(tag, [pending.waitpoint_id])
    assert verdicts == ["not_pending_cleaned"]
    await waits.signal(handle.execution_id, pending, "go")


async def keyed(client: Backend, parked: Suspended) -> Any:
    return await client.signals.deliver_signal(
        parked.handle.execution_id,
        parked.details.waitpoint_id,
        parked.details.waitpoint_token,
        "go",
        idempotency_key="k",
    )


async def test_a_callers_own_repeat_is_a_duplicate(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    first = await keyed(waits.backend, parked)
    assert await keyed(waits.backend, parked) == DuplicateSignal(first.signal_id), (
        "after the resume too"
    )
