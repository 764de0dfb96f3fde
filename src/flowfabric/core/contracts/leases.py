"""Fences, handles, claims, grants and the results of lease operations."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Literal, Self

import msgspec

from flowfabric.core.contracts import NamedOutcome
from flowfabric.core.contracts.flows import NO_INPUTS, FlowInputs
from flowfabric.core.contracts.steps import NO_STEPS, StepPage
from flowfabric.core.errors import CorruptionError, ValidationError
from flowfabric.core.ids import ExecutionId, validate_lane, validate_uuid
from flowfabric.core.state import PublicState

HandleKind = Literal["fresh", "resumed", "suspended", "reclaimed"]

_BACKENDS = {0x01: "valkey", 0x02: "postgres", 0x03: "sqlite"}
# Version 2, its format, the tag of this backend. The older form is the format alone.
_HEAD = bytes((0x02, 0x01, 0x01))
# Small enough that a million leases stay below 2**53, which every language can represent.
_FRAMES_OF_ONE_LEASE = 2**32


class Fence(msgspec.Struct, frozen=True):
    """Proof of ownership: lease, epoch and attempt. Only operators may pass an empty one."""

    lease_id: str = ""
    lease_epoch: int | None = None
    attempt_id: str = ""
    attempt_index: int | None = None

    @property
    def wire(self) -> str:
        """The form that the functions compare."""
        epoch = "" if self.lease_epoch is None else self.lease_epoch
        index = "" if self.attempt_index is None else self.attempt_index
        return f"{self.lease_id}/{epoch}/{self.attempt_id}/{index}"


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What a claim returns and every operation of the worker takes."""

    execution_id: ExecutionId
    lease: str
    attempt: str
    lease_ttl_ms: int
    lane_id: str
    worker_instance_id: str
    kind: HandleKind = "fresh"
    backend: str = "valkey"

    @property
    def wire(self) -> str:
        """The fence in the form that the functions compare."""
        return f"{self.lease}/{self.attempt}"

    @property
    def lease_id(self) -> str:
        """The lease this handle proves."""
        return self.lease[:36]

    @property
    def lease_epoch(self) -> int:
        """Grows with every lease of the execution; a fencing token for other systems."""
        return int(self.lease[37:])

    @property
    def seq_base(self) -> int:
        """Number the frames of this lease from here: all earlier leases had lower numbers."""
        return self.lease_epoch * _FRAMES_OF_ONE_LEASE

    @property
    def attempt_id(self) -> str:
        """The attempt this lease runs."""
        return self.attempt[:36]

    @property
    def attempt_index(self) -> int:
        """Zero-based number of the attempt."""
        return int(self.attempt[37:])

    @property
    def fence(self) -> Fence:
        """The fence as separate parts."""
        return Fence(self.lease_id, self.lease_epoch, self.attempt_id, self.attempt_index)

    @property
    def opaque(self) -> bytes:
        """The handle as bytes, to be stored; `Handle.decode` reads them."""
        attempt = _number(self.attempt_index, 4) + _text(self.attempt_id)
        lease = _text(self.lease_id) + _number(self.lease_epoch, 8) + _number(self.lease_ttl_ms, 8)
        place = _text(self.lane_id) + _text(self.worker_instance_id)
        return _HEAD + _text(self.execution_id) + attempt + lease + place

    @classmethod
    def decode(cls, opaque: bytes, kind: HandleKind = "fresh") -> Self:
        """The handle of these bytes; malformed bytes are `corruption`."""
        source = BytesIO(opaque)
        try:
            backend = _read_backend(source)
            if backend == "valkey":
                return cls(**_read_fields(source), kind=kind)
        except (ValueError, ValidationError) as error:
            problem = error.detail if isinstance(error, ValidationError) else error
            raise CorruptionError("corruption", f"handle_codec: {problem}") from error
        raise ValidationError("handle_from_other_backend", f"expected=valkey actual={backend}")

    def __repr__(self) -> str:
        return f"Handle({self.execution_id}, attempt {self.attempt_index}, kind={self.kind})"


