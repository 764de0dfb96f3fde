"""Shorthands for tests of suspensions: park, signal, look at what is stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowfabric.core.conditions import AllOf, Condition, Single
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import (
    Accepted,
    PendingWaitpoint,
    SignalOutcome,
    Suspended,
    WaitpointDetails,
)
from flowfabric.core.ids import ExecutionId
from tests.support.engine import LANE, Engine

SECRET = "ab" * 32
GO = Single("k", "go")
Waitpoint = WaitpointDetails | PendingWaitpoint
"""Anything that carries a waitpoint's id and token."""


def all_of_waitpoints(keys: Iterable[str]) -> AllOf:
    """Any signal on each of the waitpoints."""
    return AllOf(tuple(Single(key) for key in keys))


class Waits:
    """One engine whose key store is seeded."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.backend = engine.backend

    @classmethod
    async def open(cls, engine: Engine, secret: str = SECRET) -> Waits:
        await engine.backend.secrets.seed_at_boot(secret)
        return cls(engine)

    async def park(
        self, condition: Condition = GO, *, handle: Handle | None = None, **options: Any
    ) -> Suspended:
        """Suspend a (new) running execution."""
        held = handle or await self.engine.running()
        outcome = await self.backend.suspensions.suspend(held, condition=condition, **options)
        assert isinstance(outcome, Suspended)
        return outcome

    async def send(
        self, parked: Suspended, name: str = "go", *, at: int = 0, **options: Any
    ) -> SignalOutcome:
        """Signal one of a suspension's waitpoints."""
        return await self.signal(
            parked.handle.execution_id, parked.details.waitpoints[at], name, **options
        )

    async def signal(
        self, execution_id: ExecutionId, waitpoint: Waitpoint, name: str = "go", **options: Any
    ) -> SignalOutcome:
        return await self.backend.signals.deliver_signal(
            execution_id, waitpoint.waitpoint_id, waitpoint.waitpoint_token, name, **options
        )

    async def effect(self, *args: Any, **options: Any) -> str:
        """The effect of an accepted signal."""
        outcome = await self.send(*args, **options)
        assert isinstance(outcome, Accepted), outcome
        return outcome.effect

    async def hash(self, key: str) -> dict[str, str]:
        raw: Any = await self.backend.transport.call("HGETALL", key)
        return {name.decode(): value.decode() for name, value in raw.items()}

    async def waitpoint(self, execution_id: ExecutionId, waitpoint_id: str) -> dict[str, str]:
        """The stored waitpoint."""
        return await self.hash(f"ff:wp:{execution_id.tag}:{waitpoint_id}")

    async def waitpoints(self, parked: Suspended) -> list[dict[str, str]]:
        """The stored waitpoints of a suspension."""
        execution_id = parked.handle.execution_id
        return [
            await self.waitpoint(execution_id, one.waitpoint_id)
            for one in parked.details.waitpoints
        ]

    async def suspension(self, execution_id: ExecutionId) -> dict[str, str]:
        """The stored suspension."""
        return await self.hash(f"ff:exec:{execution_id.tag}:{execution_id}:suspension:current")

    async def write(self, key: str, **fields: Any) -> None:
        """Damage, or set, stored fields."""
        flat = [part for pair in fields.items() for part in pair]
        await self.backend.transport.call("HSET", key, *flat)

    async def expire(self, execution_id: ExecutionId) -> str:
        """What the scanner of suspension timeouts does."""
        (verdict,) = await self.backend.suspensions.expire_suspension(
            execution_id.tag, [execution_id]
        )
        return verdict

    async def trim(self, execution_id: ExecutionId) -> list[str]:
        """Let the retention of an ended execution pass and purge it completely."""
        await self.engine.advance(86_400_001)
        verdicts = await self.backend.upkeep.trim_retention(execution_id.tag, LANE, [execution_id])
        while await self.backend.upkeep.purge(execution_id.tag):
            pass
        return verdicts
