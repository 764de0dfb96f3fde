"""Suspensions, waitpoints and signals: inputs and results."""

from typing import Any, Literal

import msgspec

from flowfabric.core.conditions import AcceptedSignal
from flowfabric.core.contracts import ListingPage, NamedOutcome
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.core.state import PublicState


class FreshWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint that the suspension creates; the primary one needs no key."""

    waitpoint_id: str
    waitpoint_key: str = ""


class UsePending(msgspec.Struct, frozen=True):
    """An existing waitpoint, with its stored key and token."""

    waitpoint_id: str


class ResumePolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the execution resumes; only the delay has an effect."""

    resume_target: str = "runnable"
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    close_waitpoint_on_resume: bool = True
    resume_delay_ms: int | None = None


class WaitpointDetails(msgspec.Struct, frozen=True):
    """A waitpoint, with the token that allows signals to it."""

    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: WaitpointToken


class SuspensionDetails(msgspec.Struct, frozen=True):
    """The waitpoints of a suspension; pass their tokens to the senders of signals."""

    suspension_id: str
    waitpoints: tuple[WaitpointDetails, ...]

    @property
    def waitpoint_id(self) -> str:
        """The primary waitpoint."""
        return self.waitpoints[0].waitpoint_id

    @property
    def waitpoint_key(self) -> str:
        """The key of the primary waitpoint."""
        return self.waitpoints[0].waitpoint_key

    @property
    def waitpoint_token(self) -> WaitpointToken:
        """The token of the primary waitpoint."""
        return self.waitpoints[0].waitpoint_token


class Suspended(NamedOutcome[Literal["suspended"]], frozen=True):
    """The lease was released; the attempt resumes when the condition is met."""

    details: SuspensionDetails
    handle: Handle


class AlreadySatisfiedSuspension(NamedOutcome[Literal["already_satisfied"]], frozen=True):
    """Buffered signals had satisfied the condition; the worker keeps the lease."""

    details: SuspensionDetails
    closer_signal_id: str
    """The signal that completed the condition."""


SuspendOutcome = Suspended | AlreadySatisfiedSuspension


class PendingWaitpoint(WaitpointDetails, frozen=True):
    """A waitpoint that stores signals until a suspension uses it."""


class Accepted(NamedOutcome[Literal["accepted"]], frozen=True):
    """The signal was recorded; `effect` says what it did."""

    signal_id: str
    effect: str

    @property
    def resumed(self) -> bool:
        """Whether this signal ended the suspension."""
        return self.effect == "resume_condition_satisfied"


class DuplicateSignal(NamedOutcome[Literal["duplicate"]], frozen=True):
    """The same signal was accepted before; nothing was written."""

    existing_signal_id: str


SignalOutcome = Accepted | DuplicateSignal


class TriggeredResume(NamedOutcome[Literal["triggered_resume"]], frozen=True):
    """The signal was accepted and ended the suspension."""

    signal_id: str


class Resumed(NamedOutcome[Literal["resumed"]], frozen=True):
    """An operator ended the suspension."""

    public_state: PublicState


class ResumeSignal(AcceptedSignal, frozen=True, kw_only=True):
    """A signal that contributed to the condition."""

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
    prompt: str | None = None
    """What is asked, for people."""
    details: Any = None
    """What the question is about, as decoded JSON."""


OpenWaitpoints = ListingPage[OpenWaitpoint]


class PastWait(msgspec.Struct, frozen=True, kw_only=True):
    """A waitpoint of a running execution, and how it ended."""

    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: WaitpointToken
    state: str
    attempt_index: int
    close_reason: str
    closed_at: int
    ended: bool
    """Whether a wait on it has ended; a waitpoint can close without one."""
    signal_ids: tuple[str, ...]
    signals: tuple[ResumeSignal, ...] | None = None
    """Its signals, if they were read."""

    @property
    def timed_out(self) -> bool:
        """Whether the wait timed out."""
        return self.close_reason.startswith("timed_out")


class SuspendedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A suspended execution."""

    execution_id: ExecutionId
    lane_id: str
    reason: str
    suspension_id: str
    requested_by: str
    suspended_at: int
    timeout_at: int | None = None
    prompt: str | None = None
    """What is asked, for people."""
    details: Any = None
    """What the question is about, as decoded JSON."""


SuspendedPage = ListingPage[SuspendedEntry]


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the rotation on one partition."""

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
        """How many partitions use the new secret."""
        return sum(entry.status in ("rotated", "noop") for entry in self.entries)

    @property
    def failed(self) -> tuple[int, ...]:
        """The partitions that do not."""
        return tuple(e.partition for e in self.entries if e.status in ("failed", "conflict"))


class HmacKid(msgspec.Struct, frozen=True):
    """An older signing key that is still accepted."""

    kid: str
    expires_at_ms: int


class HmacKids(msgspec.Struct, frozen=True):
    """The signing keys of a partition, without their secrets."""

    current_kid: str | None
    verifying: tuple[HmacKid, ...]


class SeedOutcome(msgspec.Struct, frozen=True):
    """The number of partitions by the result of seeding."""

    installed: int = 0
    match: int = 0
    mismatch: int = 0
    repaired: int = 0
    torn: int = 0
    """The secret of the current key is missing, and the configured one may be another."""
    empty: int = 0
    """No secret is stored or configured; suspensions are refused."""


class Seeded(NamedOutcome[Literal["seeded"]], frozen=True):
    """The secret was installed; `different` partitions keep another one under that kid."""

    kid: str
    different: tuple[int, ...] = ()


class AlreadySeeded(NamedOutcome[Literal["already_seeded"]], frozen=True):
    """Every partition has a secret with this kid."""

    kid: str
    same_secret: bool


SeedResult = Seeded | AlreadySeeded
