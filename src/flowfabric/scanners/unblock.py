"""Unblocks executions whose budget, quota or workers admit work again, and delivers what runs gave
back.

The call that opens a budget or a quota releases those that wait for it at once, and so does a
worker that registers. This scanner finds the rest: a process died in between, or a limit opened
with time.
"""

from collections.abc import Sequence
from heapq import nsmallest

from flowfabric.core.contracts.budgets import Exhausted
from flowfabric.core.errors import EngineError, NotFoundError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine import metrics
from flowfabric.engine.api.admission import (
    FOR_BUDGET,
    FOR_QUOTA,
    BlockedExecution,
    headroom_of,
    longest_wait_of,
)
from flowfabric.engine.api.upkeep import Index
from flowfabric.engine.api.workers import WorkerEntry
from flowfabric.scanners.base import Cycle
from flowfabric.scanners.watch import Territory
from flowfabric.scheduler.routes import BLOCKED, FOR_ROUTE, read_fleet, release_covered

_PAGE = 100
_RETURNS = "returns"
_SETS = {"blocked:budget": FOR_BUDGET, "blocked:quota": FOR_QUOTA, BLOCKED: FOR_ROUTE}


class UnblockScanner:
    """Looks through all blocked executions, oldest first, and releases those that may start."""

    name = "unblock"

    def __init__(self) -> None:
        self._next = Index("", "")
        """Where the next cycle begins, if the last one ran out of time."""

    def indexes(self, territory: Territory) -> list[Index]:
        blocked = [
            Index(tag, name, lane)
            for tag, lanes in territory.items()
            for lane in lanes
            for name in _SETS
        ]
        return [*blocked, *(Index(tag, _RETURNS) for tag in territory)]

    async def scan(self, cycle: Cycle) -> None:
        indexes = self.indexes(cycle.territory)
        if not await cycle.backend.upkeep.any_exists(indexes):
            cycle.progress()
            if cycle.watch is not None:
                cycle.watch.learn_absent(indexes)
            return
        for tag in cycle.territory:
            with cycle.surviving("could not return slots and holds", partition=tag):
                while await cycle.backend.admission.deliver_returns(tag):
                    cycle.progress()
            if cycle.out_of_time():
                return
        limits, blocked = _Pass(cycle), [each for each in indexes if each.name in _SETS]
        first = blocked.index(self._next) if self._next in blocked else 0
        self._next = Index("", "")
        for index in (*blocked[first:], *blocked[:first]):
            if await limits.walk(index, _SETS[index.name]):
                self._next = index
                break
        await limits.release_within_quotas()


