"""Pausing attempts until a condition is met."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec

from flowfabric.core.conditions import (
    Condition,
    check_bindings,
    check_tree,
    check_types,
    condition_json,
    referenced_waitpoint_keys,
)
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.suspension import (
    AlreadySatisfiedSuspension,
    FreshWaitpoint,
    Resumed,
    ResumePolicy,
    Suspended,
    SuspendedEntry,
    SuspendedPage,
    SuspendOutcome,
    SuspensionDetails,
    UsePending,
    WaitpointDetails,
)
from flowfabric.core.errors import StateError, ValidationError, invalid_input
from flowfabric.core.ids import (
    ExecutionId,
    WaitpointToken,
    new_uuid,
    stored_id,
    validate_text,
    validate_uuid,
)
from flowfabric.core.state import PublicState
from flowfabric.core.stored import Stored, corrupt
from flowfabric.core.text import lossless, raw
from flowfabric.engine.api.arguments import (
    MAX_EXACT,
    each_stored,
    fence_text,
    flag,
    instance,
    listed,
    one_of,
    partition_number,
    whole,
)
from flowfabric.engine.api.suspensions import Suspensions
from flowfabric.engine.valkey.calls import FunctionCalls, decoding, proof, text
from flowfabric.engine.valkey.damage import Damage
from flowfabric.engine.valkey.page_cursor import given_cursor, opened, reading_cursor, sealed
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.engine.valkey.waitpoints import MAX_KEY_BYTES

_policy_json = msgspec.json.Encoder().encode

_FLAGS = (
    *("consume_matched_signals", "retain_signal_buffer_until_closed"),
    "close_waitpoint_on_resume",
)

_REQUESTERS = ("worker", "operator", "policy", "system_timeout_policy")

_BEHAVIORS = (
    *("fail", "cancel", "expire", "auto_resume", "auto_resume_with_timeout_signal"),
    "escalate",
)

_MAX_WAITPOINTS = 64

_SUSPENDED_PARTS = (
    *("lane_id", "suspension_id", "reason_code", "requested_by", "created_at", "timeout_at"),
)

_UNREADABLE_PARTS = 4

# Parts of a row that names a place only: its suspension has just ended, or is unreadable.
_PLACE_PARTS = 3

Binding = FreshWaitpoint | UsePending

_pack = msgspec.msgpack.Encoder().encode

_TRIGGERS = ("signal", "operator", "auto_resume")

_PAST_TOLERANCE_MS = 600_000

_MAX_POINTER_BYTES = 65_536

_Row = tuple[tuple[int, str], list[Any]]
"""Where it stands, and what is stored."""

_LANES_AT_ONCE = 500

_EXPIRED_AT_ONCE = 20  # Each may close that many waitpoints.

_MAX_PAGE = 1000


class ValkeySuspensions(Suspensions):
    """`Suspensions` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places

    async def suspend(
        self,
        handle: Handle,
        *,
        condition: Condition,
        waitpoints: Sequence[Binding] | None = None,
        suspension_id: str | None = None,
        reason_code: str = "waiting_for_signal",
        requested_by: str = "worker",
        timeout_at: int | None = None,
        timeout_behavior: str | None = None,
        resume_policy: ResumePolicy | None = None,
        continuation_metadata_pointer: str = "",
        idempotency_key: str | None = None,
    ) -> SuspendOutcome:
        if instance(handle, Handle, "handle").kind == "suspended":
            raise StateError("already_suspended", op="suspend")
        execution_id = self._calls.checked(handle.execution_id)
        check_types(condition)
        bindings = _fresh(condition) if waitpoints is None else _named(waitpoints)
        await self._check_suspend(condition, bindings, timeout_at)
        options = _options(
            reason_code, requested_by, timeout_behavior, resume_policy, idempotency_key
        )
        options["pointer"] = validate_text(
            continuation_metadata_pointer, "continuation_metadata_pointer", limit=_MAX_POINTER_BYTES
        )
        identity = (
            new_uuid() if suspension_id is None else validate_uuid(suspension_id, "suspension_id")
        )
        options["idem"] = identity if idempotency_key is None else idempotency_key
        options["suspension_id"] = identity
        options["waitpoints"] = [_binding(binding) for binding in bindings]
        options["referenced"] = referenced_waitpoint_keys(condition)
        options["condition"] = condition_json(condition)
        if timeout_at is not None:
            options["timeout_at"] = timeout_at
        reply = await self._calls.fcall(
            "ff_suspend",
            execution_id.tag,
            (execution_id, proof(handle), _pack(options)),
            op="suspend",
            replay_safe=bool(options["idem"]),
        )
        with decoding(reply, "ff_suspend", "suspend", execution_id):
            return _suspend_outcome(handle, reply)

    async def suspend_by_triple(
        self, execution_id: ExecutionId, fence: Fence, **arguments: Any
    ) -> SuspendOutcome:
        execution_id = self._calls.checked(execution_id)
        lease_id, epoch, attempt_id, index = fence_text(fence).split("/")
        handle = Handle(
            execution_id=execution_id,
            lease=f"{lease_id}/{epoch}",
            attempt=f"{attempt_id}/{index}",
            lease_ttl_ms=0,
            lane_id="default",
            worker_instance_id="",
        )
        return await self.suspend(handle, **arguments)

    async def _check_suspend(
        self, condition: Condition, bindings: Sequence[Binding], timeout_at: int | None
    ) -> None:
        keys = [b.waitpoint_key if isinstance(b, FreshWaitpoint) else None for b in bindings]
        check_bindings(condition, keys, timeout_given=timeout_at is not None)
        if timeout_at is not None:
            # Whether it is past is for the engine's clock to say.
            whole(timeout_at, "timeout_at", -MAX_EXACT)
        try:
            check_tree(condition)
            _check_limits(bindings)
        except ValidationError:
            # A time long past is refused first, by the engine's clock. A call that goes through
            # has it checked there; one that stops here has to ask.
            if (
                timeout_at is not None
                and timeout_at + _PAST_TOLERANCE_MS < await self._calls.server_time_ms()
            ):
                raise ValidationError("invalid_input", "timeout_at_in_past") from None
            raise

    async def resume_execution(
        self, execution_id: ExecutionId, *, trigger_type: str = "operator", resume_delay_ms: int = 0
    ) -> Resumed:
        one_of(trigger_type, "trigger_type", _TRIGGERS)
        whole(resume_delay_ms, "resume_delay_ms", 0)
        execution_id = self._calls.checked(execution_id)
        args = (execution_id, trigger_type, resume_delay_ms)
        # Repeating it would find the execution resumed: the caller reads the state instead.
        reply = await self._calls.fcall(
            "ff_resume", execution_id.tag, args, op="resume_execution", replay_safe=False
        )
        with decoding(reply, "ff_resume", "resume_execution", execution_id):
            return Resumed(PublicState(text(reply[2])))

    async def expire_suspension(self, tag: str, ids: Sequence[str]) -> list[str]:
        names, tag = each_stored(ids, "ids"), self._calls.checked_tag(tag)
        verdicts: list[str] = []
        for start in range(0, len(names), _EXPIRED_AT_ONCE):
            part = names[start : start + _EXPIRED_AT_ONCE]
            verdicts += await self._calls.ask_each("ff_expire_suspension", tag, *part)
        return verdicts

    async def expire_waitpoints(self, tag: str, ids: Sequence[str]) -> list[str]:
        names = each_stored(ids, "ids")
        return await self._calls.ask_each(
            "ff_expire_waitpoint", self._calls.checked_tag(tag), *names
        )

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str = "", limit: int = 100
    ) -> SuspendedPage:
        begin, score, after = _parse_cursor(cursor)
        limit = min(whole(limit, "limit"), _MAX_PAGE)
        partitions = await self._suspended_partitions(partition)
        if cursor and begin not in partitions:
            raise ValidationError("invalid_cursor", "is of another listing")
        if limit <= 0:
            return SuspendedPage(())
        names = await self._places.lanes_in_use()
        damage = Damage("list_suspended")
        entries: list[SuspendedEntry] = []
        last = ""
        for index in partitions:
            if index < begin:
                continue
            position = (score, after) if index == begin else (0, "")
            while True:
                room = limit - len(entries)
                # One more than fits tells whether anything follows.
                rows = await self._suspended_rows(index, names, position, room + 1, damage)
                for position, row in rows[:room]:
                    entry = damage.keep(lambda row=row: _suspended_entry(row))
                    if entry is not None:
                        last = sealed(index, *position)
                        entries.append(entry)
                if len(rows) > room and len(entries) == limit:
                    return SuspendedPage(tuple(entries), last, tuple(damage.found))
                if len(rows) <= room:
                    break
        return SuspendedPage(tuple(entries), None, tuple(damage.found))

    async def _suspended_rows(
        self,
        partition: int,
        lanes: list[str],
        position: tuple[int, str],
        limit: int,
        damage: Damage,
    ) -> list[_Row]:
        """The first rows after a position. One call reads some of the lanes."""
        rows: list[_Row] = []
        start = 0
        while start < len(lanes):
            part = lanes[start : start + _LANES_AT_ONCE]
            args = (limit, position[0], raw(position[1]), *part)
            found, lanes_read, unreadable = await self._calls.ask(
                *("ff_list_suspended", f"{{fp:{partition}}}", args),
                _suspended_part,
                op="list_suspended",
            )
            for lane in unreadable:
                problem = corrupt(
                    f"{{fp:{partition}}}", f"lane {lane}", "has a key of the wrong type"
                )
                if problem.detail not in damage.found:
                    damage.note(problem)
            start += lanes_read
            rows = sorted([*rows, *found], key=itemgetter(0))[:limit]
        return rows

    async def _suspended_partitions(self, partition: int | None) -> list[int]:
        if partition is not None:
            return [partition_number(partition, self._calls.counts)]
        return await self._places.partitions_in_use()


