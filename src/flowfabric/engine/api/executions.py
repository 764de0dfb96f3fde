"""Creating, ending, pausing and changing executions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from flowfabric.core.contracts.executions import (
    Cancelled,
    Completed,
    CreateOutcome,
    Delayed,
    FailOutcome,
    NewExecution,
    PriorityChanged,
    Replayed,
    WaitChildrenOutcome,
)
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId

Holder = Handle | Fence

NO_FENCE = Fence()


class Completion(msgspec.Struct, frozen=True):
    """One execution to complete: its handle and result (None = no result)."""

    handle: Handle
    result_payload: bytes | None = None
    result_encoding: str = ""


class Executions(Protocol):
    """Creating, ending, pausing and changing executions."""

    async def create_execution(self, new: NewExecution) -> CreateOutcome:
        """Accept one unit of work, at most once per id and per idempotency key."""
        ...

    async def create_many(self, items: Sequence[NewExecution]) -> list[CreateOutcome | EngineError]:
        """Create many; answers stand in input order and one item's error affects no other."""
        ...

    async def complete_execution(
        self,
        execution_id: ExecutionId,
        fence: Holder = NO_FENCE,
        *,
        result_payload: bytes | None = None,
        result_encoding: str = "",
        source: str = "lease_holder",
    ) -> Completed:
        """End successfully, with an optional result (None = no result)."""
        ...

    async def complete(
        self, handle: Handle, result_payload: bytes | None = None, result_encoding: str = ""
    ) -> Completed:
        """`complete_execution` with everything taken from the handle."""
        ...

    async def complete_many(self, items: Sequence[Completion]) -> list[Completed | EngineError]:
        """Complete many; answers stand in input order and one item's error affects no other."""
        ...

    async def fail_execution(
        self,
        execution_id: ExecutionId,
        fence: Holder = NO_FENCE,
        *,
        failure_reason: str,
        failure_category: str,
        source: str = "lease_holder",
        retry_policy_json: str = "",
    ) -> FailOutcome:
        """End the attempt unsuccessfully; the stored policy decides on a retry."""
        ...

    async def fail(self, handle: Handle, reason: str, category: str) -> FailOutcome:
        """`fail_execution` with everything taken from the handle."""
        ...

    async def cancel_execution(
        self,
        execution_id: ExecutionId,
        reason: str = "",
        *,
        source: str = "operator_override",
        fence: Holder = NO_FENCE,
    ) -> Cancelled:
        """End deliberately, from any phase that is not terminal."""
        ...

    async def cancel(self, handle: Handle, reason: str = "") -> Cancelled:
        """The lease holder cancels its own execution."""
        ...

    async def delay_execution(
        self,
        execution_id: ExecutionId,
        fence: Holder = NO_FENCE,
        *,
        delay_until: int,
        source: str = "lease_holder",
    ) -> Delayed:
        """Give the lease back until a time; at or before now, the attempt may resume at once."""
        ...

    async def delay(self, handle: Handle, delay_until: int) -> Delayed:
        """`delay_execution` with everything taken from the handle."""
        ...

    async def move_to_waiting_children(
        self, execution_id: ExecutionId, fence: Holder = NO_FENCE, *, source: str = "lease_holder"
    ) -> WaitChildrenOutcome:
        """Park until the open dependencies are resolved; `Ready` when there are none.

        `Impossible` names those that can never be resolved; like `Ready` it keeps the lease.
        """
        ...

    async def wait_children(self, handle: Handle) -> WaitChildrenOutcome:
        """`move_to_waiting_children` with everything taken from the handle."""
        ...

    async def update_progress(
        self,
        execution_id: ExecutionId,
        fence: Holder,
        *,
        progress_pct: int | None = None,
        progress_message: str | None = None,
    ) -> None:
        """Note how far the attempt is; only what is given is written, the last write wins."""
        ...

    async def progress(
        self, handle: Handle, pct: int | None = None, message: str | None = None
    ) -> None:
        """`update_progress` with everything taken from the handle."""
        ...

    async def change_priority(
        self, execution_id: ExecutionId, new_priority: int
    ) -> PriorityChanged:
        """Store a new priority (clamped to 0..9000) for an execution that is not running yet."""
        ...

    async def replay_execution(
        self,
        execution_id: ExecutionId,
        *,
        reason: str = "",
        requested_by: str = "",
        expected_replay_count: int | None = None,
        keep_steps: bool = False,
    ) -> Replayed:
        """Run a terminal execution again under the same id."""
        ...

    async def set_execution_tags(self, execution_id: ExecutionId, tags: Mapping[str, str]) -> int:
        """Add or replace tags in any phase; returns how many pairs were written."""
        ...

    async def set_execution_tag(self, execution_id: ExecutionId, key: str, value: str) -> int:
        """`set_execution_tags` with one pair."""
        ...
