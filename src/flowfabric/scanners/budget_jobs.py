"""The scanners of budgets: due resets, and what calls and crashes left behind."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from flowfabric.core.contracts.budgets import BudgetAudit, BudgetHolder
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import stored_id
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.base import Cycle, report
from flowfabric.scanners.jobs import UuidScanner
from flowfabric.scanners.watch import Territory

_PAGE = 100
_LOOKED_UP = 200
"""How many executions are looked up at once."""
_CHANGED = ("marked", "cleared", "gone", "going")


def budget_tags(territory: Territory, count: int) -> list[str]:
    """The partitions of budgets to scan: those asked for, or all of them."""
    asked = [tag for tag in territory if tag.startswith("{b:")]
    return asked or [f"{{b:{number}}}" for number in range(count)]


class BudgetResets(UuidScanner):
    """Resets budgets whose period is over."""

    def __init__(self, backend: Backend) -> None:
        super().__init__("budget_reset", backend.budgets.reset_due, "budget_resets", page=20)
        self._count = backend.counts.budget

    def indexes(self, territory: Territory) -> list[Index]:
        return [Index(tag, self.index) for tag in budget_tags(territory, self._count)]


class BudgetReconciler:
    """Marks budgets above their limits, and gives back what ended leases still hold.

    Then it deletes the ledgers of executions that no longer exist: slowly, as a budget has one
    for every execution that spent from it. A cycle that runs out of time continues in the next.
    """

    name = "budget_reconciler"

    def __init__(self, backend: Backend, events_retention_ms: int) -> None:
        self._count = backend.counts.budget
        self._events_retention_ms = events_retention_ms
        # The partition under way, the last budget of it that was checked, and the budget whose
        # ledgers are looked up.
        self._at = ("", "")
        self._sweeping = ""
        # Where the look-up of a budget's executions continues, by what is looked up.
        self._next: dict[tuple[str, str], str] = {}

    async def scan(self, cycle: Cycle) -> None:
        tags = budget_tags(cycle.territory, self._count)
        listed = [Index(tag, "budget_policies") for tag in tags]
        if not await cycle.backend.upkeep.any_exists(listed):
            return
        oldest = max(0, await cycle.backend.meta.server_time_ms() - self._events_retention_ms)
        if cycle.thorough:
            self._at, self._sweeping = ("", ""), ""
            self._next.clear()
        start, checked = self._at
        with_ledgers: list[str] = []
        for tag in _beginning_with(start, tags):
            self._at = (tag, checked if tag == start else "")
            with cycle.surviving("could not read the budgets", partition=tag):
                with_ledgers += await self._partition(cycle, tag)
            if cycle.out_of_time():
                return
            with cycle.surviving("could not trim the feed", partition=tag):
                await cycle.backend.upkeep.trim_events(tag, oldest)
        self._at = ("", "")
        await self._sweep_ledgers(cycle, with_ledgers)

    async def _partition(self, cycle: Cycle, tag: str) -> list[str]:
        """Check the budgets of a partition; returns those with ledgers."""
        budgets, found = cycle.backend.budgets, list[str]()
        while ids := await budgets.stored_budgets(tag, self._at[1], _PAGE):
            audits = await budgets.reconcile_budget_counters(tag, ids)
            cycle.progress()
            for budget_id, audit in zip(ids, audits, strict=True):
                with cycle.surviving("could not check a budget", partition=tag, item=budget_id):
                    await self._budget(cycle, tag, budget_id, audit)
                if cycle.out_of_time():
                    return found
                self._at = (tag, budget_id)
                if audit.has_ledgers:
                    found.append(budget_id)
        return found

    async def _budget(self, cycle: Cycle, tag: str, budget_id: str, audit: BudgetAudit) -> None:
        verdict, returned = audit.verdict, audit.returned
        while (audit.returned or audit.verdict == "going") and not cycle.out_of_time():
            # One call returns some of many holds, or deletes some of many ledgers.
            (audit,) = await cycle.backend.budgets.reconcile_budget_counters(tag, [budget_id])
            cycle.progress()
            returned += audit.returned
        about = {"item": budget_id, "partition": tag}
        self._report(cycle, audit.verdict if verdict == "going" else verdict, about)
        if audit.has_holders:
            returned += await self._return_lost(cycle, budget_id)
        if returned:
            cycle.processed += returned
            message = f"budget {budget_id}: released {returned} holds of ended leases"
            report(logging.INFO, self.name, "holds_returned", message, holds=returned, **about)

    def _report(self, cycle: Cycle, verdict: str, about: Mapping[str, str]) -> None:
        budget_id = about["item"]
        if verdict.startswith("error:"):
            cycle.errors += 1
            message = f"cannot check budget {budget_id}: {verdict.removeprefix('error:')}"
            report(logging.WARNING, self.name, "scanner_failure", message, **about)
        elif verdict in _CHANGED:
            cycle.processed += 1
            message = f"budget {budget_id}: {verdict}"
            report(logging.INFO, self.name, f"budget_{verdict}", message, **about)

    async def _return_lost(self, cycle: Cycle, budget_id: str) -> int:
        """Give back holds of executions that are not active, or that another lease runs."""
        place, budgets, returned = (budget_id, "holders"), cycle.backend.budgets, 0
        after = self._next.pop(place, "")
        while page := await budgets.holders(budget_id, after, _LOOKED_UP):
            ended = await asyncio.gather(*(self._has_ended(cycle, holder) for holder in page))
            cycle.progress()
            for holder, is_over in zip(page, ended, strict=True):
                if is_over:
                    execution_id, epoch = holder.execution_id, holder.lease_epoch
                    returned += await budgets.return_holds(budget_id, execution_id, epoch)
            after = page[-1].cursor
            if cycle.out_of_time():
                self._next[place] = after
                break
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

    async def _sweep_ledgers(self, cycle: Cycle, budget_ids: Sequence[str]) -> None:
        for budget_id in _beginning_with(self._sweeping, budget_ids):
            self._sweeping = budget_id
            with cycle.surviving("could not check the ledgers of a budget", item=budget_id):
                await self._forget_ledgers(cycle, budget_id)
            if cycle.out_of_time():
                return
        self._sweeping = ""

    async def _forget_ledgers(self, cycle: Cycle, budget_id: str) -> None:
        """Delete the ledgers of executions that no longer exist."""
        place, budgets = (budget_id, "ledgers"), cycle.backend.budgets
        after, clock = self._next.pop(place, ""), asyncio.get_running_loop().time
        began = clock()
        while page := await budgets.ledgers(budget_id, after, _LOOKED_UP):
            exist = await asyncio.gather(*(_exists(cycle, member) for member in page))
            gone = [member for member, known in zip(page, exist, strict=True) if not known]
            if gone:
                cycle.processed += await budgets.forget_ledgers(budget_id, gone)
            cycle.progress()
            after = page[-1]
            if cycle.out_of_time():
                self._next[place] = after
                break
            await cycle.rest(clock() - began)
            began = clock()


def _beginning_with(first: str, names: Sequence[str]) -> list[str]:
    """The names in a circle from this one on; from the first if it is not among them."""
    at = names.index(first) if first in names else 0
    return [*names[at:], *names[:at]]


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
