"""Quota policies limit how often and how many executions start."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from flowfabric.core.contracts import ListingPage
from flowfabric.core.contracts.quotas import (
    Admission,
    CreateQuotaOutcome,
    QuotaLimits,
    QuotaPage,
    QuotaReconciliation,
    QuotaStatus,
    Unlimited,
)
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.concern import Concern

DIRECT_CLAIM_MS = 5000
"""How long an admission waits for its claim where no grant sets the time."""


class Quotas(Concern, Protocol):
    """Quota policies, and the admissions they allow.

    An admission takes a place in the policy's window and, if the policy has a cap, a slot. The
    slot ends by itself unless the claim confirms it, and is released when the run ends.

    Both belong to one run of the execution (`Candidate.run`, `Claim.run`). A call for an earlier
    run changes nothing, so it may arrive late.
    """

    on_quota_opened: Callable[[str, int | None], Awaitable[None]] | None = None
    """Gets a policy for which executions wait, and how many of them it admits now; None if its
    window has moved on, so that each may start at its own time."""

    async def create_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int = 60,
        max_requests_per_window: int = 0,
        max_concurrent: int = 0,
        jitter_ms: int = 0,
        name: str = "",
    ) -> CreateQuotaOutcome:
        """Store a policy; 0 is no limit, `name` is for people. An existing one stays as it is."""
        ...

    async def update_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int | None = None,
        max_requests_per_window: int | None = None,
        max_concurrent: int | None = None,
        jitter_ms: int | None = None,
    ) -> None:
        """Change the limits that are given; the window and the slots stay."""
        ...

    async def get_quota_status(self, quota_policy_id: str) -> QuotaStatus:
        """The limits, and how much of them is used; or `quota_policy_not_found`."""
        ...

    async def list_quota_policies(self, after: str = "", limit: int = 100) -> QuotaPage:
        """The policies of all partitions in the order of their ids; `limit` is at most 1000."""
        ...

    async def read_quota_policy_limits(self, quota_policy_id: str) -> QuotaLimits | None:
        """The limits alone, or None if there is no such policy."""
        ...

    async def check_admission(
        self,
        quota_policy_id: str,
        execution_id: ExecutionId,
        *,
        run: int = 0,
        slot_ttl_ms: int = DIRECT_CLAIM_MS,
    ) -> Admission:
        """Admit a run of an execution and record it, or answer when to try again."""
        ...

    async def confirm_admission(
        self, quota_policy_id: str, execution_id: ExecutionId, *, run: int = 0
    ) -> None:
        """Keep the slot of a claimed run until it is released. Take it again if it ended."""
        ...

    async def release_admission(
        self, quota_policy_id: str, execution_id: ExecutionId, *, run: int | None = None
    ) -> None:
        """Free the slot of an execution; nothing if it has none. Its place in the window stays.

        `run`: its latest run that is over; by default, every run is.
        """
        ...

    async def admit_many(
        self,
        quota_policy_id: str,
        execution_ids: Sequence[ExecutionId],
        *,
        runs: Sequence[int] = (),
        slot_ttl_ms: int = DIRECT_CLAIM_MS,
    ) -> list[Admission | Unlimited | EngineError]:
        """`check_admission` for several, in order. A missing policy admits, with a warning.

        `runs`: one per execution. Never raises an engine error: each execution gets the error in
        its place.
        """
        ...

    async def confirm_many(
        self,
        quota_policy_id: str,
        execution_ids: Sequence[ExecutionId],
        *,
        runs: Sequence[int] = (),
    ) -> None:
        """`confirm_admission` for several; nothing if there is no such policy."""
        ...

    async def release_many(
        self,
        quota_policy_id: str,
        execution_ids: Sequence[ExecutionId],
        *,
        runs: Sequence[int] = (),
        rollback: str = "",
    ) -> None:
        """`release_admission` for several; nothing if there is no such policy.

        `rollback`: the `request_id` of `Admitted` answers whose executions did not start. Their
        places in the window are freed too, unless they had them before. An admission that another
        call took over stays.
        """
        ...

    async def note_blocked(
        self,
        quota_policy_id: str,
        execution_ids: Sequence[ExecutionId],
        places: Sequence[int] = (),
    ) -> None:
        """Remember executions that wait for the policy: hints, their records decide.

        `places`: one per execution; the lowest is let go first. By default, the one that waits
        longest is.
        """
        ...

    async def move_blocked(self, quota_policy_id: str, places: Mapping[ExecutionId, int]) -> None:
        """Give executions new places among those that wait; leaves out those not noted there."""
        ...

    async def forget_blocked(
        self, quota_policy_id: str, execution_ids: Sequence[ExecutionId]
    ) -> None:
        """Remove executions from those that wait for the policy."""
        ...

    async def blocked(
        self, quota_policy_id: str, limit: int = 100, after: str = ""
    ) -> ListingPage[ExecutionId]:
        """The executions noted as waiting for the policy, in the order they are let go."""
        ...

    async def quota_partitions(self) -> list[int]:
        """The partitions that hold policies."""
        ...

    async def reconcile_quota_counters(self, partition: int) -> QuotaReconciliation:
        """Drop what expired, free the slots of executions that no longer run, confirm the others.

        A policy that cannot be read counts as an error and stays.
        """
        ...
