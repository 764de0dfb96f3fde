"""A stored retry policy that is damaged: the failure is the last one, and nothing gets stuck."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import RetryScheduled, TerminalFailed
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine

pytestmark = pytest.mark.corrupts

POLICY: dict[str, Any] = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 5}}}


@pytest.mark.parametrize(
    "stored",
    [
        *("{", "[]", '"x"', "7", '{"retry_policy": "x"}', '{"retry_policy": null}'),
        '{"retry_policy": {"max_retries": "abc"}}',
        '{"retry_policy": {"backoff": {"type": "fixed"}}}',
        '{"retry_policy": {"backoff": {"type": "fixed", "delay_ms": "soon"}}}',
        '{"retry_policy": {"backoff": {"multiplier": []}}}',
        '{"retry_policy": {"backoff": "x"}}',
        '{"retry_policy": {"retryable_categories": "x"}}',
    ],
)
async def test_a_policy_that_cannot_be_read_allows_no_retry(engine: Engine, stored: str) -> None:
    handle = await engine.running(policy=POLICY)
    key = keys.policy(handle.execution_id.tag, handle.execution_id)
    await engine.backend.transport.call("SET", key, stored)
    assert isinstance(
        await engine.backend.executions.fail(handle, "x", "transient"), TerminalFailed
    )


async def test_null_is_absent_in_a_stored_policy(engine: Engine) -> None:
    handle = await engine.running(policy=POLICY)
    key = keys.policy(handle.execution_id.tag, handle.execution_id)
    stored = '{"retry_policy": {"max_retries": null, "backoff": {"multiplier": null}}}'
    await engine.backend.transport.call("SET", key, stored)
    assert isinstance(
        await engine.backend.executions.fail(handle, "x", "transient"), RetryScheduled
    )
