"""Reading suspensions, waitpoints and signals; tokens only where they are asked for."""

from __future__ import annotations

import asyncio
from operator import itemgetter
from typing import Any

from flowfabric.core import keys
from flowfabric.core.conditions import (
    AllOf,
    Condition,
    Count,
    OperatorOnly,
    Single,
    TimeoutOnly,
    named,
    parse_condition,
)
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import (
    OpenWaitpoint,
    OpenWaitpoints,
    PastWait,
    ResumeSignal,
    SuspendedEntry,
    SuspendedPage,
)
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId, WaitpointToken, is_uuid, stored_id
from flowfabric.core.stored import Stored, corrupt, stored_text
from flowfabric.core.text import lossless, raw, shown
from flowfabric.engine.arguments import (
    checked_text,
    each_text,
    held,
    instance,
    listed,
    partition_number,
    whole,
)
from flowfabric.engine.calls import Calls, proof, text
from flowfabric.engine.damage import Damage
from flowfabric.engine.page_cursor import given_cursor, opened, reading_cursor, sealed

__all__ = ["Waitpoints"]

_MAX_PAGE = 1000
_LANES_AT_ONCE = 500
_OPEN = frozenset({"pending", "active"})

# Parts of a row that names a place only: its suspension has just ended, or is unreadable.
_PLACE_PARTS = 3
_UNREADABLE_PARTS = 4
_SUSPENDED_PARTS = (
    *("lane_id", "suspension_id", "reason_code", "requested_by", "created_at", "timeout_at"),
)

_Row = tuple[tuple[int, str], list[Any]]
"""Where it stands, and what is stored."""


