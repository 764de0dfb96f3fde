"""Claiming work: from a lane, by a grant, or from a worker that lost its lease."""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts import leases
from flowfabric.core.contracts.flows import NO_INPUTS
from flowfabric.core.contracts.leases import (
    Candidate,
    Claim,
    ClaimedMany,
    ClaimGrant,
    Handle,
)
from flowfabric.core.contracts.steps import NO_STEPS
from flowfabric.core.errors import ConfigError, EngineError, ReplyError, ValidationError
from flowfabric.core.ids import ExecutionId, PartitionKey, new_uuid, validate_lane
from flowfabric.engine import metrics
from flowfabric.engine.api import check
from flowfabric.engine.api.admission import Block
from flowfabric.engine.api.claims import ClaimRequest, Claims, GrantOptions, worker_pair
from flowfabric.engine.api.executions import BATCH, End, EndOutcome
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.admission import ValkeyAdmission
from flowfabric.engine.valkey.calls import FunctionCalls, decoding, text, unreadable
from flowfabric.engine.valkey.eligible import EligibleScans
from flowfabric.engine.valkey.executions import ValkeyExecutions
from flowfabric.engine.valkey.flow_inputs import UNREAD, inputs_of, read_inputs
from flowfabric.engine.valkey.leases import Slot
from flowfabric.engine.valkey.steps import claimed_page

_NO_TAGS: dict[str, str] = {}
_MODES: dict[bytes, leases.HandleKind] = {b"f": "fresh", b"r": "resumed", b"c": "reclaimed"}
_NO_OPTIONAL_PARTS: tuple[Any, ...] = (None,) * 11
log = logging.getLogger(__name__)
_LOST_GRANT = frozenset({"invalid_claim_grant", "claim_grant_expired"})


