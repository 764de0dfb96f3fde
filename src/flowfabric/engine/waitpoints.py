"""Reading suspensions, waitpoints and signals; tokens only where they are asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
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
from flowfabric.core.errors import CorruptionError, NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId, WaitpointToken, validate_uuid
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
from flowfabric.engine.page_cursor import given_cursor, opened, reading_cursor, sealed

__all__ = ["Waitpoints"]

log = logging.getLogger(__name__)

_MAX_PAGE = 1000
_MAX_LANES = 10_000
_OPEN = frozenset({"pending", "active"})

# Parts of a row that names a place only: its suspension has just ended.
_PLACE_PARTS = 3

Fields = dict[str, str]
_Row = tuple[tuple[int, str], SuspendedEntry | None]
"""Where it stands, and the suspension."""


class Waitpoints(Calls):
    """What waits, for what, and what came."""

    async def _hash(self, key: str) -> Fields:
        raw: Any = await self.transport.call("HGETALL", key, key=key)
        return {text(name): value.decode(errors="replace") for name, value in raw.items()}

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
        members: Any = await self.transport.call("SMEMBERS", name, key=name)
        ids = sorted(identity for identity in map(text, members) if identity > after)
        condition = await self._condition(execution_id)
        found: list[OpenWaitpoint] = []
        for start in range(0, len(ids), _MAX_PAGE):
            part = ids[start : start + _MAX_PAGE]
            records = await asyncio.gather(*(self._hash(keys.waitpoint(tag, one)) for one in part))
            for identity, record in zip(part, records, strict=True):
                entry = _open_waitpoint(execution_id, identity, record, condition)
                if entry is not None:
                    found.append(entry)
            if len(found) > limit:
                return OpenWaitpoints(tuple(found[:limit]), found[limit - 1].waitpoint_id)
        return OpenWaitpoints(tuple(found))

    async def _condition(self, execution_id: ExecutionId) -> Condition | None:
        fields = await self._hash(keys.suspension(execution_id.tag, execution_id))
        if not fields or "closed_at" in fields:
            return None
        return parse_condition(fields["resume_condition_json"])

    async def observe_signals(self, handle: Handle) -> list[ResumeSignal]:
        """The signals that satisfied the suspension which led to this lease, oldest first."""
        proof(held(handle))
        execution_id, epoch = handle.execution_id, str(handle.lease_epoch)
        met, fields = await asyncio.gather(
            self._hash(keys.met(execution_id.tag, execution_id)),
            self._hash(keys.suspension(execution_id.tag, execution_id)),
        )
        stored = ""
        if met.get("epoch") == epoch:
            stored = met["signals"]
        elif (
            fields.get("claimed_epoch") == epoch
            and fields.get("close_reason") == "resumed"
            and fields.get("attempt_index") == str(handle.attempt_index)
        ):
            _check_waitpoints(execution_id, fields.get("waitpoints", ""))
            stored = fields.get("all_satisfier_signals", "")
        signals = await asyncio.gather(
            *(self.read_signal(execution_id, one) for one in stored.split(",") if one)
        )
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
        key = keys.signal(execution_id, signal_id)
        body = keys.signal_payload(execution_id, signal_id)
        fields, payload = await asyncio.gather(
            self._hash(key), self.transport.call("GET", body, key=body)
        )
        if not fields:
            return None
        raw: Any = payload
        if waitpoint_key is None:
            waitpoint = keys.waitpoint(execution_id.tag, fields["target_waitpoint_id"])
            found: Any = await self.transport.call(
                "HGET", waitpoint, "waitpoint_key", key=waitpoint
            )
            waitpoint_key = "" if found is None else text(found)
        return _resume_signal(signal_id, fields, raw, waitpoint_key)

    async def read_waits(self, execution_id: ExecutionId, *wanted: str) -> list[PastWait]:
        """The waitpoints of the present run that nobody waits on now; a replay begins a new run.

        What came to the `wanted` keys is read along, unless it is much.
        """
        execution_id = self.checked(execution_id)
        args = (execution_id, *each_text(wanted, "wanted"))
        return await self.ask(
            *("ff_read_waits", execution_id.tag, args),
            lambda reply: [_past_wait(row) for row in reply[2]],
            op="read_waits",
        )

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
        names = (await self.lanes_in_use())[:_MAX_LANES]
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
                for position, entry in rows[:room]:
                    last = sealed(index, *position)
                    if entry is not None:
                        entries.append(entry)
                if len(rows) > room and len(entries) == limit:
                    return SuspendedPage(tuple(entries), last)
                if len(rows) <= room:
                    break
        return SuspendedPage(tuple(entries))

    async def _suspended_rows(
        self, partition: int, lanes: list[str], position: tuple[int, str], limit: int
    ) -> list[_Row]:
        args = (limit, *position, *lanes)
        return await self.ask(
            *("ff_list_suspended", f"{{fp:{partition}}}", args),
            lambda reply: [_suspended_row(row) for row in reply[2]],
            op="list_suspended",
        )

    async def _suspended_partitions(self, partition: int | None) -> list[int]:
        if partition is not None:
            return [partition_number(partition, self.counts)]
        return await self.partitions_in_use()


def _resume_signal(
    signal_id: str, fields: Mapping[str, str], payload: bytes | None, waitpoint_key: str
) -> ResumeSignal:
    return ResumeSignal(
        signal_id=signal_id,
        signal_name=fields["signal_name"],
        signal_category=fields.get("signal_category", ""),
        source_type=fields.get("source_type", ""),
        source_identity=fields.get("source_identity", ""),
        correlation_id=fields.get("correlation_id", ""),
        accepted_at=int(fields["accepted_at"]),
        payload=payload,
        payload_encoding=fields.get("payload_encoding", ""),
        waitpoint_key=waitpoint_key,
    )


def _past_wait(row: list[Any]) -> PastWait:
    key, signal_ids = text(row[1]), tuple(map(text, row[8]))
    signals: tuple[ResumeSignal, ...] | None = None
    if row[9] is not None:
        signals = tuple(
            _resume_signal(signal_id, _fields(flat), payload, key)
            for signal_id, (flat, payload) in zip(signal_ids, row[9], strict=True)
            if flat
        )
    return PastWait(
        waitpoint_id=text(row[0]),
        waitpoint_key=key,
        waitpoint_token=WaitpointToken(text(row[2])),
        state=text(row[3]),
        attempt_index=row[4],
        close_reason=text(row[5]),
        closed_at=row[6],
        ended=row[7] == 1,
        signal_ids=signal_ids,
        signals=signals,
    )


def _fields(flat: Sequence[bytes]) -> Fields:
    """A hash that a function answered as a list."""
    decoded = [part.decode(errors="replace") for part in flat]
    return dict(zip(decoded[::2], decoded[1::2], strict=True))


def _suspended_row(row: list[Any]) -> _Row:
    position = (int(row[1]), text(row[0]))
    if len(row) == _PLACE_PARTS:
        return position, None
    return position, SuspendedEntry(
        execution_id=ExecutionId.trusted(text(row[0])),
        lane_id=text(row[2]),
        suspension_id=text(row[3]),
        reason=text(row[4]),
        requested_by=text(row[5]),
        suspended_at=int(row[6]),
        timeout_at=None if row[7] is None else int(row[7]),
    )


def _check_waitpoints(execution_id: ExecutionId, stored: str) -> None:
    for identity in stored.split(","):
        try:
            validate_uuid(identity, "waitpoint_id")
        except ValidationError as error:
            raise CorruptionError(
                "corruption", f"{execution_id}: waitpoints: {error.detail}"
            ) from error


def _open_waitpoint(
    execution_id: ExecutionId, identity: str, record: Fields, condition: Condition | None
) -> OpenWaitpoint | None:
    """The row of an open waitpoint; a damaged record is left out, loudly."""
    if record and record.get("state") not in _OPEN:
        return None
    try:
        validate_uuid(identity, "waitpoint_id")
        token = WaitpointToken(record["waitpoint_token"])
        active = record["state"] == "active"
        names = _names(condition, record["waitpoint_key"]) if active and condition else ()
        activated, expires = record.get("activated_at"), record.get("expires_at")
        return OpenWaitpoint(
            waitpoint_id=identity,
            waitpoint_key=record["waitpoint_key"],
            state=record["state"],
            required_signal_names=names,
            created_at=int(record["created_at"]),
            execution_id=execution_id,
            token_kid=token.kid,
            token_fingerprint=token.fingerprint,
            activated_at=None if activated is None else int(activated),
            expires_at=None if expires is None else int(expires),
        )
    except (KeyError, ValueError, ValidationError) as error:
        log.warning(
            "waitpoint left out of the listing: its %s is missing or unreadable",
            error.args[0] if isinstance(error, KeyError) else "record",
            extra={
                "action": "waitpoint_unreadable",
                "execution_id": execution_id,
                "waitpoint_id": identity,
            },
        )
        return None


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
