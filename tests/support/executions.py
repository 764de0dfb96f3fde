"""Executions in every reachable state, and what the keyspace says of them."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.state import ExpireReason
from tests.support.engine import LANE, TTL, Engine

ATTEMPT_TIMEOUT = 20_000
DEADLINE = 3_600_000
BACKOFF = 1000
POLICY: dict[str, Any] = {
    "retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": BACKOFF}},
    "timeout_policy": {"attempt_timeout_ms": ATTEMPT_TIMEOUT, "execution_deadline_ms": DEADLINE},
}


def foreign_fence() -> Fence:
    """A complete fence that no lease ever had."""
    return Fence(new_uuid(), 1, new_uuid(), 0)


async def promote(engine: Engine, execution_id: ExecutionId, lane: str = LANE) -> str:
    (verdict,) = await engine.backend.upkeep.promote_delayed(execution_id.tag, lane, [execution_id])
    return verdict


async def expire(engine: Engine, execution_id: ExecutionId, reason: ExpireReason) -> str:
    (verdict,) = await engine.backend.upkeep.expire_execution(
        execution_id.tag, reason, [execution_id]
    )
    return verdict


async def expire_attempt(engine: Engine, execution_id: ExecutionId) -> str:
    return await expire(engine, execution_id, ExpireReason.ATTEMPT_TIMEOUT)


async def expire_deadline(engine: Engine, execution_id: ExecutionId) -> str:
    return await expire(engine, execution_id, ExpireReason.EXECUTION_DEADLINE)


async def mark(engine: Engine, execution_id: ExecutionId) -> str:
    (verdict,) = await engine.backend.upkeep.mark_lease_expired_if_due(
        execution_id.tag, [execution_id]
    )
    return verdict


async def trim(engine: Engine, execution_id: ExecutionId, lane: str = LANE) -> str:
    (verdict,) = await engine.backend.upkeep.trim_retention(execution_id.tag, lane, [execution_id])
    return verdict


class Case:
    """One execution driven into a named state, and the last lease it had."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.backend = engine.backend
        self.execution_id = engine.new_id()
        self.handle: Handle | None = None

    @classmethod
    async def make(cls, engine: Engine, state: str) -> Case:
        case = cls(engine)
        await getattr(case, f"_{state}")()
        return case

    @property
    def fence(self) -> Handle | Fence:
        return self.handle or foreign_fence()

    @property
    def held(self) -> Handle:
        assert self.handle is not None
        return self.handle

    async def _waiting(self, **fields: Any) -> None:
        await self.engine.create(execution_id=self.execution_id, policy=POLICY, **fields)

    async def _delayed(self) -> None:
        await self._waiting(delay_until=await self.engine.now() + 5000)

    async def claim(self) -> None:
        self.handle = (await self.engine.claim()).handle

    async def _active(self) -> None:
        await self._waiting()
        await self.claim()

    async def _lease_expired(self) -> None:
        await self._active()
        await self.engine.advance(TTL)
        assert await mark(self.engine, self.execution_id) == "marked_expired"

    async def _revoked(self) -> None:
        await self._active()
        await self.backend.leases.revoke_lease(self.execution_id)

    async def _retry_delayed(self) -> None:
        await self._active()
        await self.backend.executions.fail(self.held, "boom", "transient")

    async def _retry_waiting(self) -> None:
        await self._retry_delayed()
        await self.engine.advance(BACKOFF)
        assert await promote(self.engine, self.execution_id) == "promoted"

    async def _paused_delayed(self) -> None:
        await self._active()
        await self.backend.executions.delay(self.held, await self.engine.now() + 5000)

    async def _paused_waiting(self) -> None:
        await self._active()
        await self.backend.executions.delay(self.held, 1)

    async def _waiting_children(self) -> None:
        await self._active()
        await self.engine.block(self.execution_id)
        await self.backend.executions.wait_children(self.held)

    async def _completed(self) -> None:
        await self._active()
        await self.backend.executions.complete(self.held, b"result")

    async def _failed(self) -> None:
        await self._active()
        await self.backend.executions.fail(self.held, "broken", "permanent")

    async def _cancelled(self) -> None:
        await self._active()
        await self.backend.executions.cancel_execution(self.execution_id, "enough")

    async def _cancelled_early(self) -> None:
        await self._waiting()
        await self.backend.executions.cancel_execution(self.execution_id, "enough")

    async def _expired(self) -> None:
        await self._active()
        await self.engine.advance(ATTEMPT_TIMEOUT)
        assert await expire_attempt(self.engine, self.execution_id) == "expired"

    async def _expired_early(self) -> None:
        await self._waiting()
        await self.engine.advance(DEADLINE)
        assert await expire_deadline(self.engine, self.execution_id) == "expired"

    async def _replayed(self) -> None:
        await self._completed()
        await self.backend.executions.replay_execution(self.execution_id)

    async def _replayed_early(self) -> None:
        await self._cancelled_early()
        await self.backend.executions.replay_execution(self.execution_id)


CODES = {
    "waiting": "ruewnf",
    "delayed": "ruddnf",
    "active": "alnnnr",
    "lease_expired": "axnwni",
    "revoked": "avnwni",
    "retry_delayed": "rudbnt",
    "retry_waiting": "ruewnt",
    "paused_delayed": "ruddni",
    "paused_waiting": "ruewni",
    "waiting_children": "ruccni",
    "completed": "tunnsz",
    "failed": "tunnfz",
    "cancelled": "tunncz",
    "cancelled_early": "tunncf",
    "expired": "tunnxz",
    "expired_early": "tunnxf",
    "replayed": "ruewnp",
    "replayed_early": "ruewnp",
}
RUNNABLE = [name for name, code in CODES.items() if code[0] == "r"]
ACTIVE = ["active", "lease_expired", "revoked"]
TERMINAL = [name for name, code in CODES.items() if code[0] == "t"]
