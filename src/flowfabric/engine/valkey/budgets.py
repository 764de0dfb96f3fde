"""Budgets: definitions, usage and status."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from flowfabric.core.contracts import ListingPage
from flowfabric.core.contracts import budgets as contracts
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import ConflictError, CorruptionError, EngineError, NotFoundError
from flowfabric.core.ids import ExecutionId, as_argument, given_name
from flowfabric.core.stored import Stored
from flowfabric.core.text import lossless
from flowfabric.engine.api import budgets as api
from flowfabric.engine.api import check
from flowfabric.engine.api.reads import Reads
from flowfabric.engine.valkey import calls as function_calls
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.budget_holds import BudgetHolds, release_outcome, usage_outcome
from flowfabric.engine.valkey.calls import FunctionCalls, places_of, proof, text
from flowfabric.engine.valkey.pages import Damage, opened_id, sealed
from flowfabric.valkey.transport import Arg

log = logging.getLogger(__name__)
_MAX_PAGE = 1000
_MAX_EXAMINED, _EXAMINED_AT_ONCE = 10_000, 200
_AT_ONCE = 100
_READ_AT_ONCE = 100
_ASKED_AT_ONCE = 200
_MAX_WARNED = 1000


class ValkeyBudgets(BudgetHolds, api.Budgets):
    def __init__(self, calls: FunctionCalls, reads: Reads) -> None:
        super().__init__(calls)
        self._reads = reads
        self.on_budget_opened: api.OnBudgetOpened | None = None
        self._missing: set[str] = set()

    async def _opened(self, budget_id: str) -> None:
        """Release the executions that wait for the budget. A scan finds those that this misses."""
        if self.on_budget_opened is None:
            return
        try:
            await self.on_budget_opened(budget_id)
        except EngineError as error:
            message = (
                "cannot check the executions that wait for budget %s; a scanner checks later: %s"
            )
            log.warning(message, budget_id, error, extra={"action": "budget_opened_failed"})

    async def create_budget(self, budget: contracts.NewBudget) -> contracts.CreateBudgetOutcome:
        new = api.check_new_budget(budget)
        limits = zip(new.dimensions, new.hard_limits, new.soft_limits, strict=True)
        args: list[Arg] = [
            *(new.scope_type, new.scope_id, new.enforcement_mode, new.on_hard_limit),
            *(new.on_soft_limit, new.reset_interval_ms, new.dedup_ttl_ms),
            *(part for each in limits for part in each),
        ]

        def created(reply: list[Any]) -> contracts.CreateBudgetOutcome:
            if reply[2] == b"created":
                return contracts.BudgetCreated(new.budget_id)
            return contracts.BudgetExists(new.budget_id, reply[3] == 1)

        return await self._once("ff_budget_create", new.budget_id, args, created)

    async def update_budget_limits(
        self, budget_id: str, change: contracts.BudgetChange
    ) -> contracts.BudgetUpdated:
        changes = api.check_change(change)
        args = [part for pair in changes.items() for part in pair]

        def stored(_: list[Any]) -> contracts.BudgetUpdated:
            return contracts.BudgetUpdated()

        op = "update_budget_limits"
        updated = await self._once("ff_budget_update", budget_id, args, stored, op=op)
        await self._opened(budget_id)
        return updated

    async def delete_budget(
        self, budget_id: str, *, force: bool = False
    ) -> contracts.BudgetDeleted:
        tag = self._tag(budget_id)
        if not check.flag(force, "force"):
            await self._refuse_if_awaited(budget_id)
        done = await self._once("ff_budget_delete", budget_id, (), lambda reply: reply[2] == 1)
        await self._opened(budget_id)
        while not done:
            (audit,) = await self.reconcile_budget_counters(tag, [budget_id])
            # Another call may create it again meanwhile; the rest then goes with its next reset.
            done = audit.verdict != "going"
        return contracts.BudgetDeleted()

    async def _refuse_if_awaited(self, budget_id: str) -> None:
        status = await self.get_budget_status(budget_id)
        while noted := await self.blocked(budget_id, limit=_AT_ONCE):
            waiting = await asyncio.gather(*(self._waits_for(status, each) for each in noted))
            if any(waiting):
                problem = f"executions wait for it, such as {noted[waiting.index(True)].compact}"
                raise ConflictError("budget_attach_conflict", problem, op="delete_budget")
            await self.forget_blocked(budget_id, noted)

    async def _waits_for(self, status: contracts.BudgetStatus, execution_id: ExecutionId) -> bool:
        try:
            info = await self._reads.read_execution_info(execution_id)
        except NotFoundError:
            return False
        limit = (f"budget {status.label}:", f"budget {status.budget_id}:")
        return (info.blocking_detail or "").startswith(limit)

    async def reset_budget(self, budget_id: str) -> contracts.BudgetReset:
        outcome = await self._once(
            "ff_budget_reset", budget_id, (), lambda reply: contracts.BudgetReset(int(reply[2]))
        )
        await self._opened(budget_id)
        return outcome

    async def reset_due(self, tag: str, ids: Iterable[str]) -> list[str]:
        names = check.stored_names(ids, "ids")
        answers = await self._calls.ask_each("ff_budget_reset_due", self._checked_tag(tag), *names)
        for budget_id, answer in zip(names, answers, strict=True):
            if answer == "reset":
                log.info(
                    *("budget %s was reset: its period is over", budget_id),
                    extra={"action": "budget_reset", "budget_id": budget_id},
                )
                await self._opened(budget_id)
        return answers

    async def report_usage(
        self,
        handle: Handle,
        budget_id: str,
        dimensions: api.Amounts | Sequence[str],
        deltas: Sequence[int] | None = None,
        *,
        dedup_key: str = "",
    ) -> contracts.UsageOutcome:
        proof(check.handle(handle))
        return await self._spend(budget_id, api.reported(dimensions, deltas), dedup_key)

    async def report_usage_admin(
        self,
        budget_id: str,
        dimensions: api.Amounts | Sequence[str],
        deltas: Sequence[int] | None = None,
        *,
        dedup_key: str = "",
    ) -> contracts.UsageOutcome:
        spent = api.reported(dimensions, deltas)
        return await self._spend(budget_id, spent, dedup_key, op="report_usage_admin")

    async def record_spend(
        self,
        budget_id: str,
        execution_id: ExecutionId,
        deltas: api.Amounts,
        idempotency_key: str = "",
    ) -> contracts.UsageOutcome:
        eid, spent = self._calls.checked(execution_id), api.amounts(deltas, "deltas")
        key = api.check_key(idempotency_key, "idempotency_key")
        return await self._spend(budget_id, spent, key, execution_id=eid, op="record_spend")

    async def _spend(
        self,
        budget_id: str,
        spent: Mapping[str, int],
        dedup_key: str,
        *,
        execution_id: str = "",
        op: str = "report_usage",
    ) -> contracts.UsageOutcome:
        pairs = (part for pair in spent.items() for part in pair)
        args = (api.check_key(dedup_key), execution_id, *pairs)
        return await self._once("ff_budget_spend", budget_id, args, usage_outcome, op=op)

    async def release_budget(
        self, budget_id: str, execution_id: ExecutionId
    ) -> contracts.ReleaseOutcome:
        eid = self._calls.checked(execution_id)
        return await self._once("ff_budget_release", budget_id, (eid,), release_outcome)

    async def _rows(self, tag: str, ids: Sequence[str]) -> list[Any]:
        return await self._calls.ask("ff_budget_read", tag, tuple(ids), _each, op="read_budget")

    async def get_budget_status(self, budget_id: str) -> contracts.BudgetStatus:
        (row,) = await self._rows(self._tag(budget_id), [budget_id])
        status = _status(budget_id, row)
        if status is None:
            raise NotFoundError("budget_not_found", given_name(budget_id), op="get_budget_status")
        return status

    async def read_budget_usage_and_limits(self, budget_id: str) -> contracts.BudgetUsage:
        (row,) = await self._rows(self._tag(budget_id), [budget_id])
        status = _status(budget_id, row)
        if status is None:
            return contracts.BudgetUsage({}, {})
        limits = {f"hard:{name}": limit for name, limit in status.hard_limits.items()}
        limits |= {f"soft:{name}": limit for name, limit in status.soft_limits.items()}
        usage = {name: status.usage.get(name, 0) for name in status.hard_limits}
        return contracts.BudgetUsage(limits, usage)

    async def list_budgets(
        self,
        *,
        after: str = "",
        limit: int = 100,
        scope_type: str | None = None,
        scope_id: str | None = None,
    ) -> ListingPage[contracts.BudgetStatus]:
        wanted = {"scope_type": scope_type, "scope_id": scope_id}
        wanted = {name: check.text(value, name) for name, value in wanted.items() if value}
        limit = min(check.whole(limit, "limit", 1), _MAX_PAGE)
        position, examined = opened_id("budget", after), 0
        damage, found = Damage("list_budgets"), list[contracts.BudgetStatus]()
        while True:
            count = max(limit, _EXAMINED_AT_ONCE) if wanted else limit + 1 - len(found)
            ids = await self._ids_after(position, count)
            for status in await self._statuses(ids, damage):
                if any(getattr(status, name) != value for name, value in wanted.items()):
                    continue
                if len(found) == limit:
                    following = sealed("budget", found[-1].budget_id)
                    return ListingPage(tuple(found), following, tuple(damage.found))
                found.append(status)
            examined += len(ids)
            if len(ids) < count:
                return ListingPage(tuple(found), None, tuple(damage.found))
            position = ids[-1]
            if examined >= _MAX_EXAMINED:
                return ListingPage(tuple(found), sealed("budget", position), tuple(damage.found))

    async def _ids_after(self, after: str, limit: int) -> list[str]:
        """Ids of all partitions in order."""
        tags = [f"{{b:{number}}}" for number in range(self._calls.counts.budget)]
        parts = await asyncio.gather(*(self.stored_budgets(tag, after, limit) for tag in tags))
        return sorted(each for part in parts for each in part)[:limit]

    async def _statuses(self, ids: Sequence[str], damage: Damage) -> list[contracts.BudgetStatus]:
        by_tag: dict[str, list[str]] = {}
        for budget_id in ids:
            by_tag.setdefault(self._tag(budget_id), []).append(budget_id)
        rows = await asyncio.gather(*(self._rows(tag, own) for tag, own in by_tag.items()))
        named = {
            budget_id: row
            for own, part in zip(by_tag.values(), rows, strict=True)
            for budget_id, row in zip(own, part, strict=True)
        }
        found = (damage.keep(lambda each=each: _status(each, named[each])) for each in ids)
        return [status for status in found if status is not None]

    async def stored_budgets(self, tag: str, after: str = "", limit: int = 100) -> list[str]:
        key = keys.index(self._checked_tag(tag), "budget_policies")
        first = f"({after}" if after else "-"
        page = ("BYLEX", "LIMIT", 0, limit)
        members = await self._calls.read(f"{key}: index", "ZRANGE", key, first, "+", *page)
        return [lossless(member) for member in members]

    async def exhausted(
        self, budget_ids: Collection[str]
    ) -> dict[str, contracts.Exhausted | EngineError | None]:
        found: dict[str, contracts.Exhausted | EngineError | None] = {}
        named: list[tuple[str, str]] = []
        for budget_id in dict.fromkeys(budget_ids):
            try:
                named.append((self._tag(budget_id), budget_id))
            except EngineError as error:
                found[budget_id] = error
        apart = self._calls.transport.is_cluster
        groups = function_calls.split(sorted(named), _ASKED_AT_ONCE, apart=apart)
        for group, answers in await function_calls.call_each(groups, self._ask_exhausted):
            for position, (_, budget_id) in enumerate(group):
                failed = isinstance(answers, EngineError)
                found[budget_id] = (
                    answers if failed else self._exhausted(budget_id, answers[position])
                )
        return found

    async def _ask_exhausted(self, group: list[tuple[str, str]]) -> list[Any]:
        def answers(reply: list[Any]) -> list[Any]:
            if len(reply[2]) != len(group):
                raise ValueError("another number of answers")
            return list(reply[2])

        args = places_of(group)
        return await self._calls.ask("ff_budget_exhausted", group[0][0], args, answers)

    def _exhausted(self, budget_id: str, answer: Any) -> contracts.Exhausted | EngineError | None:
        if not isinstance(answer, bytes):
            dimension, used, limit, name, resets_at = answer
            return contracts.Exhausted(
                *(budget_id, lossless(dimension), int(used), int(limit), lossless(name)),
                int(resets_at) if resets_at else None,
            )
        word = lossless(answer)
        if word.startswith("error:"):
            return CorruptionError("corruption", word.removeprefix("error:"), op="exhausted")
        if word == "missing" and budget_id not in self._missing:
            if len(self._missing) < _MAX_WARNED:
                self._missing.add(budget_id)
            log.warning(
                "Executions name the budget %s, which does not exist: they start without a limit. "
                "Create it with: flowfabric budget create %s DIMENSION=LIMIT",
                *(given_name(budget_id), as_argument(budget_id)),
                extra={"action": "budget_missing", "budget_id": budget_id},
            )
        return None

    async def reconcile_budget_counters(
        self, tag: str, ids: Sequence[str]
    ) -> list[contracts.BudgetAudit]:
        names = function_calls.as_stored(check.stored_names(ids, "ids"))
        answers = await self._calls.ask(
            "ff_budget_reconcile",
            self._checked_tag(tag),
            names,
            _each,
            op="reconcile_budget_counters",
        )
        return [_audit(answer) for answer in answers]


def _each(reply: list[Any]) -> list[Any]:
    return list(reply[2])


def _audit(answer: Any) -> contracts.BudgetAudit:
    if isinstance(answer, bytes):
        return contracts.BudgetAudit(lossless(answer))
    verdict, returned, holders, ledgers = answer
    return contracts.BudgetAudit(text(verdict), int(returned), holders == 1, ledgers == 1)


def _status(budget_id: str, row: Any) -> contracts.BudgetStatus | None:
    """The budget of one row; None if there is none."""
    context = f"budget {budget_id}"
    if isinstance(row, bytes):
        problem = lossless(row).removeprefix("error:")
        raise CorruptionError("corruption", f"{context}: stored keys: {problem}")
    if not row:
        return None
    stored, limits, usage, reserved = (Stored.from_hash(context, part) for part in row)

    def numbers(part: Stored, prefix: str = "") -> dict[str, int]:
        names = sorted(name for name in part.fields if name.startswith(prefix))
        return {name.removeprefix(prefix): part.number(name) for name in names}

    def time(name: str) -> str | None:
        at = stored.maybe_number(name)
        return None if at is None else str(at)

    return contracts.BudgetStatus(
        budget_id=budget_id,
        scope_type=stored.text("scope_type", ""),
        scope_id=stored.text("scope_id", ""),
        enforcement_mode=stored.text("enforcement_mode", "strict"),
        on_hard_limit=stored.text("on_hard_limit", "fail"),
        on_soft_limit=stored.text("on_soft_limit", "warn"),
        reset_interval_ms=stored.number("reset_interval_ms", 0),
        dedup_ttl_ms=stored.number("dedup_ttl_ms"),
        usage=numbers(usage),
        reserved=numbers(reserved),
        hard_limits=numbers(limits, "hard:"),
        soft_limits=numbers(limits, "soft:"),
        breach_count=stored.number("breach_count", 0),
        soft_breach_count=stored.number("soft_breach_count", 0),
        reset_count=stored.number("reset_count", 0),
        last_breach_dim=stored.maybe_text("last_breach_dim"),
        **{name: time(name) for name in _TIMES},
    )


_TIMES = ("created_at", "next_reset_at", "last_reset_at", "last_breach_at", "breached_at")
