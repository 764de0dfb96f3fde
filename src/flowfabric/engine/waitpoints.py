"""Reading suspensions, waitpoints and signals; tokens only where they are asked for."""

from __future__ import annotations

import asyncio
import base64
import binascii
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
from flowfabric.core.errors import CorruptionError, NotFoundError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId, WaitpointToken, validate_uuid
from flowfabric.engine.calls import Calls, proof, text

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
        tag, core = execution_id.tag, keys.core(execution_id.tag, execution_id)
        if not await self.transport.call("EXISTS", core, key=core):
            raise NotFoundError("execution_not_found", op="list_pending_waitpoints")
        name = f"ff:exec:{tag}:{execution_id}:waitpoints"
        members: Any = await self.transport.call("SMEMBERS", name, key=name)
        ids = sorted(identity for identity in map(text, members) if identity > after)
        condition = await self._condition(execution_id)
        limit = max(1, min(limit, _MAX_PAGE))
        found: list[OpenWaitpoint] = []
        for start in range(0, len(ids), _MAX_PAGE):
            part = ids[start : start + _MAX_PAGE]
            records = await asyncio.gather(*(self._hash(f"ff:wp:{tag}:{one}") for one in part))
            for identity, record in zip(part, records, strict=True):
                entry = _open_waitpoint(execution_id, identity, record, condition)
                if entry is not None:
                    found.append(entry)
            if len(found) > limit:
                return OpenWaitpoints(tuple(found[:limit]), found[limit - 1].waitpoint_id)
        return OpenWaitpoints(tuple(found))

    async def _condition(self, execution_id: ExecutionId) -> Condition | None:
        fields = await self._hash(_suspension(execution_id))
        if not fields or "closed_at" in fields:
            return None
        return parse_condition(fields["resume_condition_json"])

    async def observe_signals(self, handle: Handle) -> list[ResumeSignal]:
        """The signals that satisfied the suspension which led to this lease, oldest first."""
        proof(handle)
        execution_id, epoch = handle.execution_id, str(handle.lease_epoch)
        met, fields = await asyncio.gather(
            self._hash(f"ff:exec:{execution_id.tag}:{execution_id}:suspension:met"),
            self._hash(_suspension(execution_id)),
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
        key = f"ff:signal:{execution_id}:{signal_id}"
        body = f"{key}:payload"
        fields, payload = await asyncio.gather(
            self._hash(key), self.transport.call("GET", body, key=body)
        )
        if not fields:
            return None
        raw: Any = payload
        if waitpoint_key is None:
            waitpoint = f"ff:wp:{execution_id.tag}:{fields['target_waitpoint_id']}"
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
        return await self.ask(
            *("ff_read_waits", execution_id.tag, (execution_id, *wanted)),
            lambda reply: [_past_wait(row) for row in reply[2]],
            op="read_waits",
        )

    async def read_wait_signals(
        self, execution_id: ExecutionId, wait: PastWait
    ) -> list[ResumeSignal]:
        """What a waitpoint received, oldest first."""
        if wait.signals is not None:
            return list(wait.signals)
        read = (self.read_signal(execution_id, i, wait.waitpoint_key) for i in wait.signal_ids)
        return [signal for signal in await asyncio.gather(*read) if signal is not None]

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str = "", limit: int = 100
    ) -> SuspendedPage:
        """Suspended executions by partition, timeout and id; those without a timeout last."""
        begin, score, after = _parse_cursor(cursor)
        partitions = await self._suspended_partitions(partition)
        if cursor and begin not in partitions:
            raise ValidationError("invalid_cursor", "is of another listing")
        if limit <= 0:
            return SuspendedPage(())
        limit = min(limit, _MAX_PAGE)
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
                    last = _cursor(index, *position)
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
            if not 0 <= partition < self.counts.flow:
                raise invalid_input("partition", f"must be below {self.counts.flow}")
            return [partition]
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


def _suspension(execution_id: ExecutionId) -> str:
    return f"ff:exec:{execution_id.tag}:{execution_id}:suspension:current"


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


def _cursor(partition: int, score: int, execution_id: str) -> str:
    raw = f"{partition}|{score}|{execution_id}".encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _parse_cursor(cursor: str) -> tuple[int, int, str]:
    if not cursor:
        return 0, 0, ""
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        partition, score, execution_id = raw.split("|", 2)
        return int(partition), int(score), ExecutionId.parse(execution_id)
    except (ValueError, binascii.Error, ValidationError) as error:
        raise ValidationError("invalid_cursor", "is not a cursor of this listing") from error
