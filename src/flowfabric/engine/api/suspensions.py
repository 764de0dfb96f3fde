"""Pausing attempts until a condition is met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from flowfabric.core.conditions import Condition
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.suspension import (
    FreshWaitpoint,
    Resumed,
    ResumePolicy,
    SuspendedPage,
    SuspendOutcome,
    UsePending,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.concern import Concern

Binding = FreshWaitpoint | UsePending


class Suspensions(Concern, Protocol):
    """Pausing attempts until a condition is met."""

    async def suspend(
        self,
        handle: Handle,
        *,
        condition: Condition,
        waitpoints: Sequence[Binding] | None = None,
        suspension_id: str | None = None,
        reason_code: str = "waiting_for_signal",
        requested_by: str = "worker",
        timeout_at: int | None = None,
        timeout_behavior: str | None = None,
        resume_policy: ResumePolicy | None = None,
        continuation_metadata_pointer: str = "",
        idempotency_key: str | None = None,
    ) -> SuspendOutcome:
        """Give the lease back until the condition, the timeout or an operator ends the pause.

        Without `waitpoints` a fresh one is made for every key the condition names. A repeat with
        the same idempotency key (default: the suspension id) gives the first answer; the empty
        key means none, and then a lost reply cannot be repaired.
        """
        ...

    async def suspend_by_triple(
        self, execution_id: ExecutionId, fence: Fence, **arguments: Any
    ) -> SuspendOutcome:
        """`suspend` for services that hold a fence but no handle."""
        ...

    async def resume_execution(
        self, execution_id: ExecutionId, *, trigger_type: str = "operator", resume_delay_ms: int = 0
    ) -> Resumed:
        """End a pause by hand, whatever its condition says."""
        ...

    async def expire_suspension(self, tag: str, ids: Sequence[str]) -> list[str]:
        """Carry out what due suspensions want; each is checked again."""
        ...

    async def expire_waitpoints(self, tag: str, ids: Sequence[str]) -> list[str]:
        """Close pending waitpoints that nobody used in time; each is checked again."""
        ...

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str = "", limit: int = 100
    ) -> SuspendedPage:
        """Suspended executions by partition, timeout and id; those without a timeout last."""
        ...
