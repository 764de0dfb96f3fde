"""What executions hold of budgets, which of them wait for one, and their ledgers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from flowfabric.core.contracts import budgets as contracts
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import invalid_input
from flowfabric.core.ids import ExecutionId, PartitionKey, new_uuid, stored_id, validate_uuid
from flowfabric.core.partition import budget_partition
from flowfabric.core.stored import corrupt
from flowfabric.core.text import lossless
from flowfabric.engine.api import budgets as api
from flowfabric.engine.api import check
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, naming_missing, proof, text
from flowfabric.valkey.transport import Arg

T = TypeVar("T")


class _Hold(msgspec.Struct, array_like=True):
    execution_id: str
    epoch: int


_hold = msgspec.msgpack.Decoder(_Hold)


def usage_outcome(reply: list[Any]) -> contracts.UsageOutcome:
    """What a report or a settlement answered."""
    match reply[2:]:
        case [b"ok"]:
            return contracts.UsageOk()
        case [b"already_applied"]:
            return contracts.UsageAlreadyApplied()
        case _:
            return _breach(reply)


def release_outcome(reply: list[Any]) -> contracts.ReleaseOutcome:
    return "noop" if reply[2] == b"noop" else "released"


def _amounts(pairs: Sequence[Any]) -> dict[str, int]:
    names, amounts = pairs[::2], pairs[1::2]
    return {text(name): int(amount) for name, amount in zip(names, amounts, strict=True)}


def _breach(reply: list[Any]) -> contracts.SoftBreach | contracts.HardBreach:
    kind, dimension, current, limit, action, *held = reply[2:]
    fields = (text(dimension), int(current), int(limit), text(action))
    if kind == b"soft_breach":
        return contracts.SoftBreach(*fields)
    if kind != b"hard_breach":
        raise ValueError(kind)
    return contracts.HardBreach(*fields, int(held[0]))


class BudgetHolds:
    """The part of `ValkeyBudgets` about executions."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    def _tag(self, budget_id: str) -> str:
        number = budget_partition(validate_uuid(budget_id, "budget_id"), self._calls.counts)
        return f"{{b:{number}}}"

    def _checked_tag(self, tag: str) -> str:
        key = PartitionKey(tag)
        if not key.startswith("{b:") or key.index_number >= self._calls.counts.budget:
            last = self._calls.counts.budget - 1
            raise invalid_input("tag", f"must be a partition from {{b:0}} to {{b:{last}}}")
        return tag

    async def _once(
        self,
        function: str,
        budget_id: str,
        args: Sequence[Arg],
        decode: Callable[[list[Any]], T],
        *,
        op: str = "",
    ) -> T:
        """What a function answers that recognises the repeat of a request."""
        tag = self._tag(budget_id)
        op = op or f"{function.removeprefix('ff_budget_')}_budget"
        with naming_missing(budget_id):
            return await self._calls.ask(
                function, tag, (budget_id, new_uuid(), *args), decode, op=op
            )

    async def _step(self, function: str, budget_id: str, args: Sequence[Arg], op: str) -> int:
        """How many entries a repeatable step changed."""
        tag = self._tag(budget_id)
        return await self._calls.ask(
            function, tag, (budget_id, *args), lambda reply: int(reply[2]), op=op
        )

    async def reserve(
        self,
        handle: Handle,
        budget_id: str,
        deltas: api.Amounts,
        reservation_id: str,
        *,
        ttl_ms: int | None = None,
    ) -> contracts.ReserveOutcome:
        holder, asked = check.handle(handle), api.amounts(deltas, "deltas", low=1)
        key = api.check_key(reservation_id, "reservation_id", required=True)
        ttl = "" if ttl_ms is None else check.positive_ms(ttl_ms, "ttl_ms")
        self._tag(budget_id)
        # First the record: whatever ends the lease from here on gives the hold back.
        expires_at = await self._calls.ask_about(
            holder.execution_id,
            "ff_hold_budget",
            (proof(holder), budget_id),
            lambda reply: int(reply[2]),
            op="reserve",
        )

        def reserved(reply: list[Any]) -> contracts.ReserveOutcome:
            if reply[2] == b"reserved":
                return contracts.Reserved(key, _amounts(reply[3:]))
            return _breach(reply)

        pairs = (part for pair in asked.items() for part in pair)
        lease = (holder.execution_id, holder.lease_epoch, expires_at)
        args = (key, *lease, ttl, *pairs)
        return await self._once("ff_budget_reserve", budget_id, args, reserved, op="reserve")

    async def settle(
        self, budget_id: str, reservation_id: str, actual: api.Amounts | None = None
    ) -> contracts.UsageOutcome:
        key = api.check_key(reservation_id, "reservation_id", required=True)
        spent = {} if actual is None else api.amounts(actual, "actual")
        pairs = (part for pair in spent.items() for part in pair)
        args = (key, *pairs)
        return await self._once("ff_budget_settle", budget_id, args, usage_outcome, op="settle")

    async def release_reservation(
        self, budget_id: str, reservation_id: str
    ) -> contracts.ReleaseOutcome:
        key = api.check_key(reservation_id, "reservation_id", required=True)
        return await self._once(
            "ff_budget_unreserve", budget_id, (key,), release_outcome, op="release_reservation"
        )

    async def return_holds(self, budget_id: str, execution_id: str, lease_epoch: int) -> int:
        eid = self._calls.checked(execution_id)
        args = (eid, check.whole(lease_epoch, "lease_epoch", 0))
        return await self._step("ff_budget_return_holds", budget_id, args, "return_holds")

    async def extend_holds(
        self, budget_id: str, execution_id: str, lease_epoch: int, expires_at: int
    ) -> int:
        eid = self._calls.checked(execution_id)
        epoch = check.whole(lease_epoch, "lease_epoch", 0)
        args = (eid, epoch, check.timestamp(expires_at, "expires_at"))
        return await self._step("ff_budget_extend_holds", budget_id, args, "extend_holds")

    async def holders(
        self, budget_id: str, after: str = "", limit: int = 100
    ) -> list[contracts.BudgetHolder]:
        names = await self._names(budget_id, "holders", after, limit)
        if not names:
            return []
        tag, context = self._tag(budget_id), f"budget {budget_id}"
        ids = [name.partition(" ")[2] for name in names]
        key = keys.budget_part(tag, budget_id, "holds")
        held: list[bytes | None] = await self._calls.read(f"{context}: holds", "HMGET", key, *ids)
        found: list[contracts.BudgetHolder] = []
        for name, packed in zip(names, held, strict=True):
            if packed is None:
                # It ended between the two reads.
                continue
            try:
                epoch = _hold.decode(packed).epoch
            except msgspec.MsgspecError:
                raise corrupt(context, "holds", "has an unreadable entry") from None
            eid = stored_id(name.partition(" ")[0], context)
            found.append(contracts.BudgetHolder(eid, epoch, name))
        return found

    async def ledgers(self, budget_id: str, after: str = "", limit: int = 100) -> list[str]:
        return await self._names(budget_id, "by_exec:index", after, limit)

    async def _names(self, budget_id: str, part: str, after: str, limit: int) -> list[str]:
        """Members of an index in the order of their names."""
        key = keys.budget_part(self._tag(budget_id), budget_id, part)
        first = f"({check.text(after, 'after')}" if after else "-"
        page = ("BYLEX", "LIMIT", 0, check.whole(limit, "limit", 1))
        place = f"budget {budget_id}: {part}"
        members = await self._calls.read(place, "ZRANGE", key, first, "+", *page)
        return [lossless(member) for member in members]

    async def forget_ledgers(self, budget_id: str, execution_ids: Iterable[str]) -> int:
        names = check.stored_names(execution_ids, "execution_ids")
        return await self._step("ff_budget_forget", budget_id, names, "forget_ledgers")

    async def note_blocked(self, budget_id: str, execution_ids: Iterable[str]) -> int:
        args = ("add", *map(self._calls.checked, execution_ids))
        return await self._step("ff_budget_blocked", budget_id, args, "note_blocked")

    async def forget_blocked(self, budget_id: str, execution_ids: Iterable[str]) -> int:
        args = ("remove", *check.stored_names(execution_ids, "execution_ids"))
        return await self._step("ff_budget_blocked", budget_id, args, "forget_blocked")

    async def blocked(
        self, budget_id: str, *, offset: int = 0, limit: int = 100
    ) -> list[ExecutionId]:
        key = keys.budget_part(self._tag(budget_id), budget_id, "blocked")
        first, context = check.whole(offset, "offset", 0), f"budget {budget_id}"
        last = first + check.whole(limit, "limit", 1) - 1
        members = await self._calls.read(f"{context}: blocked", "ZRANGE", key, first, last)
        return [stored_id(lossless(member), context) for member in members]
