"""Pausing attempts until a condition is met."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec

from flowfabric.core.contracts import suspension
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import ExecutionId, WaitpointToken, stored_id
from flowfabric.core.state import PublicState
from flowfabric.core.stored import Stored, corrupt
from flowfabric.core.text import lossless, raw
from flowfabric.engine.api import check
from flowfabric.engine.api.suspensions import Suspensions
from flowfabric.engine.valkey import pages
from flowfabric.engine.valkey.calls import FunctionCalls, proof, text
from flowfabric.engine.valkey.drains import CascadeDrains
from flowfabric.engine.valkey.pages import Damage
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.engine.valkey.record import question

_SUSPENDED_PARTS = (
    *("lane_id", "suspension_id", "reason_code", "requested_by", "created_at", "timeout_at"),
    *("closed_at", "prompt", "details"),
)
_pack = msgspec.msgpack.Encoder().encode
_TRIGGERS = ("signal", "operator", "auto_resume")
_Row = tuple[tuple[int, str], list[Any]]
"""The position of an entry, and what is stored."""
_LANES_AT_ONCE = 500
_EXPIRED_AT_ONCE = 20  # Each may close up to 64 waitpoints.
_MAX_PAGE = 1000


class ValkeySuspensions(Suspensions):
    """`Suspensions` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces, drains: CascadeDrains) -> None:
        self._calls = calls
        self._places = places
        self._drains = drains

    async def _suspend(self, handle: Handle, options: dict[str, Any]) -> suspension.SuspendOutcome:
        return await self._calls.ask_about(
            *(handle.execution_id, "ff_suspend", (proof(handle), _pack(options))),
            lambda reply: _suspend_outcome(handle, reply),
            replay_safe=bool(options["idem"]),
        )

    async def _now_ms(self) -> int:
        return await self._calls.server_time_ms()

    async def resume_execution(
        self, execution_id: ExecutionId, *, trigger_type: str = "operator", resume_delay_ms: int = 0
    ) -> suspension.Resumed:
        args = (
            check.one_of(trigger_type, "trigger_type", _TRIGGERS),
            check.whole(resume_delay_ms, "resume_delay_ms", 0),
        )
        return await self._calls.ask_about(
            *(execution_id, "ff_resume", args),
            lambda reply: suspension.Resumed(PublicState(text(reply[2]))),
            op="resume_execution",
            # Not replay-safe: a repeat would find the execution resumed.
            replay_safe=False,
        )

    async def expire_suspension(self, tag: str, ids: Sequence[str]) -> list[str]:
        names, tag = check.stored_names(ids, "ids"), self._calls.checked_tag(tag)
        verdicts: list[str] = []
        for part in pages.chunks(names, _EXPIRED_AT_ONCE):
            verdicts += await self._calls.ask_each(
                "ff_expire_suspension", tag, *part, on_rest=self._drains.note
            )
        return verdicts

    async def expire_waitpoints(self, tag: str, ids: Sequence[str]) -> list[str]:
        names, tag = check.stored_names(ids, "ids"), self._calls.checked_tag(tag)
        return await self._calls.ask_each("ff_expire_waitpoint", tag, *names)

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str = "", limit: int = 100
    ) -> suspension.SuspendedPage:
        begin, score, after = _parse_cursor(cursor)
        limit = min(check.whole(limit, "limit"), _MAX_PAGE)
        if partition is None:
            partitions = await self._places.partitions_in_use()
        else:
            partitions = [check.partition(partition, self._calls.counts)]
        if cursor and begin not in partitions:
            raise ValidationError("invalid_cursor", "belongs to another listing")
        if limit <= 0:
            return suspension.SuspendedPage(())
        places = await self._places.lanes_by_partition()
        damage = Damage("list_suspended")
        entries: list[suspension.SuspendedEntry] = []
        last = ""
        for index in partitions:
            if index < begin:
                continue
            lanes = sorted(places.get(f"{{fp:{index}}}", ()))
            position = (score, after) if index == begin else (0, "")
            while True:
                room = limit - len(entries)
                # Read one more than fits, to find out whether more follow.
                rows = await self._suspended_rows(index, lanes, position, room + 1, damage)
                for position, row in rows[:room]:
                    entry = damage.keep(lambda row=row: _suspended_entry(row))
                    if entry is not None:
                        last = pages.sealed(index, *position)
                        entries.append(entry)
                if len(rows) > room and len(entries) == limit:
                    return suspension.SuspendedPage(tuple(entries), last, tuple(damage.found))
                if len(rows) <= room:
                    break
        return suspension.SuspendedPage(tuple(entries), None, tuple(damage.found))

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


def _suspended_part(reply: list[Any]) -> tuple[list[_Row], int, list[str]]:
    """Rows, how many lanes they are from, and the lanes that cannot be read."""
    lanes_read = int(reply[3])
    if lanes_read < 1:
        raise ValueError(lanes_read)
    rows = [((int(row[1]), lossless(row[0])), row) for row in reply[2]]
    return rows, lanes_read, [text(lane) for lane in reply[4]]


def _suspended_entry(row: list[Any]) -> suspension.SuspendedEntry | None:
    """A row as listed, or None when its suspension has just ended."""
    execution_id = stored_id(lossless(row[0]), "list_suspended")
    if row[3] is None:
        raise corrupt(execution_id, "suspension", "has the wrong type")
    stored = Stored.from_row(execution_id, _SUSPENDED_PARTS, [row[2], *row[3]])
    created = stored.is_set("suspension_id") or stored.is_set("created_at")
    if stored.is_set("closed_at") or not created:
        return None
    return suspension.SuspendedEntry(
        execution_id=execution_id,
        lane_id=stored.text("lane_id"),
        suspension_id=stored.text("suspension_id"),
        reason=stored.text("reason_code", ""),
        requested_by=stored.text("requested_by", ""),
        suspended_at=stored.number("created_at"),
        timeout_at=stored.maybe_number("timeout_at"),
        **question(stored),
    )


def _parse_cursor(cursor: str) -> tuple[int, int, str]:
    if pages.given_cursor(cursor) == "":
        return 0, 0, ""
    with pages.reading_cursor():
        partition, score, execution_id = pages.opened(cursor, 3)
        return int(partition), int(score), ExecutionId.parse(execution_id)


def _suspend_outcome(handle: Handle, reply: Sequence[Any]) -> suspension.SuspendOutcome:
    word, attempt, lane, instance = (text(part) for part in reply[2:6])
    if word == "already_satisfied":
        # A pending waitpoint is always the only one.
        return suspension.AlreadySatisfiedSuspension(_details(reply[6:10]), text(reply[10]))
    if word != "suspended":
        raise ValueError(word)
    parked = msgspec.structs.replace(
        handle, attempt=attempt, lane_id=lane, worker_instance_id=instance, kind="suspended"
    )
    return suspension.Suspended(_details(reply[6:]), parked)


def _details(parts: Sequence[Any]) -> suspension.SuspensionDetails:
    waitpoints = tuple(
        suspension.WaitpointDetails(
            text(parts[i]), text(parts[i + 1]), WaitpointToken(text(parts[i + 2]))
        )
        for i in range(1, len(parts), 3)
    )
    return suspension.SuspensionDetails(text(parts[0]), waitpoints)
