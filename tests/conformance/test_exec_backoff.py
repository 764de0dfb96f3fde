"""How long a failed attempt waits for the next one (02 §5)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.executions import RetryScheduled
from flowfabric.core.policy import ExponentialBackoff, RetryPolicy
from tests.support.engine import Engine
from tests.support.executions import promote


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [
        ({"type": "fixed", "delay_ms": 0}, [0, 0]),
        ({"type": "fixed", "delay_ms": 250}, [250, 250, 250]),
        ({"type": "exponential"}, [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]),
        (
            {"type": "exponential", "initial_delay_ms": 100, "multiplier": 1.5},
            [100, 150, 225, 337],
        ),
        (
            {"type": "exponential", "initial_delay_ms": 1000, "multiplier": 0.5},
            [1000, 500, 250],
        ),
        (
            {"type": "exponential", "initial_delay_ms": 5000, "max_delay_ms": 700},
            [700, 700],
        ),
        (
            {"type": "exponential", "initial_delay_ms": 0, "multiplier": 1e300},
            [0, 0, 0],
        ),
        (
            {"type": "exponential", "multiplier": 1e300, "max_delay_ms": 9000},
            [1000, 9000, 9000],
        ),
    ],
)
async def test_backoff(engine: Engine, backoff: dict[str, Any], delays: list[int]) -> None:
    stored = {"retry_policy": {"max_retries": 100, "backoff": backoff}}
    handle = await engine.running(policy=stored)
    now = await engine.now()
    for delay in delays:
        await engine.freeze(now)
        outcome = await engine.backend.executions.fail(handle, "x", "transient")
        assert isinstance(outcome, RetryScheduled)
        assert outcome.delay_until - now == delay
        now += delay
        await engine.freeze(now)
        assert await promote(engine, handle.execution_id) == "promoted"
        handle = (await engine.claim()).handle


@pytest.mark.parametrize(
    "backoff",
    [
        {"type": "fixed", "delay_ms": 2**64 - 1},
        {"type": "exponential", "initial_delay_ms": 2**64 - 1, "max_delay_ms": 2**64 - 1},
    ],
)
async def test_backoff_is_capped(engine: Engine, backoff: dict[str, Any]) -> None:
    handle = await engine.running(policy={"retry_policy": {"backoff": backoff}})
    outcome = await engine.backend.executions.fail(handle, "x", "transient")
    assert isinstance(outcome, RetryScheduled)
    assert outcome.delay_until == 2**53 - 1
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.delay_until == 2**53 - 1
    (event,) = await engine.backend.reads.read_execution_history(handle.execution_id)
    assert event.get("delay_until") == 2**53 - 1
    assert await engine.backend.executions.fail(handle, "x", "transient") == outcome


async def test_jitter_stays_in_the_upper_half(engine: Engine) -> None:
    stored = {"retry_policy": {"backoff": {"type": "exponential", "jitter": True}}}
    now = await engine.now()
    await engine.freeze(now)
    for _ in range(60):
        await engine.create(policy=stored)
    delays: list[int] = []
    for claim in await engine.claim_all(60):
        outcome = await engine.backend.executions.fail(claim.handle, "x", "transient")
        assert isinstance(outcome, RetryScheduled)
        delays.append(outcome.delay_until - now)
    assert all(500 <= delay <= 1000 for delay in delays)
    assert len(set(delays)) > 20
    assert min(delays) < 625
    assert max(delays) > 875


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
async def test_jitter_on_tiny_delays(engine: Engine, delay: int) -> None:
    backoff = {"type": "exponential", "initial_delay_ms": delay, "jitter": True}
    handle = await engine.running(policy={"retry_policy": {"backoff": backoff}})
    now = await engine.now()
    await engine.freeze(now)
    outcome = await engine.backend.executions.fail(handle, "x", "transient")
    assert isinstance(outcome, RetryScheduled)
    assert -(-delay // 2) <= outcome.delay_until - now <= delay


async def test_default_policy_matches_the_engine_defaults(engine: Engine) -> None:
    """Storage leaves out what equals a default, so the engine has to know the same ones."""
    backoff = RetryPolicy().backoff
    assert isinstance(backoff, ExponentialBackoff)
    given = {"type": "exponential", **msgspec.structs.asdict(backoff)}
    for stored in ({}, {"backoff": given}):
        handle = await engine.running(policy={"retry_policy": stored | {"retry_on_timeout": True}})
        now = await engine.now()
        await engine.freeze(now)
        outcome = await engine.backend.executions.fail(handle, "x", "transient")
        assert isinstance(outcome, RetryScheduled)
        assert outcome.delay_until - now == backoff.initial_delay_ms == 1000
    assert RetryPolicy().max_retries == 3
