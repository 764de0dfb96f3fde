"""Grants, claims by grant, renewals, revocation and reclaim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import (
    AlreadySatisfied,
    Claim,
    ClaimGrant,
    Fence,
    Granted,
    GrantNotFound,
    Handle,
    HandleKind,
    NotReclaimable,
    ReclaimCapExceeded,
    ReclaimGrant,
    ReclaimGrantOutcome,
    ReclaimOutcome,
    Renewed,
    ResumeCause,
    ResumeGrant,
    Revoked,
    RevokeOutcome,
)
from flowfabric.core.errors import ConfigError, EngineError, ValidationError
from flowfabric.core.ids import (
    ExecutionId,
    PartitionKey,
    new_uuid,
    validate_lane,
    validate_uuid,
    validate_worker_id,
)
from flowfabric.core.keys import grant as grant_name
from flowfabric.engine.arguments import (
    checked_text,
    count,
    held,
    instance,
    listed,
    positive_ms,
    reason_text,
    whole,
)
from flowfabric.engine.calls import Calls, decoding, proof, refused, text, unreadable

__all__ = ["Leases", "claim_from_row"]

_RENEW_BATCH = 256
_NO_OPTIONAL_PARTS: tuple[Any, ...] = (None,) * 6
_MODES: dict[bytes, HandleKind] = {b"f": "fresh", b"r": "resumed", b"c": "reclaimed"}
_NO_TAGS: dict[str, str] = {}
_AUDIT = ("capability_hash", "route_snapshot_json", "admission_summary")
_LOST_GRANT = frozenset({"invalid_claim_grant", "claim_grant_expired"})


def worker_pair(worker_id: str, worker_instance_id: str) -> str:
    """Both identities in the one form the record keeps."""
    validate_worker_id(worker_id)
    validate_worker_id(worker_instance_id, "worker_instance_id")
    return f"{worker_id} {worker_instance_id}"


def claim_from_row(row: Sequence[Any], lane: str, ttl: int, instance: str) -> Claim:
    """One claim of many from its positional form; another shape is a `ReplyError`."""
    try:
        return _claim_of(row, lane, ttl, instance)
    except (LookupError, TypeError, ValueError, AttributeError):
        subject = row[0] if isinstance(row, list) and row else ""  # pyright: ignore[reportUnknownVariableType]
        raise unreadable(row, "ff_claim_many", "claim_many", text(subject)) from None  # pyright: ignore[reportUnknownArgumentType]


def _claim_of(row: Sequence[Any], lane: str, ttl: int, instance: str) -> Claim:
    optional_parts = row[8] if len(row) > 8 else _NO_OPTIONAL_PARTS
    if len(optional_parts) != len(_NO_OPTIONAL_PARTS):
        # Another library version knows more of them, or fewer.
        optional_parts = (*optional_parts, *_NO_OPTIONAL_PARTS)[: len(_NO_OPTIONAL_PARTS)]
    attempt_type, tags, namespace, timeout, deadline, cause = optional_parts
    return Claim(
        handle=Handle(
            execution_id=ExecutionId.trusted(row[0].decode()),
            lease=row[3].decode(),
            attempt=row[4].decode(),
            lease_ttl_ms=ttl,
            lane_id=lane,
            worker_instance_id=instance,
            kind=_MODES[row[1]],
        ),
        execution_kind=row[2].decode(),
        attempt_type="initial" if attempt_type is None else attempt_type.decode(),
        input_payload=row[5] or b"",
        payload_encoding="" if row[6] is None else row[6].decode(),
        tags=_NO_TAGS if not tags else _pairs(tags),
        namespace="default" if namespace is None else namespace.decode(),
        lease_expires_at=int(row[7]),
        attempt_timeout_ms=timeout,
        execution_deadline_at=deadline,
        resume_cause=None if cause is None else _cause(cause),
    )


def _cause(parts: Sequence[bytes | None]) -> ResumeCause:
    known = (None if part is None else text(part) for part in parts[:4])
    suspension_id, trigger, close_reason, closer = known
    return ResumeCause(suspension_id or "", trigger or "", close_reason or "", closer)


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}


def _token(grant: ClaimGrant) -> str:
    return checked_text(grant.grant_key, "grant_key").rpartition("#")[2]


def _offered(tokens: Any) -> tuple[str, str]:
    """The worker's tokens as CSV, and what is wrong with them.

    The engine reports that problem, because it has other checks to make before.
    """
    try:
        return caps.to_csv(caps.normalise(tokens, "worker")), ""
    except ValidationError as error:
        return "", error.detail


class Leases(Calls):
    """How an execution gets an owner, keeps it, and loses it."""

    # --- grants -----------------------------------------------------------------

    async def issue_claim_grant(
        self,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        lane_id: str = "",
        capability_hash: str = "",
        route_snapshot_json: str = "",
        admission_summary: str = "",
    ) -> ClaimGrant:
        """Reserve one eligible execution for one worker; it stays in its index until claimed."""
        tag, expires, key, _ = await self._grant(
            "ff_issue_claim_grant",
            "issue_claim_grant",
            execution_id,
            lane_id,
            (worker_id, worker_instance_id),
            worker_capabilities,
            grant_ttl_ms,
            (capability_hash, route_snapshot_json, admission_summary),
        )
        return ClaimGrant(
            execution_id=execution_id, partition_key=tag, grant_key=key, expires_at_ms=expires
        )

    async def _grant(
        self,
        function: str,
        op: str,
        execution_id: ExecutionId,
        lane_id: str,
        worker: tuple[str, str],
        worker_capabilities: Iterable[str],
        ttl: int,
        audit: tuple[str, str, str],
    ) -> tuple[str, int, str, str]:
        ttl = positive_ms(ttl, "grant_ttl_ms")
        execution_id = self.checked(execution_id)
        if checked_text(lane_id, "lane_id"):
            validate_lane(lane_id)
        csv, problem = _offered(worker_capabilities)
        token = new_uuid()
        texts = [checked_text(*pair) for pair in zip(audit, _AUDIT, strict=True)]
        args = (execution_id, lane_id, worker_pair(*worker), csv, ttl, token, *texts, problem)
        tag = execution_id.tag
        reply = await self.fcall(function, tag, args, op=op)
        key = f"{grant_name(tag, execution_id)}#{token}"
        with decoding(reply, function, op, execution_id):
            return tag, int(reply[2]), key, text(reply[3])

    async def issue_reclaim_grant(
        self,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        lane_id: str = "",
        capability_hash: str = "",
        route_snapshot_json: str = "",
        admission_summary: str = "",
    ) -> ReclaimGrantOutcome:
        """Reserve an execution whose lease expired or was revoked."""
        try:
            tag, expires, key, lane = await self._grant(
                "ff_issue_reclaim_grant",
                "issue_reclaim_grant",
                execution_id,
                lane_id,
                (worker_id, worker_instance_id),
                worker_capabilities,
                grant_ttl_ms,
                (capability_hash, route_snapshot_json, admission_summary),
            )
        except EngineError as error:
            outcome = _not_reclaimable(execution_id, error)
            if outcome is None:
                raise
            return outcome
        return Granted(
            ReclaimGrant(
                execution_id=execution_id,
                partition_key=tag,
                grant_key=key,
                expires_at_ms=expires,
                lane_id=lane,
            )
        )

    # --- claims -----------------------------------------------------------------

    async def claim_execution(
        self,
        grant: ClaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        lane_id: str = "",
        lease_id: str | None = None,
        attempt_id: str | None = None,
    ) -> Claim:
        """Turn a claim grant into a lease and a new attempt; a repeat gives the same claim."""
        return await self._claim(
            "ff_claim_execution",
            grant,
            lane_id,
            (worker_id, worker_instance_id),
            lease_ttl_ms,
            (_uuid(lease_id, "lease_id"), _uuid(attempt_id, "attempt_id")),
        )

    async def claim_resumed_execution(
        self,
        grant: ClaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        lane_id: str = "",
        lease_id: str | None = None,
    ) -> Claim:
        """Take over a paused attempt: same attempt, new lease, next epoch."""
        return await self._claim(
            "ff_claim_resumed",
            grant,
            lane_id,
            (worker_id, worker_instance_id),
            lease_ttl_ms,
            (_uuid(lease_id, "lease_id"),),
        )

    async def claim_from_resume_grant(
        self, grant: ResumeGrant, *, worker_id: str, worker_instance_id: str, lease_ttl_ms: int
    ) -> Claim:
        """`claim_resumed_execution` on the grant's own lane."""
        instance(grant, ResumeGrant, "grant")
        return await self.claim_resumed_execution(
            grant,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            lane_id=grant.lane_id,
        )

    async def _claim(
        self,
        function: str,
        grant: ClaimGrant,
        lane_id: str,
        worker: tuple[str, str],
        ttl: int,
        ids: tuple[str, ...],
    ) -> Claim:
        execution_id = self._granted(grant)
        ttl = positive_ms(ttl, "lease_ttl_ms")
        lane = checked_text(lane_id, "lane_id")
        args = (execution_id, lane, worker_pair(*worker), _token(grant), ttl, *ids)
        op = function.removeprefix("ff_")
        reply = await self.fcall(function, execution_id.tag, args, op=op)
        with decoding(reply, function, op, execution_id):
            return _claim_of(reply[2], text(reply[3]), ttl, worker[1])

    def _granted(self, grant: ClaimGrant) -> ExecutionId:
        instance(grant, ClaimGrant, "grant")
        try:
            key = PartitionKey.parse(grant.partition_key)
        except EngineError as error:
            raise ConfigError("grant", error.detail, "partition_key") from error
        execution_id = self.checked(grant.execution_id)
        if key != execution_id.tag:
            raise ConfigError("grant", "is not the execution's partition", "partition_key")
        return execution_id

    async def issue_grant_and_claim(
        self,
        execution_id: ExecutionId,
        *,
        lease_duration_ms: int,
        lane_id: str = "",
        worker_id: str = "operator",
        worker_instance_id: str = "operator",
        request_id: str | None = None,
    ) -> Claim:
        """An operator takes one named execution: no capability, budget or quota check.

        Repeating a request id gives the first answer again.
        """
        execution_id = self.checked(execution_id)
        ttl = positive_ms(lease_duration_ms, "lease_duration_ms")
        worker = worker_pair(worker_id, worker_instance_id)
        lease_id = _uuid(request_id, "request_id")
        # Derived, so that a repeat of the request names the same attempt.
        attempt_id = f"{lease_id[24:32]}{lease_id[8:24]}{lease_id[:8]}{lease_id[32:]}"
        lane = checked_text(lane_id, "lane_id")
        args = (execution_id, lane, worker, ttl, lease_id, attempt_id)
        function, op = "ff_grant_and_claim", "issue_grant_and_claim"
        reply = await self.fcall(function, execution_id.tag, args, op=op)
        with decoding(reply, function, op, execution_id):
            return _claim_of(reply[2], text(reply[3]), ttl, worker_instance_id)

    async def reclaim_execution(
        self,
        grant: ReclaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        max_reclaim_count: int | None = None,
        lease_id: str | None = None,
        attempt_id: str | None = None,
    ) -> ReclaimOutcome:
        """Turn a reclaim grant into a lease and a new attempt; at the cap the execution fails."""
        execution_id = self._granted(instance(grant, ReclaimGrant, "grant"))
        whole(grant.expires_at_ms, "expires_at_ms")
        ttl = positive_ms(lease_ttl_ms, "lease_ttl_ms")
        args = (
            execution_id,
            checked_text(grant.lane_id, "lane_id"),
            worker_pair(worker_id, worker_instance_id),
            _token(grant),
            ttl,
            _uuid(lease_id, "lease_id"),
            _uuid(attempt_id, "attempt_id"),
            count(max_reclaim_count, "max_reclaim_count"),
        )
        try:
            reply = await self.fcall("ff_reclaim", execution_id.tag, args, op="reclaim_execution")
        except EngineError as error:
            if error.code in _LOST_GRANT:
                return GrantNotFound(execution_id)
            outcome = _not_reclaimable(execution_id, error)
            if outcome is None:
                raise
            return outcome
        with decoding(reply, "ff_reclaim", "reclaim_execution", execution_id):
            return _claim_of(reply[2], grant.lane_id, ttl, worker_instance_id)

    # --- keeping and losing -----------------------------------------------------

    async def renew_lease(
        self, execution_id: ExecutionId, fence: Handle | Fence, lease_ttl_ms: int
    ) -> Renewed:
        """Extend a lease that the caller still owns."""
        execution_id = self.checked(execution_id)
        ttl = positive_ms(lease_ttl_ms, "lease_ttl_ms")
        if isinstance(fence, Handle):
            held(fence, "fence")
        args = (execution_id, proof(fence), ttl)
        reply = await self.fcall("ff_renew", execution_id.tag, args, op="renew")
        with decoding(reply, "ff_renew", "renew", execution_id):
            (answer,) = reply[2]
        outcome = _renewal(answer, execution_id, fence.lease_epoch or 0)
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    async def renew(self, handle: Handle) -> Renewed:
        """`renew_lease` with everything taken from the handle."""
        held(handle)
        return await self.renew_lease(handle.execution_id, handle, handle.lease_ttl_ms)

    async def renew_many(self, handles: Sequence[Handle]) -> list[Renewed | EngineError]:
        """Renew many; answers stand in input order and one failing handle affects no other."""
        handles = listed(handles, "handles")
        outcomes: list[Renewed | EngineError | None] = [None] * len(handles)
        batches: dict[str, list[int]] = {}
        for position, handle in enumerate(handles):
            try:
                proof(held(handle, "handles"))
                positive_ms(handle.lease_ttl_ms, "lease_ttl_ms")
            except EngineError as error:
                outcomes[position] = error
            else:
                batches.setdefault(handle.execution_id.tag, []).append(position)
        for tag, positions in batches.items():
            for start in range(0, len(positions), _RENEW_BATCH):
                part = positions[start : start + _RENEW_BATCH]
                args: list[Any] = []
                for position in part:
                    handle = handles[position]
                    args += (handle.execution_id, handle.wire, handle.lease_ttl_ms)
                reply = await self.fcall("ff_renew", tag, args, op="renew_many")
                with decoding(reply, "ff_renew", "renew_many"):
                    for position, answer in zip(part, reply[2], strict=True):
                        handle = handles[position]
                        outcomes[position] = _renewal(
                            answer, handle.execution_id, handle.lease_epoch
                        )
        return outcomes  # pyright: ignore[reportReturnType]

    async def revoke_lease(
        self,
        execution_id: ExecutionId,
        *,
        expected_lease_id: str = "",
        reason: str = "operator",
        revoked_by: str = "operator",
    ) -> RevokeOutcome:
        """Take a lease away now; the execution goes on with the next claim."""
        execution_id = self.checked(execution_id)
        args = (
            execution_id,
            checked_text(expected_lease_id, "expected_lease_id"),
            reason_text(reason, "reason"),
            reason_text(revoked_by, "revoked_by"),
            # Whoever holds the lease when a repeat arrives is not the one meant.
            new_uuid(),
        )
        reply = await self.fcall("ff_revoke", execution_id.tag, args, op="revoke_lease")
        with decoding(reply, "ff_revoke", "revoke_lease", execution_id):
            if reply[1] == b"ALREADY_SATISFIED":
                return AlreadySatisfied(text(reply[2]))
            return Revoked(text(reply[2]), int(reply[3]))


def _renewal(answer: Any, execution_id: ExecutionId, epoch: int) -> Renewed | EngineError:
    if type(answer) is int:
        return Renewed(answer, epoch)
    if type(answer) is list:
        envelope = cast("list[Any]", answer)
        return refused(envelope, "renew", function="ff_renew", execution_id=execution_id)
    return unreadable(answer, "ff_renew", "renew", execution_id)


def _uuid(value: str | None, field: str) -> str:
    return new_uuid() if value is None else validate_uuid(value, field)


def _not_reclaimable(
    execution_id: ExecutionId, error: EngineError
) -> NotReclaimable | ReclaimCapExceeded | None:
    if error.code == "execution_not_reclaimable":
        return NotReclaimable(execution_id, error.code)
    if error.code == "capability_mismatch":
        return NotReclaimable(execution_id, f"capability_mismatch: {error.detail}")
    if error.code == "max_retries_exhausted":
        return ReclaimCapExceeded(execution_id, int(error.details[0]))
    return None
