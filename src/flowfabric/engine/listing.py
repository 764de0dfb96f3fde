"""Listing executions, page by page."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core import keys
from flowfabric.core.contracts.executions import ExecutionPage, ExecutionSummary
from flowfabric.core.errors import CorruptionError, EngineError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.calls import Calls
from flowfabric.engine.record import Record

__all__ = ["Filter", "Listing"]

_MAX_PAGE = 1000
_MAX_EXAMINED = 10_000
_CHUNK = 200
_LANE_INDEXES = {
    "eligible": "eligible",
    "delayed": "delayed",
    "active": "active",
    "suspended": "suspended",
    "terminal": "terminal",
    "reclaimable": "reclaimable",
    "blocked_dependencies": "blocked:dependencies",
    "blocked_budget": "blocked:budget",
    "blocked_quota": "blocked:quota",
    "blocked_route": "blocked:route",
    "blocked_operator": "blocked:operator",
    "blocked_lane": "blocked:lane",
}


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Every part that is given must match."""

    namespace: str | None = None
    lane: str | None = None
    kind: str | None = None
    state: str | None = None
    tags: Mapping[str, str] = {}

    def accepts(self, row: ExecutionSummary) -> bool:
        """Whether the record matches; tags are looked at apart."""
        return (
            (self.namespace is None or row.namespace == self.namespace)
            and (self.lane is None or row.lane_id == self.lane)
            and (self.kind is None or row.execution_kind == self.kind)
            and (self.state is None or row.public_state.value == self.state)
        )


class Listing(Calls):
    """Forward-only listings: what is present throughout appears exactly once."""

    async def list_executions(
        self,
        *,
        partition: int | None = None,
        cursor: str = "",
        limit: int = 50,
        where: Filter | None = None,
    ) -> ExecutionPage:
        """Executions by partition and id. A filtered page may be short while a cursor follows."""
        if partition is not None and not 0 <= partition < self.counts.flow:
            raise invalid_input("partition", f"must be between 0 and {self.counts.flow - 1}")
        limit = min(limit, _MAX_PAGE)
        if limit <= 0:
            return ExecutionPage(())
        position, after = self._start(partition, cursor)
        used = await self._used(partition)
        rows: list[ExecutionSummary] = []
        examined = 0
        for index in [index for index in used if index >= position]:
            while True:
                ids = await self._ids(index, after, _CHUNK)
                for start in ids:
                    if len(rows) == limit or examined == _MAX_EXAMINED:
                        return ExecutionPage(tuple(rows), _cursor(index, after))
                    examined += 1
                    row = await self._row(start, where)
                    after = start
                    if row is not None:
                        rows.append(row)
                if len(ids) < _CHUNK:
                    break
            after = ""
        return ExecutionPage(tuple(rows))

    def _start(self, partition: int | None, cursor: str) -> tuple[int, str]:
        if not cursor:
            return (partition or 0), ""
        try:
            raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
            index, _, after = raw.partition("|")
            position = int(index)
            known = not after or ExecutionId.parse(after).partition == position
        except (ValueError, binascii.Error, EngineError) as error:
            raise ValidationError("invalid_cursor", "is not a cursor of this listing") from error
        if not known or (partition is not None and position != partition):
            raise ValidationError("invalid_cursor", "belongs to another partition")
        return position, after

    async def _used(self, partition: int | None) -> list[int]:
        if partition is not None:
            return [partition]
        members: Any = await self.transport.call("SMEMBERS", keys.PARTITIONS, key=keys.PARTITIONS)
        return sorted(int(member) for member in members)

    async def _ids(self, partition: int, after: str, count: int) -> list[str]:
        key = keys.index(f"{{fp:{partition}}}", "all_executions")
        first = f"({after}" if after else "-"
        members: Any = await self.transport.call(
            "ZRANGE", key, first, "+", "BYLEX", "LIMIT", 0, count, key=key
        )
        return [member.decode() for member in members]

    async def _row(self, member: str, where: Filter | None) -> ExecutionSummary | None:
        try:
            execution_id = ExecutionId.parse(member)
        except EngineError as error:
            raise CorruptionError("corruption", f"list_executions: member: {member!r}") from error
        (record,) = await self._records([execution_id])
        if record is None:
            return None
        row = record.summary()
        if where is None:
            return row
        if not where.accepts(row):
            return None
        return row if await self._tags_match(execution_id, where.tags) else None

    async def _tags_match(self, execution_id: ExecutionId, wanted: Mapping[str, str]) -> bool:
        if not wanted:
            return True
        key = keys.tags(execution_id.tag, execution_id)
        stored: Any = await self.transport.call("HMGET", key, *wanted, key=key)
        return all(
            value is not None and value.decode() == expected
            for value, expected in zip(stored, wanted.values(), strict=True)
        )

    async def _records(self, ids: Sequence[ExecutionId]) -> list[Record | None]:
        names = [keys.core(execution_id.tag, execution_id) for execution_id in ids]
        raws: list[Any] = await asyncio.gather(
            *(self.transport.call("HGETALL", name, key=name) for name in names)
        )
        return [
            Record.decode(execution_id, raw) if raw else None
            for execution_id, raw in zip(ids, raws, strict=True)
        ]

    async def list_lane(
        self, lane_id: str, state: str, *, partition: int, limit: int = 50, offset: int = 0
    ) -> list[ExecutionSummary]:
        """Executions of one lane index in its own order: who is next, due, or oldest."""
        suffix = _LANE_INDEXES.get(state)
        if suffix is None:
            raise invalid_input("state", f"must be one of {', '.join(_LANE_INDEXES)}")
        key = keys.lane(f"{{fp:{partition}}}", lane_id, suffix)
        stop = offset + min(limit, _MAX_PAGE) - 1
        members: Any = await self.transport.call("ZRANGE", key, offset, stop, key=key)
        ids = [ExecutionId.trusted(member.decode()) for member in members]
        return [record.summary() for record in await self._records(ids) if record is not None]


def _cursor(partition: int, after: str) -> str:
    return base64.urlsafe_b64encode(f"{partition}|{after}".encode()).decode().rstrip("=")
