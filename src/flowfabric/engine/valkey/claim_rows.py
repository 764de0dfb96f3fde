"""Claim requests and claims as the functions take and return them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from flowfabric.core.contracts.leases import Claim, Handle, HandleKind, ResumeCause
from flowfabric.core.errors import ReplyError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.valkey.calls import text, unreadable

_NO_TAGS: dict[str, str] = {}
_MODES: dict[bytes, HandleKind] = {b"f": "fresh", b"r": "resumed", b"c": "reclaimed"}
_NO_OPTIONAL_PARTS: tuple[Any, ...] = (None,) * 6
log = logging.getLogger(__name__)


def claim_of(row: Sequence[Any], lane: str, ttl: int, instance: str) -> Claim:
    """One claim from its positional form; parts that this version does not know are skipped."""
    optional_parts = row[8] if len(row) > 8 else _NO_OPTIONAL_PARTS
    if len(optional_parts) != len(_NO_OPTIONAL_PARTS):
        # Another library version may send more or fewer.
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


def claim_args(request: ClaimRequest, max_n: int, request_id: str) -> tuple[Any, ...]:
    """The claim arguments; lease and attempt ids are derived from the request id."""
    return (
        request.lane_id,
        f"{request.worker_id} {request.worker_instance_id}",
        request.capabilities,
        request.lease_ttl_ms,
        max_n,
        request_id[:32],
        # A second UUID of the request, different in its last group.
        f"{request_id[:24]}{request_id[28:36]}",
    )


def read_claims(request: ClaimRequest, rows: Sequence[Any]) -> list[Claim]:
    """The claims of a reply, without those that cannot be read: their leases expire."""
    lane, ttl, instance = request.lane_id, request.lease_ttl_ms, request.worker_instance_id
    claims: list[Claim] = []
    problem: ReplyError | None = None
    for row in rows:
        try:
            claims.append(claim_of(row, lane, ttl, instance))
        except (LookupError, TypeError, ValueError, AttributeError):
            subject = text(row[0]) if isinstance(row, list) and row else ""  # pyright: ignore[reportUnknownArgumentType]
            problem = unreadable(row, "ff_claim_many", "claim_many", subject)  # pyright: ignore[reportUnknownArgumentType]
            log.error(  # noqa: TRY400 - the message is complete
                "a claim cannot be read; its lease will expire: %s",
                problem,
                extra={"action": "claim_unreadable", "execution_id": subject},
            )
    if problem is not None and not claims:
        raise problem
    return claims
