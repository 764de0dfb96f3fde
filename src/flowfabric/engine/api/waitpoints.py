"""Waitpoints: what executions wait for, and the signals that arrived."""

from __future__ import annotations

from typing import Protocol

import msgspec

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import (
    OpenWaitpoints,
    PastWait,
    PendingWaitpoint,
    ResumeSignal,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.concern import Concern


class LastWait(msgspec.Struct, frozen=True, kw_only=True):
    """The newest suspension of an execution, open or closed."""

    reason: str
    since: int
    until: int | None
    closed_at: int | None
    close_reason: str
    answers: list[ResumeSignal]
    """The signals that ended it."""


class Waitpoints(Concern, Protocol):
    """Waitpoints: what executions wait for, and the signals that arrived."""

    async def create_waitpoint(
        self, handle: Handle, waitpoint_key: str, expires_in_ms: int
    ) -> PendingWaitpoint:
        """Create a waitpoint that buffers signals until a suspension uses it; keeps the lease."""
        ...

    async def close_waitpoint(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        reason: str = "proactive_close",
        *,
        handle: Handle | None = None,
    ) -> bool:
        """Close a waitpoint; False if it was closed before. Workers pass their handle."""
        ...

    async def list_pending_waitpoints(
        self, execution_id: ExecutionId, after: str = "", limit: int = 100
    ) -> OpenWaitpoints:
        """Pending and active waitpoints by id, without their tokens."""
        ...

    async def read_last_wait(self, execution_id: ExecutionId) -> LastWait | None:
        """The newest suspension, open or closed; None if there was none."""
        ...

    async def observe_signals(self, handle: Handle) -> list[ResumeSignal]:
        """The signals that resumed this attempt, oldest first."""
        ...

    async def read_signal(
        self, execution_id: ExecutionId, signal_id: str, waitpoint_key: str | None = None
    ) -> ResumeSignal | None:
        """One accepted signal with its payload, or None when it is gone."""
        ...

    async def read_waits(self, execution_id: ExecutionId, *wanted: str) -> list[PastWait]:
        """The past waitpoints of the current run; a replay starts a new run.

        What came to the `wanted` keys is read along, unless it is much. A damaged record under
        one of these keys raises `corruption`; under any other key it is left out and logged.
        """
        ...

    async def read_wait_signals(
        self, execution_id: ExecutionId, wait: PastWait
    ) -> list[ResumeSignal]:
        """What a waitpoint received, oldest first."""
        ...
