"""Quota policies on Valkey; each on its own partition, `{q:K}`."""

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from flowfabric.core.contracts import ListingPage
from flowfabric.core.contracts.quotas import (
    Admission,
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    CreateQuotaOutcome,
    QuotaCreated,
    QuotaExists,
    QuotaLimits,
    QuotaPage,
    QuotaReconciliation,
    QuotaStatus,
    RateExceeded,
    Unlimited,
)
from flowfabric.core.errors import CorruptionError, EngineError, NotFoundError, ValidationError
from flowfabric.core.forks import forget_on_fork
from flowfabric.core.ids import (
    ExecutionId,
    as_argument,
    given_name,
    is_uuid,
    validate_text,
    validate_uuid,
)
from flowfabric.core.partition import quota_partition
from flowfabric.core.stored import Stored, corrupt
from flowfabric.core.text import lossless, shown
from flowfabric.engine.api import check
from flowfabric.engine.api.quotas import DIRECT_CLAIM_MS, Quotas
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import (
    FunctionCalls,
    at_once,
    naming_missing,
    refused,
    split,
    text,
)
from flowfabric.engine.valkey.pages import (
    Damage,
    chunks,
    given_cursor,
    opened,
    opened_id,
    reading_cursor,
    sealed,
)
from flowfabric.engine.valkey.quota_slots import SlotAudit
from flowfabric.engine.valkey.score_indexes import ScoreIndexes
from flowfabric.valkey.transport import Arg

log = logging.getLogger(__name__)
POLICIES = "quota_policies"
_STORED = ("requests_per_window_seconds", "max_requests_per_window", "active_concurrency_cap")
_FIELDS = dict(zip(QuotaLimits.__struct_fields__, (*_STORED, "jitter_ms"), strict=True))
"""The limits, and how they are stored."""
_MAX_PAGE = 1000
_AT_ONCE = 16
_BATCH = 256
_POLICIES_AT_ONCE = 100
_STATUSES_AT_ONCE = 200
_STATUS = (
    *(*_FIELDS, "created_at", "window_count", "slots_held", "oldest_entry_at"),
    *("retry_after_ms", "name"),
)
_ALL = ""
_Run = tuple[ExecutionId, int | str]
"""An execution and the number of one of its runs, or `_ALL`."""