def _suspended_part(reply: list[Any]) -> tuple[list[_Row], int, list[str]]:
    """Rows, how many lanes they are from, and the lanes that cannot be read."""
    lanes_read = int(reply[3])
    if lanes_read < 1:
        raise ValueError(lanes_read)
    rows = [((int(row[1]), lossless(row[0])), row) for row in reply[2]]
    return rows, lanes_read, [text(lane) for lane in reply[4]]


def _suspended_entry(row: list[Any]) -> SuspendedEntry | None:
    """A row as listed, or None when its suspension has just ended."""
    execution_id = stored_id(lossless(row[0]), "list_suspended")
    if len(row) == _PLACE_PARTS:
        return None
    if len(row) == _UNREADABLE_PARTS:
        raise corrupt(execution_id, "suspension", "has the wrong type")
    stored = Stored.from_row(execution_id, _SUSPENDED_PARTS, row[2:])
    return SuspendedEntry(
        execution_id=execution_id,
        lane_id=stored.text("lane_id"),
        suspension_id=stored.text("suspension_id"),
        reason=stored.text("reason_code", ""),
        requested_by=stored.text("requested_by", ""),
        suspended_at=stored.number("created_at"),
        timeout_at=stored.maybe_number("timeout_at"),
    )


def _parse_cursor(cursor: str) -> tuple[int, int, str]:
    if given_cursor(cursor) == "":
        return 0, 0, ""
    with reading_cursor():
        partition, score, execution_id = opened(cursor, 3)
        return int(partition), int(score), ExecutionId.parse(execution_id)