class ValkeyClaims(Claims):
    """`Claims` on Valkey."""

    def __init__(
        self, calls: FunctionCalls, executions: ValkeyExecutions, admission: ValkeyAdmission
    ) -> None:
        self._calls = calls
        self._executions = executions
        self._admission = admission
        self._scans = EligibleScans(calls)

    async def claim_many(
        self, request: ClaimRequest, tag: str, max_n: int, *, request_id: str | None = None
    ) -> ClaimedMany:
        args = _claim_args(request, max_n, request_id)
        tag = self._calls.checked_tag(tag)
        if not args:
            return ClaimedMany([], 0)
        reply = await self._calls.fcall("ff_claim_many", tag, args, op="claim_many")
        with decoding(reply, "ff_claim_many", "claim_many"):
            claimed = _claimed(request, reply[2:])
        return await self._completed(claimed)

    async def complete_and_claim(
        self,
        tag: str,
        items: Sequence[End],
        request: ClaimRequest,
        max_n: int,
        *,
        request_id: str | None = None,
    ) -> tuple[list[EndOutcome], ClaimedMany]:
        items = check.listed(items, "items")
        claim = _claim_args(request, max_n, request_id)
        tag = self._calls.checked_tag(tag)
        outcomes: list[EndOutcome] = [None] * len(items)
        batch = self._executions.ends(items, outcomes, tag, failures=True).get(tag, ([], []))
        reply = await self._executions.end_in(tag, items, *batch, outcomes, claim)
        if not claim:
            return outcomes, ClaimedMany([], 0)
        with decoding(reply, "ff_complete", "complete_many"):
            claimed = _claimed(request, (*reply[3:6], *reply[7:]))
        return outcomes, await self._completed(claimed)

    async def claim_admitted(
        self,
        request: ClaimRequest,
        tag: str,
        candidates: Sequence[Candidate],
        *,
        request_id: str | None = None,
    ) -> list[Claim]:
        some = check.listed(candidates, "candidates")[:BATCH]
        known: list[Any] = []
        for each in some:
            check.instance(each, Candidate, "candidates")
            known += (self._calls.checked(each.execution_id, "candidates"),)
            known += (check.whole(each.run, "candidates", 1),)
        args = _claim_args(request, len(some), request_id)
        tag = self._calls.checked_tag(tag)
        if not args:
            return []
        function, op = "ff_claim_admitted", "claim_admitted"
        reply = await self._calls.fcall(function, tag, (*args, *known), op=op)
        with decoding(reply, function, op):
            claims = read_claims(request, reply[2])
        return (await self._completed(ClaimedMany(claims, 0))).claims

    async def _completed(self, claimed: ClaimedMany) -> ClaimedMany:
        """The claims with the inputs that did not fit into the reply, and with confirmed slots."""
        claims, slots = claimed.claims, dict[str, list[Slot]]()
        for claim in claims:
            if claim.quota_policy_id is not None:
                slots.setdefault(claim.quota_policy_id, []).append((claim.execution_id, claim.run))
        # First: they are leased, whether or not their inputs can be read.
        await self._admission.confirm(slots)
        for position, claim in enumerate(claims):
            if claim.inputs is UNREAD:
                inputs = await read_inputs(self._calls, claim.execution_id)
                claims[position] = msgspec.structs.replace(claim, inputs=inputs)
        return claimed

    async def _completed_one(self, claim: Claim) -> Claim:
        return (await self._completed(ClaimedMany([claim], 0))).claims[0]

    async def scan_eligible_executions(
        self,
        lane_id: str,
        tag: str,
        limit: int,
        worker_capabilities: Iterable[str] | None = None,
        worker_tasks: Iterable[str] = (),
        namespaces: Iterable[str] | None = None,
        *,
        lost: bool = False,
        without: Iterable[str] = (),
    ) -> list[ExecutionId]:
        return await self._scans.scan(
            *(lane_id, tag, limit, worker_capabilities, worker_tasks, namespaces, without),
            lost=check.flag(lost, "lost"),
        )

    async def issue_claim_grant(
        self, execution_id: ExecutionId, **options: Unpack[GrantOptions]
    ) -> ClaimGrant:
        grant = await self._grant("issue_claim_grant", execution_id, **options)
        return ClaimGrant(
            execution_id=grant.execution_id,
            partition_key=grant.partition_key,
            grant_key=grant.grant_key,
            expires_at_ms=grant.expires_at_ms,
        )

    async def issue_reclaim_grant(
        self, execution_id: ExecutionId, **options: Unpack[GrantOptions]
    ) -> leases.ReclaimGrantOutcome:
        try:
            grant = await self._grant("issue_reclaim_grant", execution_id, **options)
        except EngineError as error:
            return _not_reclaimable(ExecutionId(execution_id), error)
        return leases.Granted(grant)

    async def _grant(
        self,
        op: str,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        worker_tasks: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        lane_id: str = "",
        admitted: int = 0,
        lost: bool = False,
        capability_hash: str = "",
        route_snapshot_json: str = "",
        admission_summary: str = "",
    ) -> leases.ReclaimGrant:
        ttl = check.positive_ms(grant_ttl_ms, "grant_ttl_ms")
        execution_id = self._calls.checked(execution_id)
        if check.text(lane_id, "lane_id"):
            validate_lane(lane_id)
        csv, problem = _offered(worker_capabilities)
        tasks = caps.offered_csv((), check.texts(worker_tasks, "worker_tasks"), no_others=False)
        token = new_uuid()
        args = (
            *(execution_id, lane_id, worker_pair(worker_id, worker_instance_id), csv, ttl, token),
            check.text(capability_hash, "capability_hash"),
            check.text(route_snapshot_json, "route_snapshot_json"),
            check.text(admission_summary, "admission_summary"),
            problem,
            tasks,
            check.whole(admitted, "admitted", 0) or "",
            "1" if check.flag(lost, "lost") else "",
        )
        try:
            return await self._calls.ask(
                *(f"ff_{op}", execution_id.tag, args),
                lambda reply: leases.ReclaimGrant(
                    execution_id=execution_id,
                    partition_key=execution_id.tag,
                    grant_key=f"{keys.grant(execution_id.tag, execution_id)}#{token}",
                    expires_at_ms=int(reply[2]),
                    lane_id=text(reply[3]),
                ),
            )
        except EngineError as error:
            if error.code == "capability_mismatch":
                _log_mismatch(execution_id, worker_id, csv, error.detail)
            raise

    async def release_grant(self, grant: ClaimGrant) -> None:
        execution_id = self._granted(grant)
        await self._calls.ask_about(
            *(execution_id, "ff_release_grant", (_token(grant),)),
            lambda reply: reply[2],
            op="release_grant",
        )

    async def _claim(
        self, op: str, grant: ClaimGrant, lane: str, worker: tuple[str, str], ttl: int, *ids: str
    ) -> Claim:
        execution_id = self._granted(grant)
        args = (lane, worker_pair(*worker), _token(grant), ttl, *ids)
        claim = await self._calls.ask_about(
            *(execution_id, f"ff_{op}", args),
            lambda reply: _single_claim(reply[2], text(reply[3]), ttl, worker[1]),
        )
        return await self._completed_one(claim)

    def _granted(self, grant: ClaimGrant) -> ExecutionId:
        check.instance(grant, ClaimGrant, "grant")
        try:
            key = PartitionKey.parse(grant.partition_key)
        except EngineError as error:
            raise ConfigError("grant", error.detail, "partition_key") from error
        execution_id = self._calls.checked(grant.execution_id)
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
        ttl = check.positive_ms(lease_duration_ms, "lease_duration_ms")
        worker = worker_pair(worker_id, worker_instance_id)
        lease_id = check.uuid(request_id, "request_id")
        # Derived, so that a repeat of the request names the same attempt.
        attempt_id = f"{lease_id[24:32]}{lease_id[8:24]}{lease_id[:8]}{lease_id[32:]}"
        args = (check.text(lane_id, "lane_id"), worker, ttl, lease_id, attempt_id)
        claim = await self._calls.ask_about(
            *(execution_id, "ff_grant_and_claim", args),
            lambda reply: _single_claim(reply[2], text(reply[3]), ttl, worker_instance_id),
            op="issue_grant_and_claim",
        )
        return await self._completed_one(claim)

    async def reclaim_execution(
        self,
        grant: leases.ReclaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        max_reclaim_count: int | None = None,
        lease_id: str | None = None,
        attempt_id: str | None = None,
    ) -> leases.ReclaimOutcome:
        execution_id = self._granted(check.instance(grant, leases.ReclaimGrant, "grant"))
        check.whole(grant.expires_at_ms, "expires_at_ms")
        ttl = check.positive_ms(lease_ttl_ms, "lease_ttl_ms")
        args = (
            check.text(grant.lane_id, "lane_id"),
            worker_pair(worker_id, worker_instance_id),
            _token(grant),
            ttl,
            check.uuid(lease_id, "lease_id"),
            check.uuid(attempt_id, "attempt_id"),
            check.count(max_reclaim_count, "max_reclaim_count"),
        )
        try:
            claim = await self._calls.ask_about(
                *(execution_id, "ff_reclaim", args),
                lambda reply: _single_claim(reply[2], grant.lane_id, ttl, worker_instance_id),
                op="reclaim_execution",
            )
        except EngineError as error:
            if error.code in _LOST_GRANT:
                return leases.GrantNotFound(execution_id)
            return _not_reclaimable(execution_id, error)
        return await self._completed_one(claim)

    async def block_execution_for_admission(
        self,
        execution_id: ExecutionId,
        reason: str,
        reason_detail: str = "",
        *,
        lane_id: str = "",
        retry_at: int | None = None,
    ) -> leases.BlockOutcome:
        known = self._calls.checked(execution_id)
        block = Block(execution_id=known, reason=reason, detail=reason_detail, retry_at=retry_at)
        return await self._admission.block(block, check.text(lane_id, "lane_id"))

    async def unblock_execution(
        self, execution_id: ExecutionId, *, expected_blocking_reason: str = ""
    ) -> leases.Unblocked:
        known = self._calls.checked(execution_id)
        expected = check.text(expected_blocking_reason, "expected_blocking_reason")
        return leases.Unblocked(known, await self._admission.unblock(known, expected))


