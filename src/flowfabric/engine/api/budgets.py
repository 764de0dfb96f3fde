"""Budgets: limits on what executions may spend, their usage, and what is held of them."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from flowfabric.core.contracts import ListingPage
from flowfabric.core.contracts import budgets as contracts
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import EngineError, ValidationError, invalid_input
from flowfabric.core.ids import (
    ExecutionId,
    has_space_or_control,
    validate_text,
    validate_uuid,
)
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern

Amounts: TypeAlias = Mapping[str, int]
"""Dimension → amount."""
MAX_DIMENSIONS = 64
MAX_DEDUP_MS = 7 * 86_400_000
_MAX_SCOPE_BYTES = 256
_MAX_NAME_BYTES = 128
_MAX_WORD_BYTES = 64
_MAX_KEY_BYTES = 256
_RESERVED_NAME = "breached_at"
_WORDS = ("enforcement_mode", "on_hard_limit", "on_soft_limit")
OnBudgetOpened = Callable[[str], Awaitable[None]]


def check_dimension(name: Any, field: str = "dimensions") -> str:
    """The name of a dimension: 1 to 128 bytes, no whitespace or controls, no leading `_`."""
    validate_text(name, field, limit=_MAX_NAME_BYTES, required=True)
    if has_space_or_control(name):
        raise invalid_input(field, f"{name!r} contains whitespace or control characters")
    if name.startswith("_") or name == _RESERVED_NAME:
        raise invalid_input(field, f"{name!r} is reserved; choose another name")
    return name


def _check_count(count: int, field: str) -> None:
    if count > MAX_DIMENSIONS:
        raise invalid_input(field, f"too_many_dimensions: limit={MAX_DIMENSIONS}, got={count}")


def amounts(given: Amounts, field: str, *, low: int = 0) -> dict[str, int]:
    """Amounts by dimension, in the order of the names."""
    check.instance(given, Mapping, field)
    pairs: list[tuple[Any, Any]] = sorted(given.items(), key=lambda pair: str(pair[0]))
    _check_count(len(pairs), field)
    for name, amount in pairs:
        check.whole(amount, f"{field}.{check_dimension(name, field)}", low)
    return dict(pairs)


def reported(
    dimensions: Amounts | Sequence[str], deltas: Sequence[int] | None = None
) -> dict[str, int]:
    """Amounts from a map, or from parallel lists in their order; repeated names are summed."""
    if isinstance(dimensions, Mapping):
        if deltas is not None:
            raise invalid_input("deltas", "must be omitted if dimensions is a map")
        return amounts(dimensions, "dimensions")
    if deltas is None:
        raise invalid_input("dimensions, deltas", "pass a map, or two lists of equal length")
    names, given = check.listed(dimensions, "dimensions"), check.listed(deltas, "deltas")
    _check_count(len(names), "dimensions")
    if len(names) != len(given):
        raise invalid_input("dimensions, deltas", "dimension_delta_array_mismatch")
    found: dict[str, int] = {}
    for name, delta in zip(names, given, strict=True):
        check_dimension(name)
        total = found.get(name, 0) + check.whole(delta, f"deltas.{name}", 0)
        found[name] = check.whole(total, f"deltas.{name}", 0)
    return found


def _check_words(given: Mapping[str, Any]) -> None:
    for name in _WORDS:
        if name in given:
            validate_text(given[name], name, limit=_MAX_WORD_BYTES, required=True)


def _check_scope(value: Any, field: str) -> None:
    size = len(check.text(value, field).encode())
    if not 0 < size <= _MAX_SCOPE_BYTES:
        problem = f"{field} is {size} bytes long; it must have 1 to {_MAX_SCOPE_BYTES}"
        raise ValidationError("invalid_budget_scope", problem)


def check_new_budget(item: contracts.NewBudget) -> contracts.NewBudget:
    """The budget with the limits of repeated dimensions merged, or the error of the first check."""
    new = check.instance(item, contracts.NewBudget, "budget")
    validate_uuid(new.budget_id, "budget_id")
    _check_scope(new.scope_type, "scope_type")
    _check_scope(new.scope_id, "scope_id")
    names = check.listed(new.dimensions, "dimensions")
    _check_count(len(names), "dimensions")
    for field in ("hard_limits", "soft_limits"):
        limits = check.listed(getattr(new, field), field)
        if len(limits) != len(names):
            raise invalid_input(field, "dimension_limit_array_mismatch")
        for limit in limits:
            check.whole(limit, field, 0)
    for name in names:
        check_dimension(name)
    if len(set(names)) < len(names):
        raise invalid_input("dimensions", "names a dimension twice")
    _check_words(msgspec.structs.asdict(new))
    check.whole(new.reset_interval_ms, "reset_interval_ms", 0)
    if new.dedup_ttl_ms is not None:
        check.whole(new.dedup_ttl_ms, "dedup_ttl_ms", 1, MAX_DEDUP_MS)
    return new


def check_change(change: contracts.BudgetChange) -> dict[str, str | int]:
    """The changes by the names that storage knows; at least one."""
    given = msgspec.structs.asdict(check.instance(change, contracts.BudgetChange, "change"))
    found: dict[str, str | int] = {}
    for kind in ("hard", "soft"):
        limits = given.pop(f"{kind}_limits")
        if limits is not None:
            merged = amounts(limits, f"{kind}_limits")
            found |= {f"{kind}:{name}": limit for name, limit in merged.items()}
    given = {name: value for name, value in given.items() if value is not None}
    _check_words(given)
    if "reset_interval_ms" in given:
        check.whole(given["reset_interval_ms"], "reset_interval_ms", 0)
    found |= given
    if not found:
        raise invalid_input("change", "is empty; pass at least one limit or setting")
    return found


def check_key(key: Any, field: str = "dedup_key", *, required: bool = False) -> str:
    """A key that the caller chose, which becomes part of a stored name."""
    return validate_text(key, field, limit=_MAX_KEY_BYTES, required=required)


class Budgets(Concern, Protocol):
    """Budgets, their usage, and what executions hold of them.

    A breach is a result, not an error. Amounts are whole numbers from 0 to 2^53 - 1.
    """

    on_budget_opened: OnBudgetOpened | None
    """Called with the id of a budget that was reset, changed or deleted: work may be admitted."""

    async def create_budget(self, budget: contracts.NewBudget) -> contracts.CreateBudgetOutcome:
        """Define a budget; one that exists stays as it is."""
        ...

    async def update_budget_limits(
        self, budget_id: str, change: contracts.BudgetChange
    ) -> contracts.BudgetUpdated:
        """Change limits and settings; usage stays. Or `budget_not_found`."""
        ...

    async def delete_budget(
        self, budget_id: str, *, force: bool = False
    ) -> contracts.BudgetDeleted:
        """Delete a budget; `budget_attach_conflict` if executions wait for it, unless forced."""
        ...

    async def reset_budget(self, budget_id: str) -> contracts.BudgetReset:
        """Set all usage to 0; a recurring reset starts over from now."""
        ...

    async def get_budget_status(self, budget_id: str) -> contracts.BudgetStatus:
        """The budget, its usage and limits, or `budget_not_found`."""
        ...

    async def list_budgets(
        self,
        *,
        after: str = "",
        limit: int = 100,
        scope_type: str | None = None,
        scope_id: str | None = None,
    ) -> ListingPage[contracts.BudgetStatus]:
        """Budgets by id; `after` is the cursor of the page before."""
        ...

    async def report_usage(
        self,
        handle: Handle,
        budget_id: str,
        dimensions: Amounts | Sequence[str],
        deltas: Sequence[int] | None = None,
        *,
        dedup_key: str = "",
    ) -> contracts.UsageOutcome:
        """Count usage of all dimensions, or of none on a hard breach.

        Needs no live lease: what was consumed counts. A repeat with the same `dedup_key` is not
        counted again.
        """
        ...

    async def report_usage_admin(
        self,
        budget_id: str,
        dimensions: Amounts | Sequence[str],
        deltas: Sequence[int] | None = None,
        *,
        dedup_key: str = "",
    ) -> contracts.UsageOutcome:
        """`report_usage` for tools, which have no handle."""
        ...

    async def record_spend(
        self,
        budget_id: str,
        execution_id: ExecutionId,
        deltas: Amounts,
        idempotency_key: str = "",
    ) -> contracts.UsageOutcome:
        """`report_usage`, noted in the execution's ledger, which `release_budget` reverses."""
        ...

    async def release_budget(
        self, budget_id: str, execution_id: ExecutionId
    ) -> contracts.ReleaseOutcome:
        """Take back what `record_spend` noted for an execution since the last reset."""
        ...

    async def reserve(
        self,
        handle: Handle,
        budget_id: str,
        deltas: Amounts,
        reservation_id: str,
        *,
        ttl_ms: int | None = None,
    ) -> contracts.ReserveOutcome:
        """Hold amounts before spending them; a repeat with the same id gets the first answer.

        The lease must be current. The hold ends with `settle`, `release_reservation`, the end of
        the lease (30 s later if nothing returns it before), or `ttl_ms`.
        """
        ...

    async def settle(
        self, budget_id: str, reservation_id: str, actual: Amounts | None = None
    ) -> contracts.UsageOutcome:
        """Turn a hold into usage. A dimension that `actual` does not name counts as held.

        What exceeds the hold is counted if it fits, otherwise the answer is a `HardBreach` and
        only what was held counts. Or `reservation_not_found`.
        """
        ...

    async def release_reservation(
        self, budget_id: str, reservation_id: str
    ) -> contracts.ReleaseOutcome:
        """Give a whole hold back."""
        ...

    async def read_budget_usage_and_limits(self, budget_id: str) -> contracts.BudgetUsage:
        """What admission compares; empty for a budget without limits, or that does not exist."""
        ...

    async def exhausted(
        self, budget_ids: Collection[str]
    ) -> dict[str, contracts.Exhausted | EngineError | None]:
        """Which budgets admit no work now: None for an open one, an error for an unreadable one.

        A budget that only warns, has no limits, or does not exist is open.
        """
        ...

    async def note_blocked(self, budget_id: str, execution_ids: Iterable[str]) -> int:
        """Note executions that wait for a budget; returns how many were new."""
        ...

    async def forget_blocked(self, budget_id: str, execution_ids: Iterable[str]) -> int:
        """Note that executions no longer wait for a budget."""
        ...

    async def blocked(
        self, budget_id: str, *, offset: int = 0, limit: int = 100
    ) -> list[ExecutionId]:
        """Executions noted as waiting, oldest first. Their records decide whether they still do."""
        ...

    async def return_holds(self, budget_id: str, execution_id: str, lease_epoch: int) -> int:
        """Give back the holds of an execution's leases up to this epoch; returns their number."""
        ...

    async def extend_holds(
        self, budget_id: str, execution_id: str, lease_epoch: int, expires_at: int
    ) -> int:
        """Let the holds of a lease last as long as the lease, which now ends at `expires_at`."""
        ...

    async def reset_due(self, tag: str, ids: Iterable[str]) -> list[str]:
        """Reset the budgets whose period is over; one word per id."""
        ...

    async def reconcile_budget_counters(
        self, tag: str, ids: Sequence[str]
    ) -> list[contracts.BudgetAudit]:
        """Check budgets of a partition: marks of breaches, overdue holds, unfinished deletions."""
        ...

    async def stored_budgets(self, tag: str, after: str = "", limit: int = 100) -> list[str]:
        """The ids that a partition lists, in order, after this one."""
        ...

    async def holders(
        self, budget_id: str, after: str = "", limit: int = 100
    ) -> list[contracts.BudgetHolder]:
        """The executions that hold a part of a budget, by id, after this one."""
        ...

    async def ledgers(self, budget_id: str, after: str = "", limit: int = 100) -> list[str]:
        """The executions that have a ledger, by id, after this one."""
        ...

    async def forget_ledgers(self, budget_id: str, execution_ids: Iterable[str]) -> int:
        """Delete ledgers of executions that no longer exist; usage stays."""
        ...
