"""Quota policies: their limits, their status, and what an admission answers."""

from typing import Literal, Self

import msgspec

from flowfabric.core.contracts import ListingPage, NamedOutcome
from flowfabric.core.errors import ValidationError

_MAX = 2**53 - 1
_DEFAULT_WINDOW_S = 60


class QuotaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how many executions may start; 0 is no limit.

    >>> QuotaLimits(max_requests_per_window=500).window_ms
    60000
    """

    window_seconds: int = _DEFAULT_WINDOW_S
    """The length of the sliding window; 0 is 60 seconds."""
    max_requests_per_window: int = 0
    max_concurrent: int = 0
    jitter_ms: int = 0
    """The most to add, at random, to the time after which a refused execution tries again."""

    @property
    def window_ms(self) -> int:
        """The length of the window that applies."""
        return (self.window_seconds or _DEFAULT_WINDOW_S) * 1000

    def validate(self) -> Self:
        """The limits, or `invalid_quota_spec` with the name of the field."""
        for name in self.__struct_fields__:
            value: object = getattr(self, name)
            if type(value) is not int or not 0 <= value <= _MAX:
                raise ValidationError(
                    "invalid_quota_spec",
                    f"{name}: must be a whole number from 0 to {_MAX}, got {value!r}",
                )
        return self


class QuotaStatus(QuotaLimits, frozen=True, kw_only=True):
    """A quota and how much of it is used now."""

    quota_policy_id: str
    window_count: int = 0
    """The admissions of the current window."""
    slots_held: int = 0
    """Executions that run, or were admitted and are about to start."""
    oldest_entry_at: int | None = None
    """The oldest admission of the window."""
    retry_after_ms: int | None = 0
    """When it admits the next execution; 0 is now, None is when a running one ends."""
    created_at: int = 0
    name: str = ""
    """The name from which its id was derived, if it has one."""

    @property
    def headroom(self) -> int:
        """How many executions it admits now."""
        rate, cap = self.max_requests_per_window, self.max_concurrent
        by_rate = rate - self.window_count if rate else _MAX
        by_cap = cap - self.slots_held if cap else _MAX
        return max(0, min(by_rate, by_cap))

    @property
    def full(self) -> "FullQuota | None":
        """What keeps it from admitting an execution now; None if it admits one."""
        if self.headroom:
            return None
        rate = self.max_requests_per_window
        reason = "rate" if 0 < rate <= self.window_count else "concurrency"
        return FullQuota(self.quota_policy_id, reason, self.retry_after_ms, self.name)

    @property
    def label(self) -> str:
        """What people call the policy."""
        return self.name or self.quota_policy_id


class FullQuota(msgspec.Struct, frozen=True):
    """A quota that currently allows no execution to start."""

    quota_policy_id: str
    reason: Literal["rate", "concurrency"]
    """Which limit is reached; the rate if both are."""
    retry_after_ms: int | None
    """When it admits the next execution; None is when a running one ends."""
    name: str = ""
    """The name from which its id was derived, if it has one."""

    @property
    def label(self) -> str:
        """What people call the policy."""
        return self.name or self.quota_policy_id


QuotaPage = ListingPage[QuotaStatus]


class QuotaCreated(NamedOutcome[Literal["created"]], frozen=True):
    """The quota was stored."""

    quota_policy_id: str


class QuotaExists(NamedOutcome[Literal["already_satisfied"]], frozen=True):
    """A quota with this id exists; it keeps its limits."""

    quota_policy_id: str
    differs: bool = False
    """Whether its limits are not the ones given."""


CreateQuotaOutcome = QuotaCreated | QuotaExists


class Admitted(NamedOutcome[Literal["admitted"]], frozen=True):
    """The execution may start: this call recorded it."""

    request_id: str = ""
    """Identifies the recorded admission, for a rollback."""


class AlreadyAdmitted(NamedOutcome[Literal["already_admitted"]], frozen=True):
    """The execution may start: another call recorded it, so do not roll it back."""


class RateExceeded(NamedOutcome[Literal["rate_exceeded"]], frozen=True):
    """The window is full."""

    retry_after_ms: int


class ConcurrencyExceeded(NamedOutcome[Literal["concurrency_exceeded"]], frozen=True):
    """Every slot is taken."""

    retry_after_ms: int | None = None
    """When the first slot that no claim has confirmed ends; None if all of them are running."""


class Unlimited(NamedOutcome[Literal["unlimited"]], frozen=True):
    """The policy limits nothing, or does not exist. Nothing was recorded."""


Admission = Admitted | AlreadyAdmitted | RateExceeded | ConcurrencyExceeded


class QuotaReconciliation(msgspec.Struct, frozen=True):
    """What a pass over the policies of a partition did."""

    policies: int = 0
    changed: int = 0
    """Slots that were freed or confirmed, and policies removed from the index."""
    errors: int = 0