class _Pass:
    """One pass: every budget and policy is read once, and so are the workers."""

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self._budgets: dict[str, Exhausted | EngineError | None] = {}
        self._room: dict[str, int | None] = {}
        self._latest: dict[str, int] = {}
        """The latest retry time that is one of the policy's present window."""
        self._waiting: dict[str, list[BlockedExecution]] = {}
        self._now_ms: int | None = None
        self._fleet: list[WorkerEntry] | None = None
        self._fleet_is_read = False

    async def walk(self, index: Index, reason: str) -> bool:
        """Page through an index; whether the cycle must end."""
        cycle, start = self._cycle, 0
        upkeep = cycle.backend.upkeep
        while not cycle.out_of_time():
            with cycle.surviving("could not read an index", partition=index.tag):
                ids = await upkeep.list_index(index, start, _PAGE)
                cycle.progress()
                if not ids:
                    return False
                accepted = await cycle.where.accepted(cycle.backend, ids)
                start += len(ids) - await self._check(index, reason, accepted)
                continue
            return False
        return True

    async def _check(self, index: Index, reason: str, ids: Sequence[str]) -> int:
        """Release those of a page that may start; how many."""
        if reason == FOR_ROUTE:
            return await self._check_routes(index, ids)
        found = await self._cycle.backend.admission.read_blocked(index.tag, ids, reason)
        if reason == FOR_BUDGET:
            return await self._check_budgets(index.tag, found)
        return await self._check_quotas(index.tag, found)

    async def _check_routes(self, index: Index, ids: Sequence[str]) -> int:
        backend = self._cycle.backend
        if not self._fleet_is_read:
            self._fleet, self._fleet_is_read = await read_fleet(backend), True
        released = await release_covered(backend, index, ids, self._fleet)
        self._cycle.processed += released
        return released

    async def _check_budgets(self, tag: str, found: Sequence[BlockedExecution]) -> int:
        budgets = self._cycle.backend.budgets
        named = {budget for each in found for budget in each.budget_ids} - self._budgets.keys()
        if named:
            for budget, answer in (await budgets.exhausted(named)).items():
                self._budgets[budget] = answer
                if isinstance(answer, EngineError):
                    metrics.count("ff_admission_faults_total", "budget")
                    self._cycle.failed("could not read a budget", answer, budget_id=budget)
        free: list[BlockedExecution] = []
        waiting: dict[str, list[ExecutionId]] = {}
        for each in found:
            answers = (self._budgets[budget] for budget in each.budget_ids)
            closed = next((answer for answer in answers if answer is not None), None)
            if closed is None:
                free.append(each)
            elif isinstance(closed, Exhausted):
                waiting.setdefault(closed.budget_id, []).append(each.execution_id)
        for budget, ids in waiting.items():
            # The process that blocked them may have died before it noted them.
            await budgets.note_blocked(budget, ids)
        for each in free:
            for budget in each.budget_ids:
                await budgets.forget_blocked(budget, [each.execution_id])
        return await self._release(tag, free, FOR_BUDGET)

    async def _check_quotas(self, tag: str, found: Sequence[BlockedExecution]) -> int:
        """Release those without a limit; keep the best of the others until all were seen."""
        if self._now_ms is None:
            self._now_ms = await self._cycle.backend.meta.server_time_ms()
        free: list[BlockedExecution] = []
        places: dict[str, dict[ExecutionId, int]] = {}
        for each in found:
            policy = each.quota_policy_id
            if policy is None:
                free.append(each)
                continue
            places.setdefault(policy, {})[each.execution_id] = each.score
            # Those of a closed lane would keep the room from the others.
            if each.lane_closed:
                continue
            if policy not in self._room:
                self._room[policy] = await self._headroom(policy)
            room = self._room[policy]
            if room is None:
                free.append(each)
            elif room > 0 and not self._now_ms < (each.retry_at or 0) <= self._latest[policy]:
                waiting = self._waiting.setdefault(policy, [])
                waiting.append(each)
                if len(waiting) >= 2 * room + _PAGE:
                    self._waiting[policy] = nsmallest(room, waiting, key=_place)
        for policy, noted in places.items():
            # The weight of their lane may have changed since they were noted.
            with self._cycle.surviving("could not update the waiting list", quota_id=policy):
                await self._cycle.backend.quotas.move_blocked(policy, noted)
        return await self._release(tag, free, FOR_QUOTA)

    async def _headroom(self, policy: str) -> int | None:
        """How many executions a policy admits now; None without limit, 0 if it is unreadable."""
        try:
            status = await self._cycle.backend.quotas.get_quota_status(policy)
            self._latest[policy] = (self._now_ms or 0) + longest_wait_of(status)
            return headroom_of(status)
        except NotFoundError:
            return None
        except EngineError as error:
            metrics.count("ff_admission_faults_total", "quota")
            self._cycle.failed("could not read a quota", error, quota_id=policy)
            return 0

    async def release_within_quotas(self) -> None:
        """Release as many as each policy admits: by priority, then the oldest."""
        for policy, waiting in self._waiting.items():
            best = nsmallest(self._room[policy] or 0, waiting, key=_place)
            with self._cycle.surviving("could not update the waiting list", quota_id=policy):
                ids = [each.execution_id for each in best]
                await self._cycle.backend.quotas.forget_blocked(policy, ids)
            by_tag: dict[str, list[BlockedExecution]] = {}
            for each in best:
                by_tag.setdefault(each.execution_id.tag, []).append(each)
            for tag, some in by_tag.items():
                with self._cycle.surviving("could not unblock", partition=tag):
                    await self._release(tag, some, FOR_QUOTA)

    async def _release(self, tag: str, some: Sequence[BlockedExecution], reason: str) -> int:
        if not some:
            return 0
        ids = [each.execution_id for each in some]
        outcomes = await self._cycle.backend.admission.unblock_many(tag, ids, reason)
        released = sum(outcome is None for outcome in outcomes)
        self._cycle.processed += released
        # Others were unblocked, cancelled or blocked for another reason meanwhile.
        return released


def _place(each: BlockedExecution) -> tuple[int, str]:
    return each.score, each.execution_id
