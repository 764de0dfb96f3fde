"""Renewing, revoking and listing leases."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from flowfabric.core.contracts.leases import Fence, Handle, Renewed, RevokeOutcome
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern


class ExpiredLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease past its expiry, whether a scanner has marked it or not."""

    execution_id: ExecutionId
    lease_id: str
    lease_epoch: int
    worker_instance_id: str
    expires_at_ms: int
    attempt_index: int


class ExpiredLeases(msgspec.Struct, frozen=True):
    """One page, and the start of the next if there is one."""

    entries: tuple[ExpiredLease, ...]
    cursor: tuple[int, str] | None = None
    """Expiry and execution id of the last entry: pass it as `after`."""
    damaged: tuple[str, ...] = ()
    """The entries that cannot be read."""


class Leases(Concern, Protocol):
    """Renewing, revoking and listing leases."""

    async def renew_lease(
        self, execution_id: ExecutionId, fence: Handle | Fence, lease_ttl_ms: int
    ) -> Renewed:
        """Extend a lease that the caller still holds."""
        ...

    async def renew(self, handle: Handle) -> Renewed:
        """`renew_lease` for the holder of the lease."""
        return await self.renew_lease(
            check.handle(handle).execution_id, handle, handle.lease_ttl_ms
        )

    async def renew_many(self, handles: Sequence[Handle]) -> list[Renewed | EngineError]:
        """Renew many. Outcomes are in input order; one handle's error affects no other."""
        ...

    async def revoke_lease(
        self,
        execution_id: ExecutionId,
        *,
        expected_lease_id: str = "",
        reason: str = "operator",
        revoked_by: str = "operator",
    ) -> RevokeOutcome:
        """Revoke a lease now; the execution continues with the next claim."""
        ...

    async def list_expired_leases(
        self,
        as_of: int | None = None,
        *,
        after: tuple[int, str] | None = None,
        limit: int = 1000,
        max_partitions_per_call: int = 32,
        namespace: str | None = None,
    ) -> ExpiredLeases:
        """Every lease that expires at or before `as_of` (now), by expiry and execution id.

        Leases still counted as live and those already offered for reclaim are listed alike.
        `after` is the cursor of the page before. All partitions are covered;
        `max_partitions_per_call` is how many of them are asked at a time.
        """
        ...
