"""Inputs and results of operations on budgets."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from flowfabric.core.contracts import NamedOutcome
from flowfabric.core.ids import ExecutionId

NAMED = "name"
"""The scope of budgets that were created under a name, which is the scope's id."""


DEDUP_TTL_MS = 86_400_000
"""How long a dedup key is remembered by default: 24 hours."""


class NewBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget to create. It limits only executions that name it.

    >>> NewBudget(
    ...     budget_id="11111111-2222-4333-8444-555555555555",
    ...     dimensions=("tokens",),
    ...     hard_limits=(1_000_000,),
    ...     soft_limits=(800_000,),
    ... ).enforcement_mode
    'strict'
    """

    budget_id: str
    scope_type: str = "global"
    """A label for people, as is `scope_id`; it has no effect."""
    scope_id: str = "default"
    enforcement_mode: str = "strict"
    """`strict`: hard limits refuse usage and stop admission. `warn`: they only report it."""
    on_hard_limit: str = "fail"
    """What a worker that spends too much does: `fail`, `suspend`, or `reject` (nothing)."""
    on_soft_limit: str = "warn"
    """`warn`: log it; `allow`: nothing."""
    reset_interval_ms: int = 0
    """How often usage is set to 0; 0 for never."""
    dimensions: tuple[str, ...] = ()
    hard_limits: tuple[int, ...] = ()
    """One per dimension; 0 for no limit."""
    soft_limits: tuple[int, ...] = ()
    dedup_ttl_ms: int = DEDUP_TTL_MS
    """How long a dedup key is remembered; at most 7 days."""


class BudgetChange(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of a budget; None leaves a setting unchanged. Limits are merged; 0 removes one."""

    hard_limits: Mapping[str, int] | None = None
    soft_limits: Mapping[str, int] | None = None
    reset_interval_ms: int | None = None
    enforcement_mode: str | None = None
    on_hard_limit: str | None = None
    on_soft_limit: str | None = None
    dedup_ttl_ms: int | None = None
    """How long the keys of later calls are remembered; earlier keys keep their time."""


class BudgetCreated(NamedOutcome[Literal["created"]], frozen=True):
    """The budget exists now."""

    budget_id: str


class BudgetExists(NamedOutcome[Literal["already_satisfied"]], frozen=True):
    """The budget already existed and was not changed."""

    budget_id: str
    differs: bool = False
    """Whether its definition differs from this call."""


CreateBudgetOutcome = BudgetCreated | BudgetExists


class BudgetUpdated(NamedOutcome[Literal["updated"]], frozen=True):
    """The changes are stored; usage did not change."""


class BudgetDeleted(NamedOutcome[Literal["deleted"]], frozen=True):
    """The budget is deleted; executions that name it are no longer limited by it."""


class BudgetReset(NamedOutcome[Literal["reset"]], frozen=True):
    """All usage is 0."""

    next_reset_at: int
    """When it is reset next; 0 if it does not recur."""


class UsageOk(NamedOutcome[Literal["ok"]], frozen=True):
    """The usage was counted."""


class UsageAlreadyApplied(NamedOutcome[Literal["already_applied"]], frozen=True):
    """An earlier call with this key or reservation was counted; this one was not."""


class SoftBreach(NamedOutcome[Literal["soft_breach"]], frozen=True):
    """The usage was counted, but exceeds a soft limit, or a hard limit in `warn` mode."""

    dimension: str
    current_usage: int
    soft_limit: int
    action: str = "warn"
    """What the budget asks workers to do."""


class HardBreach(NamedOutcome[Literal["hard_breach"]], frozen=True):
    """The usage would exceed a hard limit; nothing was counted or held."""

    dimension: str
    current_usage: int
    hard_limit: int
    action: str = "fail"
    """What the budget asks workers to do."""
    reserved: int = 0
    """What others hold of the dimension."""


UsageOutcome = UsageOk | UsageAlreadyApplied | SoftBreach | HardBreach


class Reserved(NamedOutcome[Literal["reserved"]], frozen=True):
    """The amounts are held until they are settled, released, or the lease ends."""

    reservation_id: str
    held: Mapping[str, int]


ReserveOutcome = Reserved | SoftBreach | HardBreach
"""On a soft breach the amounts are held, too."""
ReleaseOutcome = Literal["released", "noop"]


class BudgetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A budget with its usage at one moment. Times are milliseconds as decimal text."""

    budget_id: str
    scope_type: str
    scope_id: str
    enforcement_mode: str
    on_hard_limit: str
    on_soft_limit: str
    reset_interval_ms: int
    dedup_ttl_ms: int
    """How long a dedup key is remembered."""
    usage: Mapping[str, int]
    """By dimension; empty before the first report."""
    reserved: Mapping[str, int]
    """What running executions hold, by dimension."""
    hard_limits: Mapping[str, int]
    """By dimension; 0 for no limit."""
    soft_limits: Mapping[str, int]
    breach_count: int
    soft_breach_count: int
    reset_count: int = 0
    created_at: str | None = None
    next_reset_at: str | None = None
    last_reset_at: str | None = None
    last_breach_at: str | None = None
    last_breach_dim: str | None = None
    breached_at: str | None = None
    """Since when usage is above a hard limit that was lowered."""

    @property
    def label(self) -> str:
        """What people call the budget."""
        return self.scope_id if self.scope_type == NAMED else self.budget_id


class BudgetUsage(msgspec.Struct, frozen=True):
    """What admission compares. Both are empty for a budget without limits."""

    limits: Mapping[str, int]
    """By `hard:<dimension>` and `soft:<dimension>`."""
    usage: Mapping[str, int]
    """Of each dimension with a hard limit."""


class Exhausted(msgspec.Struct, frozen=True):
    """A budget that is used up, and its first exhausted dimension by name."""

    budget_id: str
    dimension: str
    used: int
    limit: int
    name: str = ""
    """The name from which its id was derived, if it has one."""
    next_reset_at: int | None = None
    """When its usage is reset, if it recurs."""

    @property
    def label(self) -> str:
        """What people call the budget."""
        return self.name or self.budget_id


class BudgetHolder(msgspec.Struct, frozen=True):
    """An execution that holds part of a budget under one of its leases."""

    execution_id: ExecutionId
    lease_epoch: int
    cursor: str
    """Where a listing continues after this one."""


class BudgetAudit(msgspec.Struct, frozen=True):
    """What the check of a budget found and did."""

    verdict: str
    """`marked`, `cleared`, `unchanged`, `skipped`, `gone`, `going`, or `error:<why>`."""
    returned: int = 0
    """How many overdue holds it released."""
    has_holders: bool = False
    has_ledgers: bool = False
