"""Claims without a grant, for the tests of what they take and what they pass over."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Claim, ClaimedMany
from flowfabric.core.ids import ExecutionId
from tests.support.engine import Engine

GPU: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu"]}}
BOTH: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}}


async def claim_many(
    engine: Engine, max_n: int = 100, *, request_id: str | None = None, **want: Any
) -> ClaimedMany:
    tag = engine.new_id(want.get("lane", "default")).tag
    return await engine.backend.claims.claim_many(
        engine.want(**want), tag, max_n, request_id=request_id
    )


def ids(claims: list[Claim]) -> list[ExecutionId]:
    return [claim.execution_id for claim in claims]


async def create_many(engine: Engine, count: int, **options: Any) -> list[ExecutionId]:
    """Many at one engine time, sorted by id."""
    made = [
        NewExecution(execution_id=engine.new_id(), execution_kind="job", **options)
        for _ in range(count)
    ]
    await engine.backend.executions.create_many(made)
    return sorted(item.execution_id for item in made)