def _claim_args(request: ClaimRequest, max_n: int, request_id: str | None) -> tuple[Any, ...]:
    """The arguments of a claim, or nothing when nothing is to be claimed."""
    check.instance(request, ClaimRequest, "request")
    most = min(check.whole(max_n, "max_n"), BATCH)
    identity = check.uuid(request_id, "request_id")
    return claim_args(request, most, identity) if most > 0 else ()


def _token(grant: ClaimGrant) -> str:
    return check.text(grant.grant_key, "grant_key").rpartition("#")[2]


def _offered(tokens: Any) -> tuple[str, str]:
    """The worker's tokens as CSV, and what is wrong with them.

    The function reports the problem, because other checks come first.
    """
    try:
        return caps.to_csv(caps.normalise(tokens, "worker")), ""
    except ValidationError as error:
        return "", error.detail


def _log_mismatch(execution_id: ExecutionId, worker_id: str, csv: str, missing: str) -> None:
    log.info(
        "worker %s does not offer %s",
        *(worker_id, missing),
        extra={
            "action": "capability_mismatch",
            "execution_id": execution_id,
            "worker_id": worker_id,
            "worker_caps_hash": caps.log_digest(csv),
            "required": missing,
        },
    )


def _not_reclaimable(
    execution_id: ExecutionId, error: EngineError
) -> leases.NotReclaimable | leases.ReclaimCapExceeded:
    """What a refusal says about the execution; raises one that says nothing about it."""
    if error.code == "execution_not_reclaimable":
        return leases.NotReclaimable(execution_id, error.code)
    if error.code == "capability_mismatch":
        return leases.NotReclaimable(execution_id, f"capability_mismatch: {error.detail}")
    if error.code == "max_retries_exhausted":
        return leases.ReclaimCapExceeded(execution_id, int(error.details[0]))
    raise error


