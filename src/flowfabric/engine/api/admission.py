"""Admission: holding work back that may not start yet, letting it go, and what runs give back."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from flowfabric.core.contracts.leases import Candidate
from flowfabric.core.contracts.quotas import QuotaStatus
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.concern import Concern

FOR_BUDGET = "waiting_for_budget"
FOR_QUOTA = "waiting_for_quota"
NEEDS_ADMISSION = "needs admission"
"""Why a grant is refused to an execution that names budgets or a quota policy."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """An execution to hold back, and why."""

    execution_id: ExecutionId
    reason: str
    detail: str = ""
    retry_at: int | None = None
    """When the cause is expected to end."""
    retry_in_ms: int | None = None
    """The same, from now on."""
    waits_for: str = ""
    """The budget or quota policy that lets it go when it opens."""
    place: int = 0
    """Its place among those that a quota policy lets go: the lowest is first."""


class BlockedExecution(Candidate, frozen=True):
    """An execution that waits for a budget or a quota policy."""

    retry_at: int | None = None
    lane_closed: bool = False
    """Whether its lane gives out nothing now."""


def longest_wait_of(status: QuotaStatus) -> int:
    """How many ms a policy makes an execution wait at most for a place in its window.

    A retry time further ahead is that of a longer window, which the policy had before.
    """
    return status.window_ms + status.jitter_ms


def headroom_of(status: QuotaStatus) -> int | None:
    """How many executions a policy admits now; None without limit."""
    rate, cap = status.max_requests_per_window, status.max_concurrent
    room = [rate - status.window_count] if rate else []
    room += [cap - status.slots_held] if cap else []
    return max(0, min(room)) if room else None


class AdmissionControl(Concern, Protocol):
    """What the scheduler and the scanners do with work that may not start yet."""

    async def read_candidates(self, ids: Sequence[ExecutionId]) -> list[Candidate | EngineError]:
        """The budgets and the quota policy that executions name; an error if it is unreadable."""
        ...

    async def block_many(self, tag: str, blocks: Sequence[Block]) -> list[EngineError | None]:
        """Hold back executions of a partition; None means success."""
        ...

    async def unblock_many(
        self, tag: str, ids: Iterable[str], expected_blocking_reason: str
    ) -> list[EngineError | None]:
        """Let executions of a partition go that are blocked for this reason."""
        ...

    async def read_blocked(
        self, tag: str, ids: Sequence[str], reason: str
    ) -> list[BlockedExecution]:
        """Those of the executions that are blocked for this reason, as far as they can be read."""
        ...

    async def open_budget(self, budget_id: str) -> int:
        """Let executions go that wait for a budget, if it is open; returns how many."""
        ...

    async def open_quota(self, quota_policy_id: str) -> int | None:
        """Let as many executions go as a quota policy admits now, those that waited longest first.

        Returns in how many ms to try again if others wait; None if none does, or if a run that
        ends will let them go.
        """
        ...

    async def deliver_returns(self, tag: str) -> int:
        """Give back what the runs of a partition left to budgets and quotas; how many remain."""
        ...
