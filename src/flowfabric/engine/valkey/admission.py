"""Blocks executions before a claim, unblocks them, and delivers what their runs give back."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core.contracts import leases
from flowfabric.core.contracts.leases import Candidate
from flowfabric.core.contracts.quotas import QuotaStatus
from flowfabric.core.errors import EngineError, NotFoundError
from flowfabric.core.ids import ExecutionId, is_execution_id, new_uuid
from flowfabric.core.state import BlockingReason, PublicState
from flowfabric.core.stored import Stored
from flowfabric.engine.api import check
from flowfabric.engine.api.admission import (
    FOR_BUDGET,
    FOR_QUOTA,
    AdmissionControl,
    Block,
    BlockedExecution,
    headroom_of,
    longest_wait_of,
)
from flowfabric.engine.api.budgets import Budgets
from flowfabric.engine.api.executions import BATCH
from flowfabric.engine.api.places import CLOSED_STATES
from flowfabric.engine.api.quotas import Quotas
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, as_stored, at_once, decoding, refused
from flowfabric.engine.valkey.drains import CascadeDrains
from flowfabric.engine.valkey.executions import PUBLIC
from flowfabric.engine.valkey.leases import Slot
from flowfabric.engine.valkey.pages import chunks
from flowfabric.engine.valkey.record import Record
from flowfabric.engine.valkey.returns import Returns

log = logging.getLogger(__name__)
_UNBLOCKED = (b"waiting", b"closed", b"cancelled")
_REFUSALS = frozenset(
    {
        *("execution_not_found", "execution_not_active", "execution_not_eligible"),
        "invalid_blocking_reason",
    }
)
_AT_ONCE = 16
_PAGE = 100
_SOON_MS = 1000
_PRIORITY_WEIGHT = 10**12


class ValkeyAdmission(AdmissionControl):
    """`AdmissionControl` on Valkey."""

    def __init__(
        self, calls: FunctionCalls, drains: CascadeDrains, budgets: Budgets, quotas: Quotas
    ) -> None:
        self._calls = calls
        self._drains = drains
        self._budgets = budgets
        self._quotas = quotas
        self._returns = Returns(calls, budgets, quotas)
        self._renewed: dict[str, dict[ExecutionId, int]] = {}
        """By quota policy: the renewed runs whose slots are about to be confirmed."""
        calls.on_returns = self._deliver_soon
        budgets.on_budget_opened = self._budget_opened
        quotas.on_quota_opened = self._quota_opened

    async def read_candidates(self, ids: Sequence[ExecutionId]) -> list[Candidate | EngineError]:
        lanes = _Lanes(self._calls)

        async def read(execution_id: ExecutionId) -> Candidate | EngineError:
            try:
                record = await Record.read(self._calls, self._calls.checked(execution_id))
                if record is None:
                    return NotFoundError("execution_not_found", op="read_candidates")
                return await lanes.candidate(record)
            except EngineError as error:
                return error

        return await at_once(_AT_ONCE, read, check.listed(ids, "ids"))

    async def block_many(self, tag: str, blocks: Sequence[Block]) -> list[EngineError | None]:
        tag, outcomes = self._calls.checked_tag(tag), list[EngineError | None]()
        for part in chunks(check.listed(blocks, "blocks"), BATCH):
            answers = await self._block(tag, "", part)
            outcomes += (
                None
                if answer == b"blocked"
                else refused(answer, "ff_block", "block_many", block.execution_id)
                for block, answer in zip(part, answers, strict=True)
            )
            held = [b for b, answer in zip(part, answers, strict=True) if answer == b"blocked"]
            await self._note(held)
        return outcomes

    async def _note(self, blocks: Sequence[Block]) -> None:
        """Note who waits for a limit: its opening then releases them; otherwise, a scanner does."""
        waiting: dict[tuple[str, str], list[Block]] = {}
        for block in blocks:
            if block.waits_for:
                waiting.setdefault((block.reason, block.waits_for), []).append(block)
        for (reason, limit_id), some in waiting.items():
            ids = [block.execution_id for block in some]
            try:
                # It may have opened since it refused them.
                if reason == FOR_BUDGET:
                    await self._budgets.note_blocked(limit_id, ids)
                    await self.open_budget(limit_id)
                else:
                    places = [block.place for block in some]
                    await self._quotas.note_blocked(limit_id, ids, places)
                    await self.open_quota(limit_id)
            except EngineError as error:
                log.debug("cannot record the executions that wait for %s: %s", limit_id, error)

    async def block(self, block: Block, lane_id: str) -> leases.BlockOutcome:
        """Block one execution; the engine recognises a repeat of the call."""
        execution_id, op = block.execution_id, "block_execution_for_admission"
        answers = await self._block(execution_id.tag, new_uuid(), [block], lane_id)
        with decoding(answers, "ff_block", op, execution_id):
            (answer,) = answers
        if answer == b"blocked":
            return leases.Blocked(execution_id, block.reason)
        error = refused(answer, "ff_block", op, execution_id)
        if error.code not in _REFUSALS:
            raise error
        return leases.Rejected(error.code)

    async def _block(
        self, tag: str, request: str, blocks: Sequence[Block], lane_id: str = ""
    ) -> list[Any]:
        args: list[Any] = [request]
        for block in blocks:
            args += (block.execution_id, lane_id, check.text(block.reason, "reason"))
            args += (check.reason(block.detail, "reason_detail"), _moment(block))
        reply = await self._calls.fcall("ff_block", tag, args, op="block_many")
        with decoding(reply, "ff_block", "block_many"):
            answers: list[Any] = list(reply[2])
        return answers

    async def unblock_many(
        self, tag: str, ids: Iterable[str], expected_blocking_reason: str
    ) -> list[EngineError | None]:
        tag, expected = self._calls.checked_tag(tag), expected_blocking_reason
        outcomes: list[EngineError | None] = []
        ids = check.stored_names(ids, "ids")
        for part in chunks(ids, BATCH):
            answers = await self._unblock(tag, "", check.text(expected, "expected"), part)
            outcomes += (
                None
                if answer in _UNBLOCKED
                else refused(answer, "ff_unblock", "unblock_many", each)
                for each, answer in zip(part, answers, strict=True)
            )
        if log.isEnabledFor(logging.DEBUG):
            for each, outcome in zip(ids, outcomes, strict=True):
                if outcome is None:
                    extra = {"action": "execution_unblocked", "execution_id": each}
                    log.debug("unblocked %s: %s", each, expected, extra=extra)
        return outcomes

    async def unblock(self, execution_id: ExecutionId, expected: str) -> PublicState:
        """Unblock one execution; the engine recognises a repeat of the call."""
        answers = await self._unblock(execution_id.tag, new_uuid(), expected, [execution_id])
        with decoding(answers, "ff_unblock", "unblock_execution", execution_id):
            (answer,) = answers
        if answer not in _UNBLOCKED:
            raise refused(answer, "ff_unblock", "unblock_execution", execution_id)
        return PUBLIC[answer]

    async def _unblock(
        self, tag: str, request: str, expected: str, ids: Sequence[str]
    ) -> list[Any]:
        args = as_stored((request, expected, *ids))
        reply = await self._calls.fcall("ff_unblock", tag, args, op="unblock_many")
        with decoding(reply, "ff_unblock", "unblock_many"):
            answers: list[Any] = list(reply[2])
        self._drains.note(tag, reply[3:])
        return answers

    async def read_blocked(
        self, tag: str, ids: Sequence[str], reason: str
    ) -> list[BlockedExecution]:
        lanes = _Lanes(self._calls)

        async def read(member: str) -> BlockedExecution | None:
            try:
                record = await Record.read(self._calls, ExecutionId.trusted(member))
                if record is None or record.state_vector.blocking_reason != BlockingReason(reason):
                    return None
                found = msgspec.structs.astuple(await lanes.candidate(record))
                closed = await lanes.is_closed(record)
                return BlockedExecution(*found, retry_at=record.retry_at, lane_closed=closed)
            except EngineError as error:
                log.debug("%s stays blocked: %s", member, error)
                return None

        known = [member for member in ids if is_execution_id(member, tag)]
        found = await at_once(_AT_ONCE, read, known)
        return [each for each in found if each is not None]

    async def open_budget(self, budget_id: str) -> int:
        released = 0
        while page := await self._budgets.blocked(budget_id, limit=_PAGE):
            if (await self._budgets.exhausted([budget_id]))[budget_id] is not None:
                break
            # Before the release: a worker that blocks one of them again notes it anew.
            await self._budgets.forget_blocked(budget_id, page)
            released += await self._release(page, FOR_BUDGET)
        return released

    async def open_quota(self, quota_policy_id: str) -> int | None:
        status = await self._quotas.get_quota_status(quota_policy_id)
        room = headroom_of(status)
        if room and status.jitter_ms:
            return await self._let_go_in_time(status, room)
        more = await self._let_go(quota_policy_id, check.MAX_EXACT if room is None else room)
        if not more or not (await self._quotas.blocked(quota_policy_id, 1)).entries:
            return None
        # The released ones have not started yet: look again when they have.
        return status.retry_after_ms if not room else _SOON_MS

    async def _budget_opened(self, budget_id: str) -> None:
        await self.open_budget(budget_id)

    async def _quota_opened(self, quota_policy_id: str, headroom: int | None) -> None:
        if headroom is None:
            await self.open_quota(quota_policy_id)
        else:
            await self._let_go(quota_policy_id, headroom)

    async def _let_go(self, quota_policy_id: str, headroom: int) -> bool:
        """Release up to `headroom` executions that wait for a policy; whether more may wait."""
        while headroom > 0:
            page = await self._quotas.blocked(quota_policy_id, min(headroom, _PAGE))
            if not page.entries:
                return False
            await self._quotas.forget_blocked(quota_policy_id, page.entries)
            headroom -= await self._release(page.entries, FOR_QUOTA)
        return True

    async def _let_go_in_time(self, status: QuotaStatus, headroom: int) -> int | None:
        """Release those whose own time has come; in how many ms to look again, if others wait.

        Jitter gives each its own time, so that they do not all start when the window opens.
        """
        quota_policy_id, ahead = status.quota_policy_id, list[int]()
        now = await self._calls.server_time_ms()
        latest = now + longest_wait_of(status)
        due: Sequence[ExecutionId] = ()
        cursor: str | None = ""
        while cursor is not None and headroom > 0:
            page = await self._quotas.blocked(quota_policy_id, _PAGE, cursor)
            cursor = page.next_cursor
            found = await self._retry_times(page.entries)
            times = {each: at if at <= latest else 0 for each, at in found.items()}
            ahead += [at for at in times.values() if at > now]
            due = [each for each in page.entries if times.get(each, 0) <= now]
            while due and headroom > 0:
                some, due = due[:headroom], due[headroom:]
                await self._quotas.forget_blocked(quota_policy_id, some)
                headroom -= await self._release(some, FOR_QUOTA)
        if cursor is not None or due:
            return _SOON_MS
        return min(ahead) - now if ahead else None

    async def _retry_times(self, ids: Sequence[ExecutionId]) -> dict[ExecutionId, int]:
        """When those that wait for a quota policy try again; what is not known is due."""
        by_tag: dict[str, list[ExecutionId]] = {}
        for each in ids:
            by_tag.setdefault(each.tag, []).append(each)
        found = [
            await self.read_blocked(tag, members, FOR_QUOTA) for tag, members in by_tag.items()
        ]
        return {each.execution_id: each.retry_at or 0 for part in found for each in part}

    async def change_place(
        self, quota_policy_id: str, execution_id: ExecutionId, place: int
    ) -> None:
        """Put an execution in its new place in the line. If this fails, a scanner does it."""
        try:
            await self._quotas.move_blocked(quota_policy_id, {execution_id: place})
        except EngineError as error:
            log.debug("cannot move %s among those that wait: %s", execution_id, error)

    async def _release(self, ids: Sequence[ExecutionId], reason: str) -> int:
        """Release executions that still wait for this reason; returns how many may start now.

        Those of a closed lane do not count: they would keep the room from the others.
        """
        by_tag: dict[str, list[ExecutionId]] = {}
        for each in ids:
            by_tag.setdefault(each.tag, []).append(each)
        answers = [await self._unblock(tag, "", reason, members) for tag, members in by_tag.items()]
        return sum(part.count(b"waiting") for part in answers)

    async def confirm(self, claimed: Mapping[str, Sequence[Slot]]) -> None:
        """Keep the slots of claimed runs, by quota policy. The next renewal repeats it."""
        for policy, slots in claimed.items():
            ids, runs = zip(*slots, strict=True)
            try:
                await self._quotas.confirm_many(policy, ids, runs=runs)
            except EngineError as error:
                log.warning(
                    *("slots of quota policy %s not confirmed yet: %s", policy, error),
                    extra={"action": "confirm_failed", "quota_id": policy},
                )

    def confirm_soon(self, renewed: Mapping[str, Sequence[Slot]]) -> None:
        """Repeat it for leases that were renewed; they do not wait for it."""
        for policy, slots in renewed.items():
            self._renewed.setdefault(policy, {}).update(slots)
            self._drains.start(
                f"slots {policy}", lambda policy=policy: self._confirm_renewed(policy)
            )

    async def _confirm_renewed(self, policy: str) -> bool:
        if slots := self._renewed.pop(policy, None):
            await self.confirm({policy: list(slots.items())})
        return False

    async def deliver_returns(self, tag: str) -> int:
        return await self._returns.deliver(self._calls.checked_tag(tag))

    def _deliver_soon(self, tags: Sequence[str]) -> None:
        for tag in tags:
            self._drains.start(f"returns {tag}", lambda tag=tag: self._deliver_more(tag))

    async def _deliver_more(self, tag: str) -> bool:
        return await self._returns.deliver(tag) > 0


class _Lanes:
    """The lane settings that admission needs, each read once."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls
        self._known: dict[str, Stored] = {}

    async def candidate(self, record: Record) -> Candidate:
        """What a record says about admission, with its place in the order of its lane."""
        place, priority = record.number("created_at"), record.number("priority", 0)
        if priority:
            # What one point of priority is worth.
            weight = (await self._settings(record)).number("priority_weight_ms", _PRIORITY_WEIGHT)
            place -= priority * weight
        named = record.budget_ids, record.quota_policy_id
        return Candidate(record.execution_id, *named, place, record.run + 1)

    async def is_closed(self, record: Record) -> bool:
        """Whether the lane of an execution gives out nothing now."""
        return (await self._settings(record)).text("state", "active") in CLOSED_STATES

    async def _settings(self, record: Record) -> Stored:
        tag, lane_id = record.execution_id.tag, record.lane_id
        key, names = keys.lane(tag, lane_id, "config"), ("state", "priority_weight_ms")
        if key not in self._known:
            context = f"lane {lane_id} of {tag}"
            row = await self._calls.read(f"{context}: config", "HMGET", key, *names)
            self._known[key] = Stored.from_row(context, names, row)
        return self._known[key]


def _moment(block: Block) -> str:
    if block.retry_in_ms is not None:
        return f"+{check.whole(block.retry_in_ms, 'retry_in_ms', 0)}"
    at = block.retry_at
    return "" if at is None else str(check.timestamp(at, "retry_at", low=0))
