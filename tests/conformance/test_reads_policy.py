"""The policy as its readers see it: normalised, or corruption (01 §7)."""

from __future__ import annotations

from flowfabric.core.policy import NO_POLICY, ExecutionPolicy, RetryPolicy, parse_policy
from tests.support.engine import Engine, refused


async def test_defaults_are_filled_in(engine: Engine) -> None:
    execution_id = await engine.create(policy={"retry_policy": {"max_retries": 5}})
    policy = await engine.backend.reads.read_execution_policy(execution_id)
    assert policy == ExecutionPolicy(retry_policy=RetryPolicy(max_retries=5))
    told = policy.normalised()
    assert told["retry_policy"] == {
        "max_retries": 5,
        "backoff": {
            "type": "exponential",
            "initial_delay_ms": 1000,
            "max_delay_ms": 60_000,
            "multiplier": 2.0,
            "jitter": False,
        },
        "retryable_categories": [],
        "retry_on_timeout": False,
    }
    assert (told["max_replay_count"], told["dedup_window_ms"]) == (10, 86_400_000)
    assert told["stream_policy"] == {"durability_mode": "buffered", "retention_maxlen": 10_000}
    tiers = {"fallback_policy": {"tiers": [{"provider": "p", "model": "m"}]}}
    other = await engine.backend.reads.read_execution_policy(await engine.create(policy=tiers))
    assert other.normalised()["fallback_policy"] == tiers["fallback_policy"]
    # Optional and not set: left out, never null.
    assert "delay_until" not in told
    assert "quota_policy_id" not in told
    assert parse_policy(told) == policy


async def test_without_a_policy_the_engines_own_rules_are_told(engine: Engine) -> None:
    policy = await engine.backend.reads.read_execution_policy(await engine.create())
    assert policy == NO_POLICY
    assert policy.max_reclaim_count == 1000
    assert "retry_policy" not in policy.normalised()


async def test_an_execution_that_does_not_exist(engine: Engine) -> None:
    await refused(
        engine.backend.reads.read_execution_policy(engine.new_id()), "execution_not_found"
    )
