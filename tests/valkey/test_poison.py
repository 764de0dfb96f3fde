"""One unreadable record never stops the others of a batch."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.executions import Completed
from flowfabric.core.contracts.leases import Renewed
from flowfabric.core.errors import CorruptionError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine

pytestmark = pytest.mark.corrupts


async def break_record(engine: Engine, execution_id: ExecutionId) -> None:
    await engine.backend.transport.call("HDEL", keys.core(execution_id.tag, execution_id), "state")


async def test_claims_pass_an_unreadable_record(engine: Engine) -> None:
    ids = [await engine.create(priority=3 - n) for n in range(3)]
    await break_record(engine, ids[0])
    assert [claim.execution_id for claim in await engine.claim_all()] == ids[1:]


async def test_completions_and_renewals_answer_each_for_itself(engine: Engine) -> None:
    handles = [await engine.running() for _ in range(3)]
    await break_record(engine, handles[1].execution_id)
    renewed = await engine.backend.leases.renew_many(handles)
    assert [type(answer) for answer in renewed] == [Renewed, CorruptionError, Renewed]
    done = await engine.backend.executions.complete_many([Completion(handle) for handle in handles])
    assert [type(answer) for answer in done] == [Completed, CorruptionError, Completed]
    for handle in (handles[0], handles[2]):
        key = keys.lane(handle.execution_id.tag, "default", "terminal")
        assert await engine.backend.transport.call("ZSCORE", key, handle.execution_id) is not None