def _fresh(condition: Condition) -> list[Binding]:
    """A new waitpoint for every key the condition names; one of its own when it names none."""
    keys = referenced_waitpoint_keys(condition)
    if keys:
        return [FreshWaitpoint(new_uuid(), key) for key in keys]
    return _named([FreshWaitpoint(new_uuid())])


def _named(bindings: Sequence[Binding]) -> list[Binding]:
    """The bindings; a primary one without a key is named after its id."""
    named: list[Binding] = listed(bindings, "waitpoints")[:]
    for binding in named:
        if not isinstance(binding, FreshWaitpoint | UsePending):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid_input("waitpoints", "must be FreshWaitpoint or UsePending")
    if named and isinstance(named[0], FreshWaitpoint) and not named[0].waitpoint_key:
        identity = named[0].waitpoint_id
        named[0] = FreshWaitpoint(identity, f"wpk:{identity}")
    return named


def _check_limits(bindings: Sequence[Binding]) -> None:
    if len(bindings) > _MAX_WAITPOINTS:
        raise ValidationError("invalid_input", "too_many_waitpoints")
    ids: set[str] = set()
    keys: set[str] = set()
    for binding in bindings:
        validate_uuid(binding.waitpoint_id, "waitpoint_id")
        _refuse_twice(binding.waitpoint_id, ids)
        if isinstance(binding, FreshWaitpoint):
            validate_text(binding.waitpoint_key, "waitpoint_key", limit=_MAX_POINTER_BYTES)
            if len(binding.waitpoint_key.encode()) > MAX_KEY_BYTES:
                raise ValidationError("invalid_input", "waitpoint_key_too_long")
            _refuse_twice(binding.waitpoint_key, keys)


