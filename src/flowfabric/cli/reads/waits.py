"""What executions wait for and how their waits ended. Tokens are never read."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from flowfabric.core.contracts.suspension import OpenWaitpoint, ResumeSignal, SuspendedEntry
from flowfabric.core.errors import NotFoundError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend

_PAGE = 1000
_NEVER = 2**63


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """An execution and its open waitpoints; the fields of a line of `waiting --json`."""

    execution_id: ExecutionId
    execution_kind: str
    lane_id: str
    namespace: str
    public_state: PublicState
    reason: str
    since: int | None
    """When it was suspended; None before that."""
    until: int | None
    """When the wait times out; None if it does not."""
    waitpoints: list[OpenWaitpoint]


class LastWait(msgspec.Struct, frozen=True, kw_only=True):
    """The newest suspension of an execution, open or closed."""

    reason: str
    since: int
    until: int | None
    closed_at: int | None
    close_reason: str
    answers: list[ResumeSignal]
    """The signals that ended it."""


async def read_last_wait(backend: ValkeyBackend, execution_id: ExecutionId) -> LastWait | None:
    """The newest suspension; None if there was none."""
    key = keys.suspension(execution_id.tag, execution_id)
    raw: Any = await backend.transport.call("HGETALL", key, key=key)
    fields = {name.decode(): value.decode(errors="replace") for name, value in raw.items()}
    if "created_at" not in fields:
        return None
    ids = [each for each in fields.get("all_satisfier_signals", "").split(",") if each]
    found = await asyncio.gather(
        *(backend.waitpoints.read_signal(execution_id, each) for each in ids)
    )
    return LastWait(
        reason=fields.get("reason_code", ""),
        since=int(fields["created_at"]),
        until=_number(fields.get("timeout_at")),
        closed_at=_number(fields.get("closed_at")),
        close_reason=fields.get("close_reason", ""),
        answers=[signal for signal in found if signal is not None],
    )


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


async def read_open_waitpoints(
    backend: ValkeyBackend, execution_id: ExecutionId
) -> list[OpenWaitpoint]:
    """All open waitpoints; those of the current suspension first."""
    found: list[OpenWaitpoint] = []
    after: str | None = ""
    while after is not None:
        page = await backend.waitpoints.list_pending_waitpoints(execution_id, after, _PAGE)
        found += page.entries
        after = page.next_cursor
    return sorted(found, key=lambda one: (one.state != "active", one.created_at, one.waitpoint_key))


async def read_wait(backend: ValkeyBackend, execution_id: ExecutionId) -> Wait:
    """What one execution waits for, in any state."""
    info, waitpoints, last = await asyncio.gather(
        backend.reads.read_execution_info(execution_id),
        read_open_waitpoints(backend, execution_id),
        read_last_wait(backend, execution_id),
    )
    current = last if info.public_state is PublicState.SUSPENDED else None
    return Wait(
        execution_id=execution_id,
        execution_kind=info.execution_kind,
        lane_id=info.lane_id,
        namespace=info.namespace,
        public_state=info.public_state,
        reason="" if current is None else current.reason,
        since=None if current is None else current.since,
        until=None if current is None else current.until,
        waitpoints=waitpoints,
    )


async def read_waits(
    backend: ValkeyBackend, *, lane: str | None, namespace: str | None, limit: int
) -> tuple[list[Wait], int]:
    """Suspended executions, soonest timeout first, and how many the limit left out."""
    entries: list[SuspendedEntry] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await backend.suspensions.list_suspended(cursor=cursor, limit=_PAGE)
        entries += [one for one in page.entries if lane is None or one.lane_id == lane]
        cursor = page.next_cursor
    if namespace is not None:
        entries = [
            one
            for one in entries
            if await backend.reads.get_execution_namespace(one.execution_id) == namespace
        ]
    entries.sort(key=lambda one: (one.timeout_at or _NEVER, one.suspended_at, one.execution_id))
    read = await asyncio.gather(
        *(_read_if_suspended(backend, one.execution_id) for one in entries[:limit])
    )
    return [wait for wait in read if wait is not None], max(0, len(entries) - limit)


async def _read_if_suspended(backend: ValkeyBackend, execution_id: ExecutionId) -> Wait | None:
    """None if it was answered or deleted since it was listed."""
    try:
        wait = await read_wait(backend, execution_id)
    except NotFoundError:
        return None
    return wait if wait.public_state is PublicState.SUSPENDED else None
