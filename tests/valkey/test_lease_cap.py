"""The state after a reclaim cap, and expired grants (03 §15, D6)."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.leases import ReclaimCapExceeded
from tests.conformance.test_lease_reclaim import a_grant, use
from tests.support.engine import Engine, untouched
from tests.support.leases import OTHER, lapsed
from tests.support.storage import write


@pytest.mark.parametrize("cap", [0, 1, 50])
async def test_a_cap_told_again(engine: Engine, cap: int) -> None:
    """The caller's cap is not stored, but a repeat of its call gets the same answer."""
    execution_id = (await lapsed(engine)).execution_id
    await write(engine, execution_id, lease_reclaim_count=50)
    first = await use(engine, a_grant(execution_id), max_reclaim_count=cap)
    assert first == ReclaimCapExceeded(execution_id, cap)
    async with untouched(engine):
        assert await use(engine, a_grant(execution_id), max_reclaim_count=cap) == first
        told = await engine.backend.claims.issue_reclaim_grant(execution_id, **OTHER)
        assert told == ReclaimCapExceeded(execution_id, 50)