class ValkeyQuotas(Quotas):
    """`Quotas` on Valkey."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls
        self._scores = ScoreIndexes(calls)
        self._missing: set[str] = set()
        self._timers: dict[str, asyncio.Task[None]] = {}
        forget_on_fork(self)

    async def create_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int = 60,
        max_requests_per_window: int = 0,
        max_concurrent: int = 0,
        jitter_ms: int = 0,
        name: str = "",
    ) -> CreateQuotaOutcome:
        tag = self._tag(quota_policy_id)
        limits = (window_seconds, max_requests_per_window, max_concurrent, jitter_ms)
        QuotaLimits(**dict(zip(_FIELDS, limits, strict=True))).validate()
        validate_text(name, "name", limit=256)

        def decode(reply: list[Any]) -> CreateQuotaOutcome:
            if reply[1] == b"ALREADY_SATISFIED":
                return QuotaExists(quota_policy_id, differs=reply[2] == 1)
            return QuotaCreated(quota_policy_id)

        args = (quota_policy_id, _request_id(), *limits, name)
        return await self._calls.ask("ff_quota_create", tag, args, decode, op="create_quota_policy")

    async def update_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int | None = None,
        max_requests_per_window: int | None = None,
        max_concurrent: int | None = None,
        jitter_ms: int | None = None,
    ) -> None:
        tag = self._tag(quota_policy_id)
        values = (window_seconds, max_requests_per_window, max_concurrent, jitter_ms)
        given = {name: v for name, v in zip(_FIELDS, values, strict=True) if v is not None}
        if not given:
            raise ValidationError(
                "invalid_quota_spec", f"nothing to change: pass one of {', '.join(_FIELDS)}"
            )
        QuotaLimits(**given).validate()
        changes = [part for name, value in given.items() for part in (_FIELDS[name], value)]
        with naming_missing(quota_policy_id):
            opening = await self._calls.ask(
                *("ff_quota_update", tag, (quota_policy_id, *changes)),
                lambda reply: (int(reply[2]), int(reply[3])),
                op="update_quota_policy",
            )
        await self._open(quota_policy_id, *opening)

    async def get_quota_status(self, quota_policy_id: str) -> QuotaStatus:
        (found,) = await self._statuses(self._tag(quota_policy_id), [quota_policy_id])
        if isinstance(found, EngineError):
            raise found
        if found is None:
            raise NotFoundError(
                "quota_policy_not_found", given_name(quota_policy_id), op="get_quota_status"
            )
        return found

    async def list_quota_policies(self, after: str = "", limit: int = 100) -> QuotaPage:
        limit = min(check.whole(limit, "limit"), _MAX_PAGE)
        start = opened_id("quota", after)
        if limit <= 0:
            return QuotaPage(())
        damage = Damage("list_quota_policies")
        listed = await at_once(
            _AT_ONCE,
            lambda number: self._ids(f"{{q:{number}}}", start, limit + 1, damage),
            range(self._calls.counts.quota),
        )
        ids = sorted(each for part in listed for each in part)
        page = ids[:limit]
        places = [(self._tag(each), each) for each in page]
        answers = await at_once(
            _AT_ONCE,
            lambda group: self._statuses(group[0][0], [each for _, each in group]),
            split(places, _STATUSES_AT_ONCE, apart=True),
        )
        found: dict[str, QuotaStatus] = {}
        for status in (each for part in answers for each in part):
            if isinstance(status, QuotaStatus):
                found[status.quota_policy_id] = status
            elif isinstance(status, CorruptionError):
                damage.note(status)
            elif status is not None:
                raise status
        rows = tuple(found[each] for each in page if each in found)
        more = sealed("quota", page[-1]) if len(ids) > limit else None
        return QuotaPage(rows, more, tuple(damage.found))

    async def _ids(self, tag: str, after: str, count: int, damage: Damage) -> list[str]:
        members = await self._index_page(tag, after, count)
        found = (damage.keep(lambda m=member: _policy_id(m)) for member in members)
        return [each for each in found if each is not None]

    async def _index_page(self, tag: str, after: str | bytes, count: int) -> list[bytes]:
        key = keys.index(tag, POLICIES)
        first = b"(" + (after.encode() if isinstance(after, str) else after) if after else b"-"
        page = ("ZRANGE", key, first, "+", "BYLEX", "LIMIT", 0, count)
        return await self._calls.read(f"partition {tag}: {POLICIES}", *page)

    async def _statuses(
        self, tag: str, ids: Sequence[str]
    ) -> list[QuotaStatus | EngineError | None]:
        def decode(reply: list[Any]) -> list[QuotaStatus | EngineError | None]:
            return [_status(each, row) for each, row in zip(ids, reply[2], strict=True)]

        return await self._calls.ask(
            "ff_quota_status", tag, list(ids), decode, op="get_quota_status"
        )

    async def read_quota_policy_limits(self, quota_policy_id: str) -> QuotaLimits | None:
        tag = self._tag(quota_policy_id)
        context = f"quota {quota_policy_id}"
        found = await self._calls.read(
            f"{context}: record", "HGETALL", keys.quota(tag, quota_policy_id)
        )
        if not found:
            return None
        stored = Stored.from_hash(context, found)
        limits = {name: stored.number(field, 0) for name, field in _FIELDS.items()}
        try:
            return QuotaLimits(**limits).validate()
        except ValidationError as error:
            raise corrupt(context, "limits", error.detail) from None

    async def check_admission(
        self,
        quota_policy_id: str,
        execution_id: ExecutionId,
        *,
        run: int = 0,
        slot_ttl_ms: int = DIRECT_CLAIM_MS,
    ) -> Admission:
        tag, known = self._tag(quota_policy_id), self._calls.checked(execution_id)
        ttl = check.positive_ms(slot_ttl_ms, "slot_ttl_ms")
        (answer,) = await self._admit(tag, quota_policy_id, _of_runs([known], [run]), ttl)
        return Admitted() if isinstance(answer, Unlimited) else answer

    async def admit_many(
        self,
        quota_policy_id: str,
        execution_ids: Sequence[ExecutionId],
        *,
        runs: Sequence[int] = (),
        slot_ttl_ms: int = DIRECT_CLAIM_MS,
    ) -> list[Admission | Unlimited | EngineError]:
        ttl = check.positive_ms(slot_ttl_ms, "slot_ttl_ms")
        if not is_uuid(quota_policy_id):
            # It comes from a stored record: what cannot be read admits nothing.
            error = corrupt("quota_policy_id", shown(quota_policy_id), "is not a UUID")
            return [error for _ in execution_ids]
        tag = self._tag(quota_policy_id)
        answers = list[Admission | Unlimited | EngineError]()
        for part in chunks(_of_runs(execution_ids, runs), _BATCH):
            try:
                answers += await self._admit(tag, quota_policy_id, part, ttl)
            except NotFoundError:
                self._warn_missing(quota_policy_id)
                answers += [Unlimited() for _ in part]
            except EngineError as error:
                answers += [error for _ in part]
        return answers

    def _warn_missing(self, quota_policy_id: str) -> None:
        if quota_policy_id in self._missing:
            return
        self._missing.add(quota_policy_id)
        log.warning(
            "Executions name the quota %s, which does not exist: they start without a limit. "
            "Create it with: flowfabric quota create %s --max-requests N",
            *(given_name(quota_policy_id), as_argument(quota_policy_id)),
            extra={"action": "quota_missing", "quota_id": quota_policy_id},
        )

    async def _admit(
        self, tag: str, quota_policy_id: str, asked: Sequence[_Run], ttl: int
    ) -> list[Admission | Unlimited]:
        request = _request_id()

        def decode(reply: list[Any]) -> list[Admission | Unlimited]:
            if reply[2] == b"unlimited":
                return [Unlimited() for _ in asked]
            admitted, jitter = Admitted(request), int(reply[3])
            return [_admission(text(word), admitted, jitter) for word in reply[2]]

        args = (quota_policy_id, request, ttl, *chain(*asked))
        return await self._calls.ask("ff_quota_admit", tag, args, decode, op="check_admission")

    async def confirm_admission(
        self, quota_policy_id: str, execution_id: ExecutionId, *, run: int = 0
    ) -> None:
        await self._confirm(quota_policy_id, _of_runs([self._calls.checked(execution_id)], [run]))

    async def release_admission(
        self, quota_policy_id: str, execution_id: ExecutionId, *, run: int | None = None
    ) -> None:
        over = _of_runs([self._calls.checked(execution_id)], () if run is None else (run,), _ALL)
        await self._release(quota_policy_id, "", over)

    async def confirm_many(
        self,
        quota_policy_id: str,
        execution_ids: Sequence[ExecutionId],
        *,
        runs: Sequence[int] = (),
    ) -> None:
        for part in chunks(_of_runs(execution_ids, runs), _BATCH):
            await _unless_missing(self._confirm(quota_policy_id, part))

    async def release_many(
        self,
        quota_policy_id: str,
        execution_ids: Sequence[ExecutionId],
        *,
        runs: Sequence[int] = (),
        rollback: str = "",
    ) -> None:
        check.text(rollback, "rollback")
        for part in chunks(_of_runs(execution_ids, runs, _ALL), _BATCH):
            await _unless_missing(self._release(quota_policy_id, rollback, part))

    async def _confirm(self, quota_policy_id: str, claimed: Sequence[_Run]) -> None:
        args = tuple(chain(*claimed))
        await self._send("ff_quota_confirm", quota_policy_id, args, op="confirm_admission")

    async def _release(self, quota_policy_id: str, request: str, over: Sequence[_Run]) -> None:
        args, op = (request, *chain(*over)), "release_admission"
        reply = await self._send("ff_quota_release", quota_policy_id, args, op=op)
        await self._open(quota_policy_id, int(reply[3]), int(reply[4]))

    async def _send(
        self, function: str, quota_policy_id: str, args: Sequence[Arg], *, op: str
    ) -> list[Any]:
        tag = self._tag(quota_policy_id)
        return await self._calls.fcall(function, tag, (quota_policy_id, *args), op=op)

    async def _open(self, quota_policy_id: str, headroom: int, wait_ms: int = 0) -> None:
        """Release executions that wait for the policy, now or when its window has room.

        If that fails, or this process ends, a scanner does it.
        """
        if self.on_quota_opened is None:
            return
        if wait_ms and quota_policy_id not in self._timers:
            timer = asyncio.get_running_loop().create_task(self._reopen(quota_policy_id, wait_ms))
            self._timers[quota_policy_id] = timer
            timer.add_done_callback(lambda _: self._timers.pop(quota_policy_id, None))
        if headroom > 0:
            await self._tell(quota_policy_id, headroom)

    async def _reopen(self, quota_policy_id: str, wait_ms: int) -> None:
        await asyncio.sleep((wait_ms + 1) / 1000)
        await self._tell(quota_policy_id, None)

    async def _tell(self, quota_policy_id: str, headroom: int | None) -> None:
        try:
            if self.on_quota_opened is not None:
                await self.on_quota_opened(quota_policy_id, headroom)
        except EngineError as error:
            log.debug(
                "cannot release executions that wait for quota %s: %s", quota_policy_id, error
            )

    async def aclose(self) -> None:
        """Stop waiting for windows to have a place."""
        timers = list(self._timers.values())
        for timer in timers:
            timer.cancel()
        if timers:
            await asyncio.wait(timers)

    def forget(self) -> None:
        """In a forked child: the parent's timers stay the parent's."""
        self._timers.clear()

    async def note_blocked(
        self,
        quota_policy_id: str,
        execution_ids: Sequence[ExecutionId],
        places: Sequence[int] = (),
    ) -> None:
        by_time: Sequence[int | str] = places or [""] * len(execution_ids)
        for part in chunks(list(zip(execution_ids, by_time, strict=True)), _BATCH):
            args = [arg for pair in part for arg in pair]
            call = self._send("ff_quota_block", quota_policy_id, args, op="note_blocked")
            await _unless_missing(call)

    async def move_blocked(self, quota_policy_id: str, places: Mapping[ExecutionId, int]) -> None:
        key = keys.quota_blocked(self._tag(quota_policy_id), quota_policy_id)
        moved = [part for each, place in places.items() for part in (place, each)]
        await self._calls.transport.call("ZADD", key, "XX", *moved, key=key, replay_safe=True)

    async def forget_blocked(
        self, quota_policy_id: str, execution_ids: Sequence[ExecutionId]
    ) -> None:
        key = keys.quota_blocked(self._tag(quota_policy_id), quota_policy_id)
        for part in chunks(execution_ids, _BATCH):
            await self._calls.transport.call("ZREM", key, *part, key=key, replay_safe=True)

    async def blocked(
        self, quota_policy_id: str, limit: int = 100, after: str = ""
    ) -> ListingPage[ExecutionId]:
        key = keys.quota_blocked(self._tag(quota_policy_id), quota_policy_id)
        limit = min(check.whole(limit, "limit"), _MAX_PAGE)
        position = None
        if given_cursor(after):
            with reading_cursor():
                since, last = opened(after, 2)
                position = (float(int(since)), last)
        if limit <= 0:
            return ListingPage(())
        damage = Damage("blocked")
        found = await self._scores.page(key, position, limit + 1, damage)
        more = None
        if len(found) > limit:
            score, last = found[limit - 1]
            more = sealed(int(score), last)
        return ListingPage(tuple(each for _, each in found[:limit]), more, tuple(damage.found))

    async def quota_partitions(self) -> list[int]:
        numbers = range(self._calls.counts.quota)
        names = {keys.index(f"{{q:{number}}}", POLICIES): number for number in numbers}
        return [names[each] for each in await self._calls.existing(list(names))]

    async def reconcile_quota_counters(self, partition: int) -> QuotaReconciliation:
        number = check.whole(partition, "partition", 0, self._calls.counts.quota - 1)
        tag, after, policies, changed, errors = f"{{q:{number}}}", b"", 0, 0, 0
        while members := await self._index_page(tag, after, _POLICIES_AT_ONCE):
            for member in members:
                audit = SlotAudit(self._calls, tag, lossless(member))
                try:
                    changed += await audit.run()
                except EngineError as error:
                    log.warning(
                        *("cannot reconcile quota %s: %s", audit.shown_id, error),
                        extra={"action": "quota_unreadable", "quota_id": audit.shown_id},
                    )
                    errors += 1
                errors += audit.errors
                await self._open(audit.quota_policy_id, *audit.opening)
            policies += len(members)
            after = members[-1]
        return QuotaReconciliation(policies, changed, errors)

    def _tag(self, quota_policy_id: str) -> str:
        known = validate_uuid(quota_policy_id, "quota_policy_id")
        return f"{{q:{quota_partition(known, self._calls.counts)}}}"


def _request_id() -> str:
    """Short, because it is stored with every admission."""
    return os.urandom(6).hex()


def _policy_id(member: bytes) -> str:
    name = lossless(member)
    if not is_uuid(name):
        raise corrupt(POLICIES, "member", f"{shown(name)!r} is not a UUID")
    return name


def _status(quota_policy_id: str, row: Any) -> QuotaStatus | EngineError | None:
    if row is None:
        return None
    if row[0] == 0 and isinstance(row[1], bytes):
        return refused(row, "ff_quota_status", "get_quota_status")
    stored = Stored.from_row(f"quota {quota_policy_id}", _STATUS, row)
    return QuotaStatus(
        quota_policy_id=quota_policy_id,
        **{name: stored.number(name) for name in _FIELDS},
        created_at=stored.number("created_at", 0),
        window_count=stored.number("window_count"),
        slots_held=stored.number("slots_held"),
        oldest_entry_at=stored.maybe_number("oldest_entry_at"),
        retry_after_ms=stored.maybe_number("retry_after_ms"),
        name=stored.text("name", ""),
    )


def _admission(word: str, admitted: Admitted, jitter_ms: int) -> Admission:
    kind, _, number = word.partition(" ")
    match kind:
        case "admitted":
            return admitted
        case "already":
            return AlreadyAdmitted()
        case "rate":
            wait = int(number) + random.randint(0, jitter_ms)  # noqa: S311 - no secret
            return RateExceeded(min(wait, check.MAX_EXACT))
        case "concurrency":
            return ConcurrencyExceeded(int(number) if number else None)
        case _:
            raise ValueError(word)


def _of_runs(ids: Sequence[ExecutionId], runs: Sequence[int], default: int | str = 0) -> list[_Run]:
    numbers = [check.whole(run, "run", 0) for run in runs] or [default] * len(ids)
    return list(zip(ids, numbers, strict=True))


async def _unless_missing(call: Awaitable[object]) -> None:
    """Make the call; a policy that does not exist limits nothing."""
    with suppress(NotFoundError):
        await call