def claim_of(row: Sequence[Any], lane: str, ttl: int, instance: str) -> Claim:
    """One claim from its positional form; parts that this version does not know are skipped."""
    optional_parts = (row[8] if len(row) > 8 else None) or _NO_OPTIONAL_PARTS
    if len(optional_parts) != len(_NO_OPTIONAL_PARTS):
        # Another library version may send more or fewer.
        optional_parts = (*optional_parts, *_NO_OPTIONAL_PARTS)[: len(_NO_OPTIONAL_PARTS)]
    attempt_type, tags, namespace, timeout, deadline, cause, flow_id, inputs, *more = optional_parts
    quota, run, steps = more
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
        flow_id=None if flow_id is None else flow_id.decode(),
        inputs=NO_INPUTS if inputs is None else inputs_of(inputs),
        quota_policy_id=None if quota is None else quota.decode(),
        run=run or 0,
        steps=NO_STEPS if steps is None else claimed_page(steps),
    )


def _cause(parts: Sequence[bytes | None]) -> leases.ResumeCause:
    known = (None if part is None else text(part) for part in parts[:4])
    suspension_id, trigger, close_reason, closer = known
    return leases.ResumeCause(suspension_id or "", trigger or "", close_reason or "", closer)


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}


def _offered_by(request: ClaimRequest) -> str:
    spaces = request.namespaces
    return request.capabilities if spaces is None else " ".join((request.capabilities, *spaces))


def claim_args(request: ClaimRequest, max_n: int, request_id: str) -> tuple[Any, ...]:
    """The claim arguments; lease and attempt ids are derived from the request id."""
    return (
        request.lane_id,
        f"{request.worker_id} {request.worker_instance_id}",
        _offered_by(request),
        request.lease_ttl_ms,
        max_n,
        request_id[:32],
        # A second UUID of the request, different in its last group.
        f"{request_id[:24]}{request_id[28:36]}",
    )


def _claimed(request: ClaimRequest, reply: Sequence[Any]) -> ClaimedMany:
    rows, remaining, unknown, *more = reply
    left = int(remaining)
    return ClaimedMany(
        read_claims(request, rows),
        max(0, left),
        tuple(map(text, unknown)) if unknown else (),
        tuple(map(_candidate, more[-1])) if more and more[-1] else (),
        draining=left < 0,
    )


def _candidate(row: Sequence[Any]) -> Candidate:
    execution_id, budgets, quota, score, run = row
    return Candidate(
        ExecutionId.trusted(text(execution_id)),
        () if budgets is None else tuple(text(budgets).split(",")),
        None if quota is None else text(quota),
        int(score),
        int(run),
    )


def _observe_waits(rows: Sequence[Any], lane: str, ttl: int) -> None:
    """Measure how long each execution could have been claimed before it was."""
    if (meter := metrics.active()) is None:
        return
    with contextlib.suppress(LookupError, TypeError, ValueError):
        for row in rows:
            if len(row) > 9:
                waited_ms = int(row[7]) - ttl - int(row[9])
                meter.observe("ff_claim_wait_seconds", max(0, waited_ms) / 1000, lane)


def _single_claim(row: Sequence[Any], lane: str, ttl: int, instance: str) -> Claim:
    claim = claim_of(row, lane, ttl, instance)
    _observe_waits((row,), lane, ttl)
    return claim


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
    _observe_waits(rows, lane, ttl)
    if problem is not None and not claims:
        raise problem
    return claims
