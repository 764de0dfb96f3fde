"""Listing executions, page by page."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core import keys
from flowfabric.core.contracts.executions import ExecutionPage, ExecutionSummary
from flowfabric.core.errors import CorruptionError, EngineError, ValidationError, invalid_input
from flowfabric.core.ids import (
    ExecutionId,
    validate_execution_kind,
    validate_lane,
    validate_namespace,
)
from flowfabric.core.state import PublicState
from flowfabric.core.tags import validate_creation_tags
from flowfabric.core.text import lossless
from flowfabric.engine.calls import Calls
from flowfabric.engine.record import Record

__all__ = ["Filter", "Listing"]

_MAX_PAGE = 1000
_MAX_EXAMINED = 10_000
_CHUNK = 200
_PUBLIC_STATES = tuple(state.value for state in PublicState)
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
        """Executions by partition and id. A filtered page may be short while a cursor follows.

        With a partition the cursor is the last id looked at; without, it is opaque.
        """
        if partition is not None:
            self._check_partition(partition)
        limit = _page(limit)
        if where is not None:
            _check_filter(where)
        if limit <= 0:
            return ExecutionPage(())
        position, after = self._start(partition, cursor)
        chunk = _CHUNK if where else min(limit + 1, _CHUNK)
        rows: list[ExecutionSummary] = []
        examined = 0
        for index in await self._used(partition, position):
            while True:
                members = await self._ids(index, after, chunk)
                for member, row in zip(members, await self._rows(members, where), strict=True):
                    if len(rows) == limit or examined == _MAX_EXAMINED:
                        more = after if partition is not None else _cursor(index, after)
                        return ExecutionPage(tuple(rows), more)
                    examined += 1
                    after = member
                    if row is not None:
                        rows.append(row)
                if len(members) < chunk:
                    break
            after = ""
        return ExecutionPage(tuple(rows))

    def _check_partition(self, partition: Any) -> None:
        last = self.counts.flow - 1
        if type(partition) is not int:
            kind = type(partition).__name__
            problem = f"must be a whole number from 0 to {last}, got {kind}"
            raise invalid_input("partition", problem, undecodable=True)
        if not 0 <= partition <= last:
            raise invalid_input("partition", f"must be between 0 and {last}")

    def _start(self, partition: int | None, cursor: str) -> tuple[int, str]:
        if not cursor:
            return (partition or 0), ""
        try:
            if partition is not None:
                position, after = partition, cursor
            else:
                index, _, after = _opened(cursor).partition("|")
                position = int(index)
            known = (not after and partition is None) or (
                ExecutionId.parse(after).partition == position
            )
        except (ValueError, TypeError, EngineError) as error:
            raise _bad_cursor("is not a cursor of this listing") from error
        if not known:
            raise _bad_cursor("belongs to another partition")
        return position, after

    async def _used(self, partition: int | None, first: int) -> list[int]:
        if partition is not None:
            return [partition]
        return [index for index in await self.partitions_in_use() if index >= first]

    async def _ids(self, partition: int, after: str, count: int) -> list[str]:
        key = keys.index(f"{{fp:{partition}}}", "all_executions")
        first = f"({after}" if after else "-"
        members: Any = await self.transport.call(
            "ZRANGE", key, first, "+", "BYLEX", "LIMIT", 0, count, key=key
        )
        return [lossless(member) for member in members]

    async def _rows(
        self, members: Sequence[str], where: Filter | None
    ) -> list[ExecutionSummary | None]:
        """One row per member; None where there is no record or the filter says no."""
        ids = [_stored_id(member) for member in members]
        rows = [record and record.summary() for record in await self._records(ids)]
        if where is None:
            return rows
        accepted = [row if row is not None and where.accepts(row) else None for row in rows]
        if not where.tags:
            return accepted
        matches = await asyncio.gather(
            *(self._tags_match(row.execution_id, where.tags) for row in accepted if row is not None)
        )
        verdicts = iter(matches)
        return [row if row is not None and next(verdicts) else None for row in accepted]

    async def _tags_match(self, execution_id: ExecutionId, wanted: Mapping[str, str]) -> bool:
        key = keys.tags(execution_id.tag, execution_id)
        stored: Any = await self.transport.call("HMGET", key, *wanted, key=key)
        return list(stored) == [value.encode() for value in wanted.values()]

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
        self, lane_id: str, state: str, *, partition: int, cursor: str = "", limit: int = 50
    ) -> ExecutionPage:
        """Executions of one lane index in its own order: who is next, due, or oldest."""
        suffix = _LANE_INDEXES.get(state) if isinstance(state, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if suffix is None:
            raise invalid_input("state", f"must be one of {', '.join(_LANE_INDEXES)}")
        self._check_partition(partition)
        tag = f"{{fp:{partition}}}"
        names = [keys.lane(tag, validate_lane(lane_id), suffix)]
        if suffix == "eligible":
            signatures = keys.lane(tag, lane_id, "sigs")
            members: Any = await self.transport.call("SMEMBERS", signatures, key=signatures)
            names += [keys.eligible(tag, lane_id, _signature(member)) for member in members]
        limit = _page(limit)
        if limit <= 0:
            return ExecutionPage(())
        after = _lane_position(cursor, tag) if cursor else None
        found = await asyncio.gather(*(self._scored(name, after, limit + 1) for name in names))
        entries = sorted(entry for entries in found for entry in entries)
        rows = await self._rows([member for _, member in entries[:limit]], None)
        more = _lane_cursor(entries[limit - 1]) if len(entries) > limit else None
        return ExecutionPage(tuple(row for row in rows if row is not None), more)

    async def _scored(
        self, name: str, after: tuple[float, str] | None, count: int
    ) -> list[tuple[float, str]]:
        """The next entries of one index by score, then id; equal scores are read through."""
        low = "-inf" if after is None else repr(after[0])
        entries: list[tuple[float, str]] = []
        offset = 0
        while len(entries) < count:
            page: Any = await self.transport.call(
                *("ZRANGE", name, low, "+inf", "BYSCORE", "LIMIT", offset, count, "WITHSCORES"),
                key=name,
            )
            scored = [(float(score), lossless(member)) for member, score in page]
            entries += [entry for entry in scored if after is None or entry > after]
            if len(page) < count:
                break
            offset += count
        return entries[:count]


def _page(limit: Any) -> int:
    if type(limit) is not int:
        problem = f"must be a whole number, got {type(limit).__name__}"
        raise invalid_input("limit", problem, undecodable=True)
    return min(limit, _MAX_PAGE)


def _check_filter(where: Any) -> None:
    """A misspelt filter would otherwise look like an empty deployment."""
    if not isinstance(where, Filter):
        raise invalid_input("where", f"must be a Filter, got {type(where).__name__}")
    if where.state is not None and where.state not in _PUBLIC_STATES:
        raise invalid_input("state", f"must be one of {', '.join(_PUBLIC_STATES)}")
    if where.lane is not None:
        validate_lane(where.lane, "lane")
    if where.namespace is not None:
        validate_namespace(where.namespace)
    if where.kind is not None:
        validate_execution_kind(where.kind, "kind")
    if where.tags:
        validate_creation_tags(where.tags)


def _stored_id(member: str) -> ExecutionId:
    try:
        return ExecutionId.parse(member)
    except EngineError as error:
        raise CorruptionError("corruption", f"list_executions: member: {member!r}") from error


def _signature(member: bytes) -> str:
    try:
        return member.decode()
    except UnicodeDecodeError as error:
        raise CorruptionError("corruption", f"list_lane: signature: {member!r}") from error


def _bad_cursor(problem: str) -> ValidationError:
    return ValidationError("invalid_cursor", problem)


def _opened(cursor: str) -> str:
    return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()


def _sealed(content: str) -> str:
    return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def _cursor(partition: int, after: str) -> str:
    return _sealed(f"{partition}|{after}")


def _lane_cursor(entry: tuple[float, str]) -> str:
    return _sealed(f"{entry[0]!r}|{entry[1]}")


def _lane_position(cursor: str, tag: str) -> tuple[float, str]:
    try:
        score, _, member = _opened(cursor).partition("|")
        known = ExecutionId.parse(member).tag == tag
        position = (float(score), member)
    except (ValueError, TypeError, EngineError) as error:
        raise _bad_cursor("is not a cursor of this listing") from error
    if not known or not math.isfinite(position[0]):
        raise _bad_cursor("belongs to another partition")
    return position