def _refuse_twice(name: str, seen: set[str]) -> None:
    if name in seen:
        raise ValidationError("invalid_input", f"duplicate_waitpoint_binding: {name}")
    seen.add(name)


def _options(
    reason_code: str,
    requested_by: str,
    timeout_behavior: str | None,
    resume_policy: ResumePolicy | None,
    idempotency_key: str | None,
) -> dict[str, Any]:
    """What needs no look at the condition."""
    behavior = "fail" if timeout_behavior is None else timeout_behavior
    one_of(behavior, "timeout_behavior", _BEHAVIORS)
    one_of(requested_by, "requested_by", _REQUESTERS)
    if idempotency_key is not None:
        validate_text(idempotency_key, "idempotency_key")
    policy = ResumePolicy()
    if resume_policy is not None:
        policy = instance(resume_policy, ResumePolicy, "resume_policy")
        for name in _FLAGS:
            flag(getattr(policy, name), name)
    if policy.resume_target != "runnable":
        raise invalid_input("resume_policy", "resume_target must be runnable")
    if policy.resume_delay_ms is not None:
        whole(policy.resume_delay_ms, "resume_delay_ms", 0)
    return {
        "policy": _policy_json(policy).decode(),
        "reason_code": validate_text(reason_code, "reason_code"),
        "requested_by": requested_by,
        "timeout_behavior": behavior,
        "behavior_given": timeout_behavior is not None,
    }


def _binding(binding: Binding) -> list[str]:
    if isinstance(binding, UsePending):
        return ["pending", binding.waitpoint_id, ""]
    return ["fresh", binding.waitpoint_id, binding.waitpoint_key]


def _suspend_outcome(handle: Handle, reply: Sequence[Any]) -> SuspendOutcome:
    word, attempt, lane, instance = (text(part) for part in reply[2:6])
    if word == "already_satisfied":
        # A pending waitpoint is bound alone.
        return AlreadySatisfiedSuspension(_details(reply[6:10]), text(reply[10]))
    if word != "suspended":
        raise ValueError(word)
    parked = msgspec.structs.replace(
        handle, attempt=attempt, lane_id=lane, worker_instance_id=instance, kind="suspended"
    )
    return Suspended(_details(reply[6:]), parked)


def _details(parts: Sequence[Any]) -> SuspensionDetails:
    waitpoints = tuple(
        WaitpointDetails(text(parts[i]), text(parts[i + 1]), WaitpointToken(text(parts[i + 2])))
        for i in range(1, len(parts), 3)
    )
    return SuspensionDetails(text(parts[0]), waitpoints)
