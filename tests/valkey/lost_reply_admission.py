"""Calls of admission, to be made with and without their reply."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Candidate
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.engine import Engine
from tests.support.flows import without_followups
from tests.valkey.lost_reply_case import Case

POLICY = "00000000-0000-4000-8000-00000000abcd"
_ID = ExecutionId.parse("{fp:86}:00000000-0000-4000-8000-000000000001")


async def _held_back(engine: Engine) -> ExecutionId:
    await _waiting(engine)
    await engine.backend.claims.block_execution_for_admission(_ID, "paused_by_operator")
    return _ID


async def _waiting(engine: Engine) -> ExecutionId:
    policy = ExecutionPolicy(quota_policy_id=POLICY)
    await engine.backend.quotas.create_quota_policy(POLICY, max_concurrent=5)
    await engine.backend.executions.create_execution(
        NewExecution(execution_id=_ID, execution_kind="job", policy=policy)
    )
    return _ID


async def _owing(engine: Engine) -> ExecutionId:
    await without_followups(engine)
    execution_id = await _waiting(engine)
    (claim,) = await _claim(engine.backend, execution_id)
    await engine.backend.executions.complete(claim.handle)
    return execution_id


async def _claim(backend: ValkeyBackend, execution_id: ExecutionId) -> Any:
    want = Engine(backend).want()
    return await backend.claims.claim_admitted(want, execution_id.tag, [Candidate(execution_id)])


ADMISSION_CASES: dict[str, Case] = {
    "block": Case(
        "ff_block",
        _waiting,
        lambda backend, eid: backend.claims.block_execution_for_admission(
            eid, "paused_by_operator", "x"
        ),
    ),
    "unblock": Case(
        "ff_unblock", _held_back, lambda backend, eid: backend.claims.unblock_execution(eid)
    ),
    "claim_admitted": Case("ff_claim_admitted", _waiting, _claim),
    "deliver_returns": Case(
        "ff_ack_returns", _owing, lambda backend, eid: backend.admission.deliver_returns(eid.tag)
    ),
}
