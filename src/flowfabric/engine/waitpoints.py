"""Reading suspensions, waitpoints and signals; tokens only where they are asked for."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from typing import Any

from flowfabric.core import keys
from flowfabric.core.conditions import (
    AllOf,
    Condition,
    Count,
    OperatorOnly,
    Single,
    TimeoutOnly,
    parse_condition,
)
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import (
    OpenWaitpoint,
    OpenWaitpoints,
    ResumeSignal,
    SuspendedEntry,
    SuspendedPage,
)
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId, WaitpointToken, validate_uuid
from flowfabric.engine.calls import Calls, text

__all__ = ["Waitpoints"]

_MAX_PAGE = 1000
_OPEN = frozenset({"pending", "active"})

Fields = dict[str, str]


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
        ids = sorted(text(member) for member in members)
        records = await asyncio.gather(
            *(self._hash(f"ff:wp:{tag}:{identity}") for identity in ids if identity > after)
        )
        condition = await self._condition(execution_id)
        later = [identity for identity in ids if identity > after]
        found = [
            _open_waitpoint(execution_id, identity, record, condition)
            for identity, record in zip(later, records, strict=True)
            if record.get("state") in _OPEN and "waitpoint_token" in record
        ]
        page = found[: max(1, min(limit, _MAX_PAGE))]
        more = len(found) > len(page)
        return OpenWaitpoints(tuple(page), page[-1].waitpoint_id if more else None)

    async def _condition(self, execution_id: ExecutionId) -> Condition | None:
        fields = await self._hash(_suspension(execution_id))
        if not fields or "closed_at" in fields:
            return None
        return parse_condition(fields["resume_condition_json"])

    async def read_waitpoint_token(
        self, execution_id: ExecutionId, waitpoint_id: str
    ) -> WaitpointToken | None:
        """The token of an open waitpoint, minted again when its key has expired; authorise this."""
        execution_id = self.checked(execution_id)
        args = (execution_id, validate_uuid(waitpoint_id, "waitpoint_id"))
        reply = await self.fcall(
            "ff_waitpoint_token", execution_id.tag, args, op="read_waitpoint_token"
        )
        return None if reply[2] is None else WaitpointToken(text(reply[2]))

    async def verify_waitpoint_token(
        self, execution_id: ExecutionId, waitpoint_id: str, presented: str
    ) -> bool:
        """Whether an outside caller presented the waitpoint's own token."""
        stored = await self.read_waitpoint_token(execution_id, waitpoint_id)
        return stored is not None and hmac.compare_digest(stored.reveal(), presented)

    async def observe_signals(self, handle: Handle) -> list[ResumeSignal]:
        """The signals that satisfied the suspension which led to this lease, oldest first."""
        execution_id = handle.execution_id
        tag = execution_id.tag
        fields = await self._hash(_suspension(execution_id))
        identities: list[str] = []
        if (
            fields.get("claimed_epoch") == str(handle.lease_epoch)
            and fields.get("close_reason") == "resumed"
            and fields.get("attempt_index") == str(handle.attempt_index)
        ):
            identities = [
                part for part in fields.get("all_satisfier_signals", "").split(",") if part
            ]
        met = await self._hash(f"ff:exec:{tag}:{execution_id}:suspension:met")
        if met.get("epoch") == str(handle.lease_epoch):
            identities = [part for part in met.get("signals", "").split(",") if part]
        signals = await asyncio.gather(*(self.read_signal(execution_id, i) for i in identities))
        return [signal for signal in signals if signal is not None]

    async def read_signal(self, execution_id: ExecutionId, signal_id: str) -> ResumeSignal | None:
        """One accepted signal with its payload, or None when it is gone."""
        key = f"ff:signal:{execution_id.tag}:{signal_id}"
        body = f"{key}:payload"
        fields, payload = await asyncio.gather(
            self._hash(key), self.transport.call("GET", body, key=body)
        )
        if not fields:
            return None
        raw: Any = payload
        waitpoint = f"ff:wp:{execution_id.tag}:{fields['target_waitpoint_id']}"
        waitpoint_key: Any = await self.transport.call(
            "HGET", waitpoint, "waitpoint_key", key=waitpoint
        )
        return ResumeSignal(
            signal_id=signal_id,
            signal_name=fields["signal_name"],
            signal_category=fields.get("signal_category", ""),
            source_type=fields.get("source_type", ""),
            source_identity=fields.get("source_identity", ""),
            correlation_id=fields.get("correlation_id", ""),
            accepted_at=int(fields["accepted_at"]),
            payload=raw,
            payload_encoding=fields.get("payload_encoding", ""),
            waitpoint_key="" if waitpoint_key is None else text(waitpoint_key),
        )

    async def waitpoint_answers(
        self, execution_id: ExecutionId, waitpoint_key: str
    ) -> tuple[str, list[ResumeSignal]] | None:
        """How the newest closed waitpoint of a key ended, and its signals; None without one."""
        tag = execution_id.tag
        name = f"ff:exec:{tag}:{execution_id}:waitpoints"
        members: Any = await self.transport.call("SMEMBERS", name, key=name)
        ids = [text(member) for member in members]
        records = await asyncio.gather(*(self._hash(f"ff:wp:{tag}:{i}") for i in ids))
        closed = [
            (int(record["closed_at"]), identity, record)
            for identity, record in zip(ids, records, strict=True)
            if record.get("waitpoint_key") == waitpoint_key and record.get("state") == "closed"
        ]
        if not closed:
            return None
        _, identity, record = max(closed, key=lambda entry: entry[0])
        listing = f"ff:wp:{tag}:{identity}:signals"
        stored: Any = await self.transport.call("LRANGE", listing, 0, -1, key=listing)
        signals = await asyncio.gather(*(self.read_signal(execution_id, text(s)) for s in stored))
        return record["close_reason"], [signal for signal in signals if signal is not None]

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str = "", limit: int = 100
    ) -> SuspendedPage:
        """Suspended executions by partition, timeout and id."""
        if limit <= 0:
            return SuspendedPage(())
        position, score, after = _parse_cursor(cursor)
        entries: list[SuspendedEntry] = []
        limit, last = min(limit, _MAX_PAGE), None
        for index in await self._suspended_partitions(partition):
            if index < position:
                continue
            rows = await self._suspended_in(index)
            if index == position and cursor:
                rows = [row for row in rows if (row[0], row[1]) > (score, after)]
            for row in rows:
                if len(entries) == limit:
                    return SuspendedPage(tuple(entries), last)
                entry = await self._suspended_entry(ExecutionId.trusted(row[1]), row[2])
                last = _cursor(index, row[0], row[1])
                if entry is not None:
                    entries.append(entry)
        return SuspendedPage(tuple(entries))

    async def _suspended_partitions(self, partition: int | None) -> list[int]:
        if partition is not None:
            if not 0 <= partition < self.counts.flow:
                raise ValidationError("invalid_input", f"partition: below {self.counts.flow}")
            return [partition]
        members: Any = await self.transport.call("SMEMBERS", keys.PARTITIONS, key=keys.PARTITIONS)
        return sorted(int(member) for member in members)

    async def _suspended_in(self, partition: int) -> list[tuple[int, str, str]]:
        tag = f"{{fp:{partition}}}"
        lanes: Any = await self.transport.call("SMEMBERS", keys.LANES, key=keys.LANES)
        rows: list[tuple[int, str, str]] = []
        for raw in lanes:
            lane = text(raw)
            name = keys.lane(tag, lane, "suspended")
            members: Any = await self.transport.call("ZRANGE", name, 0, -1, "WITHSCORES", key=name)
            rows += [(int(score), text(member), lane) for member, score in members]
        return sorted(rows)

    async def _suspended_entry(
        self, execution_id: ExecutionId, lane_id: str
    ) -> SuspendedEntry | None:
        fields = await self._hash(_suspension(execution_id))
        if not fields or "closed_at" in fields:
            return None
        timeout = fields.get("timeout_at")
        return SuspendedEntry(
            execution_id=execution_id,
            lane_id=lane_id,
            reason=fields.get("reason_code", ""),
            suspension_id=fields["suspension_id"],
            requested_by=fields.get("requested_by", ""),
            suspended_at=int(fields["created_at"]),
            timeout_at=None if timeout is None else int(timeout),
        )


def _suspension(execution_id: ExecutionId) -> str:
    return f"ff:exec:{execution_id.tag}:{execution_id}:suspension:current"


def _open_waitpoint(
    execution_id: ExecutionId, identity: str, record: Fields, condition: Condition | None
) -> OpenWaitpoint:
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


def _names(condition: Condition, key: str) -> tuple[str, ...]:
    """The signal names a waitpoint waits for; empty means any."""
    match condition:
        case OperatorOnly():
            return ("__operator_only__",)
        case TimeoutOnly():
            return ("__timeout_only__",)
        case Single():
            mine = condition.waitpoint_key == key and condition.signal_name is not None
            return (str(condition.signal_name),) if mine else ()
        case Count():
            mine = key in condition.waitpoints and condition.signal_name is not None
            return (str(condition.signal_name),) if mine else ()
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
