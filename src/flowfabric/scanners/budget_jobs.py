"""The scanners of budgets: due resets, and what calls and crashes left behind."""

import asyncio
import logging
from collections.abc import Sequence

from flowfabric.core.contracts.budgets import BudgetAudit, BudgetHolder
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import is_uuid, stored_id
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.base import Cycle, report
from flowfabric.scanners.jobs import DueScanner
from flowfabric.scanners.watch import Territory

_PAGE = 100
_LOOKED_UP = 200
"""How many executions one cycle looks up for one budget; the next continues after them."""
_CHANGED = ("marked", "cleared", "gone", "going")


def budget_tags(territory: Territory, count: int) -> list[str]:
    """The partitions of budgets to scan: those asked for, or all of them."""
    asked = [tag for tag in territory if tag.startswith("{b:")]
    return asked or [f"{{b:{number}}}" for number in range(count)]


class BudgetResets(DueScanner):
    """Resets budgets whose period is over."""

    def __init__(self, backend: Backend) -> None:
        super().__init__("budget_reset", backend.budgets.reset_due, "budget_resets", page=20)
        self._count = backend.counts.budget

    def indexes(self, territory: Territory) -> list[Index]:
        return [Index(tag, self.index) for tag in budget_tags(territory, self._count)]

    def is_member(self, tag: str, member: str) -> bool:  # noqa: ARG002
        return is_uuid(member)

    async def accepted(self, cycle: Cycle, tag: str, ids: Sequence[str]) -> list[str]:  # noqa: ARG002
        # Budgets belong to no namespace, so no filter applies.
        return list(ids)


class BudgetReconciler:
    """Marks budgets above their limits, and gives back what ended leases still hold."""

    name = "budget_reconciler"

    def __init__(self, backend: Backend, events_retention_ms: int) -> None:
        self._count = backend.counts.budget
        self._events_retention_ms = events_retention_ms
        # Where the look-up of a budget's executions continues, by what is looked up.
        self._next: dict[tuple[str, str], str] = {}

    async def scan(self, cycle: Cycle) -> None:
        tags = budget_tags(cycle.territory, self._count)
        listed = [Index(tag, "budget_policies") for tag in tags]
        if not await cycle.backend.upkeep.any_exists(listed):
            return
        oldest = max(0, await cycle.backend.meta.server_time_ms() - self._events_retention_ms)
        for tag in tags:
            if cycle.out_of_time():
                return
            with cycle.surviving("could not read the budgets", partition=tag):
                await self._partition(cycle, tag)
            with cycle.surviving("could not trim the feed", partition=tag):
                await cycle.backend.upkeep.trim_events(tag, oldest)

    async def _partition(self, cycle: Cycle, tag: str) -> None:
        budgets, after = cycle.backend.budgets, ""
        while not cycle.out_of_time():
            ids = await budgets.stored_budgets(tag, after, _PAGE)
            if not ids:
                return
            audits = await budgets.reconcile_budget_counters(tag, ids)
            cycle.progress()
            for budget_id, audit in zip(ids, audits, strict=True):
                with cycle.surviving("could not check a budget", partition=tag, item=budget_id):
                    await self._budget(cycle, tag, budget_id, audit)
            after = ids[-1]

    async def _budget(self, cycle: Cycle, tag: str, budget_id: str, audit: BudgetAudit) -> None:
        about = {"item": budget_id, "partition": tag}
        if audit.verdict.startswith("error:"):
            cycle.errors += 1
            message = f"cannot check budget {budget_id}: {audit.verdict.removeprefix('error:')}"
            report(logging.WARNING, self.name, "scanner_failure", message, **about)
            return
        if audit.verdict in _CHANGED:
            cycle.processed += 1
            message = f"budget {budget_id}: {audit.verdict}"
            report(logging.INFO, self.name, f"budget_{audit.verdict}", message, **about)
        returned = audit.returned
        if audit.has_holders:
            returned += await self._return_lost(cycle, budget_id)
        if returned:
            cycle.processed += returned
            message = f"budget {budget_id}: released {returned} holds of ended leases"
            report(logging.INFO, self.name, "holds_returned", message, holds=returned, **about)
        if audit.has_ledgers:
            cycle.processed += await self._forget_ledgers(cycle, budget_id)

    async def _return_lost(self, cycle: Cycle, budget_id: str) -> int:
        """Give back holds of executions that are not active, or that another lease runs."""
        place, budgets = (budget_id, "holders"), cycle.backend.budgets
        page = await budgets.holders(budget_id, self._next.pop(place, ""), _LOOKED_UP)
        if len(page) == _LOOKED_UP:
            self._next[place] = page[-1].cursor
        returned = 0
        ended = await asyncio.gather(*(self._has_ended(cycle, holder) for holder in page))
        for holder, is_over in zip(page, ended, strict=True):
            if is_over:
                execution_id, epoch = holder.execution_id, holder.lease_epoch
                returned += await budgets.return_holds(budget_id, execution_id, epoch)
        return returned

    async def _has_ended(self, cycle: Cycle, holder: BudgetHolder) -> bool:
        """Whether the lease of a hold is over. One that cannot be read ends with its time."""
        try:
            found = await cycle.backend.reads.describe_execution(holder.execution_id)
        except EngineError as error:
            about = {"item": holder.execution_id}
            cycle.failed("could not read an execution that holds part of a budget", error, **about)
            return False
        lease = None if found is None else found.current_lease
        return lease is None or lease.lease_epoch > holder.lease_epoch

    async def _forget_ledgers(self, cycle: Cycle, budget_id: str) -> int:
        """Delete the ledgers of executions that no longer exist."""
        place, budgets = (budget_id, "ledgers"), cycle.backend.budgets
        page = await budgets.ledgers(budget_id, self._next.pop(place, ""), _LOOKED_UP)
        if len(page) == _LOOKED_UP:
            self._next[place] = page[-1]
        exist = await asyncio.gather(*(_exists(cycle, member) for member in page))
        gone = [member for member, known in zip(page, exist, strict=True) if not known]
        return await budgets.forget_ledgers(budget_id, gone) if gone else 0


async def _exists(cycle: Cycle, member: str) -> bool:
    """Whether a ledger has an owner. One that cannot be read is kept."""
    try:
        execution_id = stored_id(member, "ledger")
    except EngineError:
        return False
    try:
        return await cycle.backend.reads.get_execution_namespace(execution_id) is not None
    except EngineError as error:
        cycle.failed("could not read an execution with recorded usage", error, item=member)
        return True
