"""Fences, handles, claims, grants and the results of lease operations."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from flowfabric.core.errors import CorruptionError, FlowFabricError, ValidationError
from flowfabric.core.ids import ExecutionId, validate_lane, validate_uuid

HandleKind = Literal["fresh", "resumed", "suspended", "reclaimed"]

_VERSION_2 = 0x02
_FORMAT = 0x01
_BACKENDS = {0x01: "valkey", 0x02: "postgres", 0x03: "sqlite"}
_VALKEY = 0x01
_NUMBERS = struct.Struct("<IQQ")


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
        numbers = _NUMBERS.pack(self.attempt_index, self.lease_epoch, self.lease_ttl_ms)
        index, lease_numbers = numbers[:4], numbers[4:]
        parts = (
            *(_text(self.execution_id), index, _text(self.attempt_id), _text(self.lease_id)),
            *(lease_numbers, _text(self.lane_id), _text(self.worker_instance_id)),
        )
        return bytes((_VERSION_2, _FORMAT, _VALKEY)) + b"".join(parts)

    @classmethod
    def decode(cls, opaque: bytes, kind: HandleKind = "fresh") -> Handle:
        """The handle of these bytes; malformed bytes are `corruption`."""
        try:
            return _decode(opaque, kind)
        except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
            raise _malformed(str(error)) from error
        except ValidationError as error:
            if error.code == "handle_from_other_backend":
                raise
            raise _malformed(error.detail) from error

    def __repr__(self) -> str:
        return f"Handle({self.execution_id}, attempt {self.attempt_index}, kind={self.kind})"


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


def _malformed(problem: str) -> FlowFabricError:
    return CorruptionError("corruption", f"handle_codec: {problem}")


class _Reader:
    """Reads the little-endian fields of a handle in order."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self, form: Literal["<I", "<Q"]) -> int:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def text(self) -> str:
        size = self.number("<I")
        raw = self.data[self.at : self.at + size]
        if len(raw) != size:
            raise ValueError("truncated")
        self.at += size
        return raw.decode()


def _decode(opaque: bytes, kind: HandleKind) -> Handle:
    reader = _Reader(opaque)
    if opaque[0] == _VERSION_2:
        if opaque[1] != _FORMAT:
            raise ValueError(f"unknown version {opaque[1]}")
        backend = _BACKENDS.get(opaque[2])
        if backend is None:
            raise ValueError(f"unknown backend tag {opaque[2]}")
        if backend != "valkey":
            raise ValidationError("handle_from_other_backend", f"expected=valkey actual={backend}")
        reader.at = 3
    elif opaque[0] == _FORMAT:
        reader.at = 1
    else:
        raise ValueError(f"unknown version {opaque[0]}")
    execution_id = ExecutionId.parse(reader.text())
    attempt_index = reader.number("<I")
    attempt_id = validate_uuid(reader.text(), "attempt_id")
    lease_id = validate_uuid(reader.text(), "lease_id")
    epoch = reader.number("<Q")
    ttl = reader.number("<Q")
    lane = validate_lane(reader.text())
    instance = reader.text()
    if reader.at != len(opaque):
        raise ValueError("trailing bytes")
    return Handle(
        execution_id=execution_id,
        lease=f"{lease_id}/{epoch}",
        attempt=f"{attempt_id}/{attempt_index}",
        lease_ttl_ms=ttl,
        lane_id=lane,
        worker_instance_id=instance,
        kind=kind,
    )


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

    @property
    def execution_id(self) -> ExecutionId:
        """The claimed execution."""
        return self.handle.execution_id

    @property
    def attempt_index(self) -> int:
        """Zero-based number of the attempt."""
        return self.handle.attempt_index


class ClaimedMany(msgspec.Struct, frozen=True):
    """The claims of one call, and how many more this worker could have taken."""

    claims: list[Claim]
    remaining: int


class ClaimGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to turn one eligible execution into a lease."""

    execution_id: ExecutionId
    partition_key: str
    grant_key: str
    expires_at_ms: int


class ResumeGrant(ClaimGrant, frozen=True, kw_only=True):
    """Permission to take over a paused attempt."""

    lane_id: str


class ReclaimGrant(ClaimGrant, frozen=True, kw_only=True):
    """Permission to take over an execution whose lease was lost."""

    lane_id: str


class Renewed(msgspec.Struct, frozen=True):
    """The lease now ends at `expires_at`."""

    kind: ClassVar[Literal["renewed"]] = "renewed"
    expires_at: int
    lease_epoch: int


class Revoked(msgspec.Struct, frozen=True):
    """The lease was revoked."""

    kind: ClassVar[Literal["revoked"]] = "revoked"
    lease_id: str
    lease_epoch: int


class AlreadySatisfied(msgspec.Struct, frozen=True):
    """There was nothing to do; `reason` says why."""

    kind: ClassVar[Literal["already_satisfied"]] = "already_satisfied"
    reason: str


RevokeOutcome = Revoked | AlreadySatisfied


class Granted(msgspec.Struct, frozen=True):
    """A reclaim grant was written."""

    kind: ClassVar[Literal["granted"]] = "granted"
    grant: ReclaimGrant


class NotReclaimable(msgspec.Struct, frozen=True):
    """The execution cannot be reclaimed by this worker now."""

    kind: ClassVar[Literal["not_reclaimable"]] = "not_reclaimable"
    execution_id: ExecutionId
    detail: str


class ReclaimCapExceeded(msgspec.Struct, frozen=True):
    """The execution lost its worker too often and failed."""

    kind: ClassVar[Literal["reclaim_cap_exceeded"]] = "reclaim_cap_exceeded"
    execution_id: ExecutionId
    reclaim_count: int


class GrantNotFound(msgspec.Struct, frozen=True):
    """The grant is missing, expired, used, or belongs to another worker."""

    kind: ClassVar[Literal["grant_not_found"]] = "grant_not_found"
    execution_id: ExecutionId


ReclaimGrantOutcome = Granted | NotReclaimable | ReclaimCapExceeded
ReclaimOutcome = Claim | NotReclaimable | ReclaimCapExceeded | GrantNotFound
