"""The policy as its readers see it: normalised, or corruption (01 §7)."""

from __future__ import annotations

import pytest

from flowfabric.engine.valkey import keys
from tests.support.engine import Engine, refused


@pytest.mark.corrupts
@pytest.mark.parametrize("stored", ["{", "[]", '{"unknown": 1}', '{"priority": "x"}', "\xff"])
async def test_an_unreadable_policy_is_corruption(engine: Engine, stored: str) -> None:
    execution_id = await engine.create(policy={"max_reclaim_count": 3})
    key = keys.policy(execution_id.tag, execution_id)
    await engine.backend.transport.call("SET", key, stored.encode("latin-1"), key=key)
    error = await refused(engine.backend.reads.read_execution_policy(execution_id), "corruption")
    assert f"{execution_id}: policy: " in error.detail