class Waitpoints(Calls):
    """What waits, for what, and what came."""

    async def _stored(self, context: str, field: str, key: str) -> Stored | None:
        """A stored hash, or None when there is none."""
        raw = await self.read(f"{context}: {field}", "HGETALL", key)
        return Stored.from_hash(context, raw) if raw else None

    async def list_pending_waitpoints(
        self, execution_id: ExecutionId, after: str = "", limit: int = 100
    ) -> OpenWaitpoints:
        """Pending and active waitpoints by id, without their tokens."""
        execution_id = self.checked(execution_id)
        checked_text(after, "after")
        limit = max(1, min(whole(limit, "limit"), _MAX_PAGE))
        tag, core = execution_id.tag, keys.core(execution_id.tag, execution_id)
        if not await self.transport.call("EXISTS", core, key=core):
            raise NotFoundError("execution_not_found", op="list_pending_waitpoints")
        name = keys.waitpoints(tag, execution_id)
        members = await self.read(f"{execution_id}: waitpoints", "SMEMBERS", name)
        ids = sorted(identity for identity in map(lossless, members) if identity > after)
        damage = Damage("list_pending_waitpoints")
        (condition,) = await damage.keep_all([self._condition(execution_id)])
        found: list[OpenWaitpoint] = []
        for start in range(0, len(ids), _MAX_PAGE):
            part = ids[start : start + _MAX_PAGE]
            entries = await damage.keep_all(
                self._open(execution_id, one, condition) for one in part
            )
            found += (entry for entry in entries if entry is not None)
            if len(found) > limit:
                last = found[limit - 1].waitpoint_id
                return OpenWaitpoints(tuple(found[:limit]), last, tuple(damage.found))
        return OpenWaitpoints(tuple(found), None, tuple(damage.found))

    async def _condition(self, execution_id: ExecutionId) -> Condition | None:
        key = keys.suspension(execution_id.tag, execution_id)
        stored = await self._stored(execution_id, "suspension", key)
        if stored is None or stored.is_set("closed_at"):
            return None
        return stored.parsed("resume_condition_json", parse_condition)

    async def _open(
        self, execution_id: ExecutionId, identity: str, condition: Condition | None
    ) -> OpenWaitpoint | None:
        """The row of an open waitpoint."""
        context = f"waitpoint {shown(identity)}"
        if not is_uuid(identity):
            raise corrupt(execution_id, "waitpoints", "holds a member that is no waitpoint id")
        stored = await self._stored(context, "record", keys.waitpoint(execution_id.tag, identity))
        if stored is None:
            raise corrupt(context, "record", "is missing")
        if stored.text("state") not in _OPEN:
            return None
        token, key = WaitpointToken(stored.text("waitpoint_token")), stored.text("waitpoint_key")
        active = stored.text("state") == "active"
        return OpenWaitpoint(
            waitpoint_id=identity,
            waitpoint_key=key,
            state=stored.text("state"),
            required_signal_names=_names(condition, key) if active and condition else (),
            created_at=stored.number("created_at"),
            execution_id=execution_id,
            token_kid=token.kid,
            token_fingerprint=token.fingerprint,
            activated_at=stored.maybe_number("activated_at"),
            expires_at=stored.maybe_number("expires_at"),
        )

    async def observe_signals(self, handle: Handle) -> list[ResumeSignal]:
        """The signals that satisfied the suspension which led to this lease, oldest first."""
        proof(held(handle))
        eid, epoch = handle.execution_id, handle.lease_epoch
        met, ended = await asyncio.gather(
            self._stored(eid, "met", keys.met(eid.tag, eid)),
            self._stored(eid, "suspension", keys.suspension(eid.tag, eid)),
        )
        ids: list[str] = []
        if met is not None and met.number("epoch") == epoch:
            ids = _ids(met, "signals")
        elif (
            ended is not None
            and ended.maybe_number("claimed_epoch") == epoch
            and ended.text("close_reason", "") == "resumed"
            and ended.number("attempt_index") == handle.attempt_index
        ):
            _ids(ended, "waitpoints")
            ids = _ids(ended, "all_satisfier_signals")
        signals = await asyncio.gather(*(self.read_signal(eid, one) for one in ids))
        # Recorded in the order of acceptance, which is the order of their times too.
        return [signal for signal in signals if signal is not None]

    async def read_signal(
        self, execution_id: ExecutionId, signal_id: str, waitpoint_key: str | None = None
    ) -> ResumeSignal | None:
        """One accepted signal with its payload, or None when it is gone."""
        execution_id = self.checked(execution_id)
        checked_text(signal_id, "signal_id")
        if waitpoint_key is not None:
            checked_text(waitpoint_key, "waitpoint_key")
        context = f"signal {shown(signal_id)}"
        body = keys.signal_payload(execution_id, signal_id)
        stored, payload = await asyncio.gather(
            self._stored(context, "record", keys.signal(execution_id, signal_id)),
            self.read(f"{context}: payload", "GET", body),
        )
        if stored is None:
            return None
        if waitpoint_key is None:
            target = stored.text("target_waitpoint_id")
            waitpoint = keys.waitpoint(execution_id.tag, target)
            place = f"waitpoint {target}", "waitpoint_key"
            found = await self.read(": ".join(place), "HGET", waitpoint, "waitpoint_key")
            waitpoint_key = "" if found is None else stored_text(found, *place)
        return _resume_signal(signal_id, stored, payload, waitpoint_key)

    async def read_waits(self, execution_id: ExecutionId, *wanted: str) -> list[PastWait]:
        """The waitpoints of the present run that nobody waits on now; a replay begins a new run.

        What came to the `wanted` keys is read along, unless it is much.
        """
        execution_id = self.checked(execution_id)
        names, cursor = each_text(wanted, "wanted"), "0"
        found: dict[str, PastWait] = {}
        while True:
            rows, cursor = await self.ask(
                *("ff_read_waits", execution_id.tag, (execution_id, cursor, *names)),
                lambda reply: ([_past_wait(*row[:4]) for row in reply[2]], text(reply[3])),
                op="read_waits",
            )
            found |= {wait.waitpoint_id: wait for wait in rows}
            if cursor == "0":
                return list(found.values())

    async def read_wait_signals(
        self, execution_id: ExecutionId, wait: PastWait
    ) -> list[ResumeSignal]:
        """What a waitpoint received, oldest first."""
        execution_id = self.checked(execution_id)
        instance(wait, PastWait, "wait")
        if wait.signals is not None:
            return listed(wait.signals, "signals")[:]
        ids = each_text(wait.signal_ids, "signal_ids")
        read = (self.read_signal(execution_id, each, wait.waitpoint_key) for each in ids)
        return [signal for signal in await asyncio.gather(*read) if signal is not None]

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str = "", limit: int = 100
    ) -> SuspendedPage:
        """Suspended executions by partition, timeout and id; those without a timeout last."""
        begin, score, after = _parse_cursor(cursor)
        limit = min(whole(limit, "limit"), _MAX_PAGE)
        partitions = await self._suspended_partitions(partition)
        if cursor and begin not in partitions:
            raise ValidationError("invalid_cursor", "is of another listing")
        if limit <= 0:
            return SuspendedPage(())
        names = await self.lanes_in_use()
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
                rows = await self._suspended_rows(index, names, position, room + 1)
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
        self, partition: int, lanes: list[str], position: tuple[int, str], limit: int
    ) -> list[_Row]:
        """The first rows after a position. One call reads some of the lanes."""
        rows: list[_Row] = []
        start = 0
        while start < len(lanes):
            part = lanes[start : start + _LANES_AT_ONCE]
            args = (limit, position[0], raw(position[1]), *part)
            found, lanes_read = await self.ask(
                *("ff_list_suspended", f"{{fp:{partition}}}", args),
                _suspended_part,
                op="list_suspended",
            )
            start += lanes_read
            rows = sorted([*rows, *found], key=itemgetter(0))[:limit]
        return rows

    async def _suspended_partitions(self, partition: int | None) -> list[int]:
        if partition is not None:
            return [partition_number(partition, self.counts)]
        return await self.partitions_in_use()


