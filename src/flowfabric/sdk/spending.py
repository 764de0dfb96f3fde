"""The client's methods for budgets, and what workers report to them."""

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from flowfabric.core.contracts import ListingPage
from flowfabric.core.contracts import budgets as contracts
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import BudgetExceeded, invalid_input
from flowfabric.core.ids import budget_id, is_uuid
from flowfabric.engine.api import check
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.budgets import Amounts, amounts

_COUNTED = ("input_tokens", "output_tokens", "wall_ms")
PAUSED_BY_BUDGET = "paused_by_budget"
"""Why a task that a hard limit suspended waits."""
Mode = Literal["strict", "hard", "warn"]
HardLimitAction = Literal["fail", "suspend", "reject"]
"""What a task may do when it exceeds a hard limit."""
SoftLimitAction = Literal["warn", "allow"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a call to a model consumed. Each field is a dimension with the same name.

    >>> Usage(input_tokens=812, custom={"cents": 3}).amounts()
    {'cents': 3, 'input_tokens': 812}
    """

    input_tokens: int = 0
    output_tokens: int = 0
    wall_ms: int = 0
    custom: Mapping[str, int] = {}
    dedup_key: str = ""

    def amounts(self) -> dict[str, int]:
        """By dimension; a typed number is added to a custom entry of the same name."""
        found = dict(self.custom)
        for name in _COUNTED:
            if count := check.whole(getattr(self, name), name, 0):
                found[name] = found.get(name, 0) + count
        return found


class StoppedByBudget(msgspec.Struct, frozen=True):
    """The details of the wait of a task that a hard limit suspended."""

    budget: str
    dimension: str
    used: int
    limit: int


def exceeded(budget: str, breach: contracts.HardBreach) -> BudgetExceeded:
    """The error for usage that a hard limit does not allow."""
    held = f" and {breach.reserved:,} are held" if breach.reserved else ""
    used = f"{breach.current_usage:,} of {breach.hard_limit:,} {breach.dimension} are used{held}"
    return BudgetExceeded(f'budget "{budget}": {used}', op="report_usage")


class BudgetCalls:
    """The client's methods for budgets. A name refers to the same budget in every process."""

    backend: Backend
    namespace: str

    def _budget_id(self, budget: str) -> str:
        return budget_id(budget, self.namespace)

    async def create_budget(
        self,
        budget: str,
        hard: Amounts | None = None,
        *,
        soft: Amounts | None = None,
        every: Duration | None = None,
        mode: Mode = "strict",
        on_hard_limit: HardLimitAction = "fail",
        on_soft_limit: SoftLimitAction = "warn",
        dedup_ttl: Duration = "24h",
        scope: tuple[str, str] | None = None,
    ) -> contracts.CreateBudgetOutcome:
        """Create a budget under a name or a UUID. An existing budget is not changed.

        `hard` and `soft` are limits by dimension. `every` resets usage to 0 at a
        fixed interval. `on_hard_limit` is what happens to a task that exceeds a hard limit: `fail`,
        `suspend` or `reject`. `dedup_ttl` is how long the budget remembers dedup keys, at most 7
        days.

        >>> await client.create_budget("team", {"tokens": 1_000_000}, every="24h")
        """
        _check_settings(mode, on_hard_limit, on_soft_limit)
        limits = {"hard": amounts(hard or {}, "hard"), "soft": amounts(soft or {}, "soft")}
        names = tuple(sorted({name for part in limits.values() for name in part}))
        scope = scope or (("global", "default") if is_uuid(budget) else (contracts.NAMED, budget))
        new = contracts.NewBudget(
            budget_id=self._budget_id(budget),
            scope_type=scope[0],
            scope_id=scope[1],
            enforcement_mode=mode,
            on_hard_limit=on_hard_limit,
            on_soft_limit=on_soft_limit,
            reset_interval_ms=0 if every is None else to_ms(every, "every"),
            dimensions=names,
            hard_limits=tuple(limits["hard"].get(name, 0) for name in names),
            soft_limits=tuple(limits["soft"].get(name, 0) for name in names),
            dedup_ttl_ms=to_ms(dedup_ttl, "dedup_ttl"),
        )
        return await self.backend.budgets.create_budget(new)

    async def budget(self, budget: str) -> contracts.BudgetStatus:
        """A budget with its usage, limits and holds, or `budget_not_found`.

        >>> print((await client.budget("team")).usage)
        """
        return await self.backend.budgets.get_budget_status(self._budget_id(budget))

    async def list_budgets(
        self,
        *,
        after: str = "",
        limit: int = 100,
        scope_type: str | None = None,
        scope_id: str | None = None,
    ) -> ListingPage[contracts.BudgetStatus]:
        """Budgets of all namespaces, by id; `after` is the cursor of the previous page."""
        return await self.backend.budgets.list_budgets(
            after=after, limit=limit, scope_type=scope_type, scope_id=scope_id
        )

    async def update_budget(
        self,
        budget: str,
        hard: Amounts | None = None,
        *,
        soft: Amounts | None = None,
        every: Duration | None = None,
        mode: Mode | None = None,
        on_hard_limit: HardLimitAction | None = None,
        on_soft_limit: SoftLimitAction | None = None,
        dedup_ttl: Duration | None = None,
    ) -> contracts.BudgetUpdated:
        """Change limits or settings. Usage and what you do not pass stay unchanged.

        0 removes a limit. Work that waits for the budget is checked at once.
        """
        _check_settings(mode, on_hard_limit, on_soft_limit)
        change = contracts.BudgetChange(
            hard_limits=hard,
            soft_limits=soft,
            reset_interval_ms=None if every is None else to_ms(every, "every"),
            enforcement_mode=mode,
            on_hard_limit=on_hard_limit,
            on_soft_limit=on_soft_limit,
            dedup_ttl_ms=None if dedup_ttl is None else to_ms(dedup_ttl, "dedup_ttl"),
        )
        return await self.backend.budgets.update_budget_limits(self._budget_id(budget), change)

    async def reset_budget(self, budget: str) -> contracts.BudgetReset:
        """Reset all usage to 0 now; the interval of a recurring reset starts again."""
        return await self.backend.budgets.reset_budget(self._budget_id(budget))

    async def delete_budget(self, budget: str, *, force: bool = False) -> contracts.BudgetDeleted:
        """Delete a budget; raises `budget_attach_conflict` if work waits for it, unless forced."""
        return await self.backend.budgets.delete_budget(self._budget_id(budget), force=force)

    async def report_usage(
        self, budget: str, usage: Amounts | Usage, dedup_key: str = ""
    ) -> contracts.UsageOutcome:
        """Count usage from outside a task. A breach is a result, not an error."""
        spent, dedup_key = spent_and_key(usage, dedup_key)
        report = self.backend.budgets.report_usage_admin
        return await report(self._budget_id(budget), spent, dedup_key=dedup_key)


def _check_settings(mode: str | None, on_hard_limit: str | None, on_soft_limit: str | None) -> None:
    """Refuse a misspelt setting: the engine would store it and apply the default."""
    given = (
        ("mode", mode, get_args(Mode)),
        ("on_hard_limit", on_hard_limit, get_args(HardLimitAction)),
        ("on_soft_limit", on_soft_limit, get_args(SoftLimitAction)),
    )
    for name, value, known in given:
        if value is not None:
            check.one_of(value, name, known)


def spent_and_key(usage: Amounts | Usage, dedup_key: str) -> tuple[Amounts, str]:
    """The amounts by dimension, and the dedup key: that of the call before that of the usage."""
    if isinstance(usage, Usage):
        return usage.amounts(), dedup_key or usage.dedup_key
    if not isinstance(usage, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        problem = f"must be a Usage or a map of dimensions, got {type(usage).__name__}"
        raise invalid_input("usage", problem)
    return usage, dedup_key