def _number(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def _text(value: str) -> bytes:
    raw = value.encode()
    return _number(len(raw), 4) + raw


def _read(source: BytesIO, size: int) -> bytes:
    raw = source.read(size)
    if len(raw) != size:
        raise ValueError("truncated")
    return raw


def _read_number(source: BytesIO, size: int) -> int:
    return int.from_bytes(_read(source, size), "little")


def _read_text(source: BytesIO) -> str:
    return _read(source, _read_number(source, 4)).decode()


def _read_backend(source: BytesIO) -> str:
    version, tag = _read_number(source, 1), _HEAD[2]
    if version == _HEAD[0]:
        version, tag = _read(source, 2)
    if version != _HEAD[1]:
        raise ValueError(f"unknown version {version}")
    if tag not in _BACKENDS:
        raise ValueError(f"unknown backend tag {tag}")
    return _BACKENDS[tag]


def _read_fields(source: BytesIO) -> dict[str, Any]:
    execution_id = ExecutionId(_read_text(source))
    attempt_index = _read_number(source, 4)
    attempt_id = validate_uuid(_read_text(source), "attempt_id")
    lease_id = validate_uuid(_read_text(source), "lease_id")
    fields = {
        "execution_id": execution_id,
        "attempt": f"{attempt_id}/{attempt_index}",
        "lease": f"{lease_id}/{_read_number(source, 8)}",
        "lease_ttl_ms": _read_number(source, 8),
        "lane_id": validate_lane(_read_text(source)),
        "worker_instance_id": _read_text(source),
    }
    if source.read(1):
        raise ValueError("trailing bytes")
    return fields


class ResumeCause(msgspec.Struct, frozen=True):
    """Why an attempt continues after a suspension."""

    suspension_id: str
    trigger: str
    """`signal`, `operator`, `timeout`, or `already_satisfied`: it never paused."""
    close_reason: str
    closer_signal_id: str | None = None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed attempt with everything its handler needs."""

    handle: Handle
    execution_kind: str
    attempt_type: str
    input_payload: bytes
    payload_encoding: str
    tags: Mapping[str, str]
    namespace: str
    lease_expires_at: int
    attempt_timeout_ms: int | None
    """The time left for the attempt; a resumed one has less than its policy says."""
    execution_deadline_at: int | None = None
    resume_cause: ResumeCause | None = None
    flow_id: str | None = None
    inputs: FlowInputs = NO_INPUTS
    """The results of upstreams in the flow, by input name."""
    steps: StepPage = NO_STEPS
    """The first step records of the execution."""
    quota_policy_id: str | None = None
    run: int = 0
    """The number of the run, if it has a quota policy: its slot belongs to this run."""

    @property
    def execution_id(self) -> ExecutionId:
        """The claimed execution."""
        return self.handle.execution_id

    @property
    def attempt_index(self) -> int:
        """Zero-based number of the attempt."""
        return self.handle.attempt_index


class Candidate(msgspec.Struct, frozen=True):
    """A waiting execution that names budgets or a quota policy, so it needs admission."""

    execution_id: ExecutionId
    budget_ids: tuple[str, ...] = ()
    quota_policy_id: str | None = None
    score: int = 0
    """Its place in the lane: the lowest is next."""
    run: int = 1
    """The number of the run that it waits for; every lease and every replay raises it."""


class ClaimedMany(msgspec.Struct, frozen=True):
    """The claims of one call, and how many more this worker could have taken."""

    claims: list[Claim]
    remaining: int
    unknown_tasks: Sequence[str] = ()
    """The tasks that this worker does not know and left to others."""
    needing: Sequence[Candidate] = ()
    """Executions that were not claimed because they need admission first, best first."""
    draining: bool = False
    """An operator drains this worker: it gets nothing more."""

    @property
    def worth_repeating(self) -> bool:
        """Whether another call is likely to find more for this worker."""
        return self.remaining > 0 and bool(self.claims or self.unknown_tasks)


class ClaimGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to turn one eligible execution into a lease."""

    execution_id: ExecutionId
    partition_key: str
    grant_key: str
    expires_at_ms: int

    def to_reclaim(self, lane_id: str) -> "ReclaimGrant":
        """The same grant, for an execution whose lease was lost."""
        return ReclaimGrant(
            execution_id=self.execution_id,
            partition_key=self.partition_key,
            grant_key=self.grant_key,
            expires_at_ms=self.expires_at_ms,
            lane_id=lane_id,
        )


class NoWork(NamedOutcome[Literal["no_work"]], frozen=True):
    """Nothing that the worker may take waits in the partitions that were visited."""


class ResumeGrant(ClaimGrant, frozen=True, kw_only=True):
    """Permission to take over a paused attempt."""

    lane_id: str


class ReclaimGrant(ResumeGrant, frozen=True, kw_only=True):
    """Permission to take over an execution whose lease was lost."""


class Renewed(NamedOutcome[Literal["renewed"]], frozen=True):
    """The lease now ends at `expires_at`."""

    expires_at: int
    lease_epoch: int


class Revoked(NamedOutcome[Literal["revoked"]], frozen=True):
    """The lease was revoked."""

    lease_id: str
    lease_epoch: int


class AlreadySatisfied(NamedOutcome[Literal["already_satisfied"]], frozen=True):
    """There was nothing to do; `reason` says why."""

    reason: str


RevokeOutcome = Revoked | AlreadySatisfied


class Granted(NamedOutcome[Literal["granted"]], frozen=True):
    """A reclaim grant was written."""

    grant: ReclaimGrant


class NotReclaimable(NamedOutcome[Literal["not_reclaimable"]], frozen=True):
    """The execution cannot be reclaimed by this worker now."""

    execution_id: ExecutionId
    detail: str


class ReclaimCapExceeded(NamedOutcome[Literal["reclaim_cap_exceeded"]], frozen=True):
    """The execution lost its worker too often and failed."""

    execution_id: ExecutionId
    reclaim_count: int


class GrantNotFound(NamedOutcome[Literal["grant_not_found"]], frozen=True):
    """The grant is missing, expired, used, or belongs to another worker."""

    execution_id: ExecutionId


class Blocked(NamedOutcome[Literal["blocked"]], frozen=True):
    """The execution is blocked for this reason."""

    execution_id: ExecutionId
    reason: str


class Rejected(NamedOutcome[Literal["rejected"]], frozen=True):
    """The engine refused to hold the execution back, for example because it is running."""

    code: str


class Unblocked(NamedOutcome[Literal["unblocked"]], frozen=True):
    """The execution waits for a worker again, or was cancelled with its flow."""

    execution_id: ExecutionId
    public_state: PublicState


BlockOutcome = Blocked | Rejected
ReclaimGrantOutcome = Granted | NotReclaimable | ReclaimCapExceeded
ReclaimOutcome = Claim | NotReclaimable | ReclaimCapExceeded | GrantNotFound