def _resume_signal(
    signal_id: str, stored: Stored, payload: bytes | None, waitpoint_key: str
) -> ResumeSignal:
    return ResumeSignal(
        signal_id=signal_id,
        signal_name=stored.text("signal_name"),
        signal_category=stored.text("signal_category", ""),
        source_type=stored.text("source_type", ""),
        source_identity=stored.text("source_identity", ""),
        correlation_id=stored.text("correlation_id", ""),
        accepted_at=stored.number("accepted_at"),
        payload=payload,
        payload_encoding=stored.text("payload_encoding", ""),
        waitpoint_key=waitpoint_key,
    )


def _past_wait(
    identity: bytes, flat: list[bytes], ids: list[bytes], contents: list[Any] | None
) -> PastWait:
    stored = Stored.from_hash(f"waitpoint {shown(lossless(identity))}", flat)
    key, state = stored.text("waitpoint_key"), stored.text("state")
    signal_ids = tuple(stored_text(each, stored.context, "signals") for each in ids)
    signals: tuple[ResumeSignal, ...] | None = None
    if contents is not None:
        signals = tuple(
            _resume_signal(each, Stored.from_hash(f"signal {each}", fields), payload, key)
            for each, (fields, payload) in zip(signal_ids, contents, strict=True)
            if fields
        )
    # One that was never waited on is closed without either.
    used = stored.is_set("suspension_id") or stored.is_set("satisfied_at")
    return PastWait(
        waitpoint_id=stored_text(identity, stored.context, "waitpoint_id"),
        waitpoint_key=key,
        waitpoint_token=WaitpointToken(stored.text("waitpoint_token", "")),
        state=state,
        attempt_index=stored.number("attempt_index", 0),
        close_reason=stored.text("close_reason", ""),
        closed_at=stored.number("closed_at", 0),
        ended=state == "closed" and used,
        signal_ids=signal_ids,
        signals=signals,
    )


def _suspended_part(reply: list[Any]) -> tuple[list[_Row], int]:
    """Rows, and how many lanes they are from."""
    lanes_read = int(reply[3])
    if lanes_read < 1:
        raise ValueError(lanes_read)
    return [((int(row[1]), lossless(row[0])), row) for row in reply[2]], lanes_read


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


def _ids(stored: Stored, name: str) -> list[str]:
    """The ids of a comma-separated field."""
    found = [each for each in stored.text(name, "").split(",") if each]
    if not all(map(is_uuid, found)):
        raise stored.corrupt(name, "holds something that is no id")
    return found


def _names(condition: Condition, key: str) -> tuple[str, ...]:
    """The signal names a waitpoint waits for; empty means any."""
    match condition:
        case OperatorOnly():
            return ("__operator_only__",)
        case TimeoutOnly():
            return ("__timeout_only__",)
        case Single():
            return named(condition.signal_name) if condition.waitpoint_key == key else ()
        case Count():
            return named(condition.signal_name) if key in condition.waitpoints else ()
        case AllOf():
            found = (name for member in condition.members for name in _names(member, key))
            return tuple(dict.fromkeys(found))


def _parse_cursor(cursor: str) -> tuple[int, int, str]:
    if given_cursor(cursor) == "":
        return 0, 0, ""
    with reading_cursor():
        partition, score, execution_id = opened(cursor, 3)
        return int(partition), int(score), ExecutionId.parse(execution_id)
