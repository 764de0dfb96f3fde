"""Suspensions, waitpoints and signals: inputs and results."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from flowfabric.core.conditions import AcceptedSignal
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.core.state import PublicState


class FreshWaitpoint(msgspec.Struct, frozen=True):
    """A new waitpoint to be made by the suspension; the primary one needs no key of its own."""

    waitpoint_id: str
    waitpoint_key: str = ""


class UsePending(msgspec.Struct, frozen=True):
    """A waitpoint that exists already; its key and token are the stored ones."""

    waitpoint_id: str


class ResumePolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stored as given; only the delay has an effect."""

    resume_target: str = "runnable"
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    close_waitpoint_on_resume: bool = True
    resume_delay_ms: int | None = None


class WaitpointDetails(msgspec.Struct, frozen=True):
    """One waitpoint with the credential that lets somebody signal it."""

    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: WaitpointToken


class SuspensionDetails(msgspec.Struct, frozen=True):
    """What a suspension made: hand the tokens to whoever shall answer."""

    suspension_id: str
    waitpoints: tuple[WaitpointDetails, ...]

    @property
    def waitpoint_id(self) -> str:
        """The primary waitpoint."""
        return self.waitpoints[0].waitpoint_id

    @property
    def waitpoint_key(self) -> str:
        """The primary waitpoint's logical name."""
        return self.waitpoints[0].waitpoint_key

    @property
    def waitpoint_token(self) -> WaitpointToken:
        """The primary waitpoint's credential."""
        return self.waitpoints[0].waitpoint_token

    @property
    def additional_waitpoints(self) -> tuple[WaitpointDetails, ...]:
        """The others, in input order."""
        return self.waitpoints[1:]


class Suspended(msgspec.Struct, frozen=True):
    """The lease is gone; the attempt resumes when the condition is met."""

    kind: ClassVar[Literal["suspended"]] = "suspended"
    details: SuspensionDetails
    handle: Handle


class AlreadySatisfiedSuspension(msgspec.Struct, frozen=True):
    """Buffered signals satisfied the condition: nothing was parked, the lease is kept."""

    kind: ClassVar[Literal["already_satisfied"]] = "already_satisfied"
    details: SuspensionDetails
    closer_signal_id: str
    """The signal that completed the condition."""


SuspendOutcome = Suspended | AlreadySatisfiedSuspension


class PendingWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint that buffers signals until a suspension uses it."""

    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: WaitpointToken


class Accepted(msgspec.Struct, frozen=True):
    """The signal was recorded; `effect` says what it did."""

    kind: ClassVar[Literal["accepted"]] = "accepted"
    signal_id: str
    effect: str

    @property
    def resumed(self) -> bool:
        """Whether this signal ended the suspension."""
        return self.effect == "resume_condition_satisfied"


class Duplicate(msgspec.Struct, frozen=True):
    """The same signal was accepted before; nothing was written."""

    kind: ClassVar[Literal["duplicate"]] = "duplicate"
    existing_signal_id: str


SignalOutcome = Accepted | Duplicate


class TriggeredResume(msgspec.Struct, frozen=True):
    """The signal was accepted and ended the suspension."""

    kind: ClassVar[Literal["triggered_resume"]] = "triggered_resume"
    signal_id: str


class Resumed(msgspec.Struct, frozen=True):
    """The suspension was ended by hand."""

    kind: ClassVar[Literal["resumed"]] = "resumed"
    public_state: PublicState


class ResumeSignal(AcceptedSignal, frozen=True, kw_only=True):
    """A signal that helped to satisfy the condition."""

    signal_category: str
    correlation_id: str
    accepted_at: int
    payload: bytes | None
    payload_encoding: str


class OpenWaitpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A pending or active waitpoint, without its token."""

    waitpoint_id: str
    waitpoint_key: str
    state: str
    required_signal_names: tuple[str, ...]
    created_at: int
    execution_id: ExecutionId
    token_kid: str
    token_fingerprint: str
    activated_at: int | None = None
    expires_at: int | None = None


class OpenWaitpoints(msgspec.Struct, frozen=True):
    """One page of waitpoints."""

    entries: tuple[OpenWaitpoint, ...]
    next_cursor: str | None = None
    damaged: tuple[str, ...] = ()
    """What was left out because it cannot be read."""


class PastWait(msgspec.Struct, frozen=True, kw_only=True):
    """A waitpoint of a running handler's execution, with what became of it."""

    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: WaitpointToken
    state: str
    attempt_index: int
    close_reason: str
    closed_at: int
    ended: bool
    """Whether a wait on it has ended; one that was never waited on may be closed too."""
    signal_ids: tuple[str, ...]
    signals: tuple[ResumeSignal, ...] | None = None
    """What it received, when that was read along."""

    @property
    def timed_out(self) -> bool:
        """Whether the wait ended because nobody answered in time."""
        return self.close_reason.startswith("timed_out")


class SuspendedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A suspended execution as listed."""

    execution_id: ExecutionId
    lane_id: str
    reason: str
    suspension_id: str
    requested_by: str
    suspended_at: int
    timeout_at: int | None = None


class SuspendedPage(msgspec.Struct, frozen=True):
    """One page of suspended executions."""

    entries: tuple[SuspendedEntry, ...]
    next_cursor: str | None = None
    damaged: tuple[str, ...] = ()
    """What was left out because it cannot be read."""


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rotation on one partition."""

    partition: int
    status: Literal["rotated", "noop", "in_progress", "conflict", "failed"]
    previous_kid: str | None = None
    gc_count: int | None = None
    error: str | None = None


class RotationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The rotation on all partitions."""

    new_kid: str
    entries: tuple[Rotation, ...]

    @property
    def rotated(self) -> int:
        """Partitions that now use the new secret."""
        return sum(entry.status in ("rotated", "noop") for entry in self.entries)

    @property
    def failed(self) -> tuple[int, ...]:
        """Partitions that do not."""
        return tuple(e.partition for e in self.entries if e.status in ("failed", "conflict"))


class HmacKid(msgspec.Struct, frozen=True):
    """A past signing key that still verifies."""

    kid: str
    expires_at_ms: int


class HmacKids(msgspec.Struct, frozen=True):
    """The signing keys of a partition, without their secrets."""

    current_kid: str | None
    verifying: tuple[HmacKid, ...]


class SeedOutcome(msgspec.Struct, frozen=True):
    """What seeding found, in numbers of partitions."""

    installed: int = 0
    match: int = 0
    mismatch: int = 0
    repaired: int = 0
    torn: int = 0
    """A current key without its secret, and no proof that the configured one is it."""
    empty: int = 0
    """Nothing stored and nothing configured: suspensions are refused."""


class Seeded(msgspec.Struct, frozen=True):
    """The secret was installed somewhere; `different` partitions keep another one of that kid."""

    kind: ClassVar[Literal["seeded"]] = "seeded"
    kid: str
    different: tuple[int, ...] = ()


class AlreadySeeded(msgspec.Struct, frozen=True):
    """Every partition had a secret of this kid before."""

    kind: ClassVar[Literal["already_seeded"]] = "already_seeded"
    kid: str
    same_secret: bool


SeedResult = Seeded | AlreadySeeded
