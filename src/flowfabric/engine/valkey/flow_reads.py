"""Reading flows, their members and edges."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from flowfabric.core.contracts import ListingPage, flows
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.graph import SUBFLOW
from flowfabric.core.ids import ExecutionId, validate_uuid
from flowfabric.core.state import (
    LifecyclePhase,
    OwnershipState,
    StateVector,
    TerminalOutcome,
)
from flowfabric.core.stored import Stored, stored_text
from flowfabric.engine.api import check
from flowfabric.engine.api import flows as api
from flowfabric.engine.api.events import Events
from flowfabric.engine.events.flow_waits import wait_flow
from flowfabric.engine.paging import read_every
from flowfabric.engine.valkey import flow_records, keys
from flowfabric.engine.valkey.calls import FunctionCalls, at_once, text
from flowfabric.engine.valkey.drains import CascadeDrains
from flowfabric.engine.valkey.flow_inputs import read_inputs
from flowfabric.engine.valkey.pages import (
    Damage,
    chunks,
    given_cursor,
    opened,
    reading_cursor,
    sealed,
)
from flowfabric.engine.valkey.places import ValkeyPlaces

_MEMBERS_AT_ONCE = 500
_FLOWS_AT_ONCE = 100
_PARTITIONS_AT_ONCE = 16
_MAX_PAGE = 1000
_MAX_EXAMINED = 10_000
_EDGE_CALLS = 10


class FlowReads:
    """The part of `Flows` that only reads."""

    def __init__(
        self, calls: FunctionCalls, places: ValkeyPlaces, events: Events, drains: CascadeDrains
    ) -> None:
        self._calls = calls
        self._places = places
        self._events = events
        self._drains = drains

    def _tag(self, flow_id: str) -> str:
        return api.tag_of(flow_id, self._calls.counts)

    async def _record(self, flow_id: str) -> Stored | None:
        """The record of a visible flow."""
        key = keys.flow(self._tag(flow_id), flow_id)
        raw = await self._calls.read(f"flow {flow_id}", "HGETALL", key)
        stored = Stored.from_hash(f"flow {flow_id}", raw)
        return stored if raw and flow_records.is_shown(stored) else None

    async def resolve_execution_flow_id(self, execution_id: ExecutionId) -> str | None:
        known = self._calls.checked(execution_id)
        place = f"{known}: record"
        stored = await self._calls.read(place, "HGET", keys.core(known.tag, known), "flow_id")
        return None if stored is None else text(stored)

    async def describe_flow(
        self, flow_id: str, *, edge_groups: bool = True
    ) -> flows.FlowSnapshot | None:
        check.flag(edge_groups, "edge_groups")
        stored, tags = await asyncio.gather(self._record(flow_id), self._tags(flow_id))
        if stored is None:
            return None
        joins: list[flows.JoinSnapshot] = []
        if edge_groups:
            async for row in self._member_rows(flow_id):
                damaged = Damage("describe_flow")
                if (member := damaged.keep(lambda row=row: _member(row))) and member.join:
                    joins.append(member.join)
        return flow_records.flow_snapshot(flow_id, stored, tags, tuple(joins))

    async def _tags(self, flow_id: str) -> dict[str, str]:
        place, key = f"flow {flow_id}", keys.flow_tags(self._tag(flow_id), flow_id)
        raw = await self._calls.read(f"{place}: tags", "HGETALL", key)
        return {text(name): stored_text(value, place, "tags") for name, value in raw.items()}

    async def get_flow_tag(self, flow_id: str, key: str) -> str | None:
        place, tags = f"flow {flow_id}", keys.flow_tags(self._tag(flow_id), flow_id)
        name = check.text(key, "key")
        value = await self._calls.read(f"{place}: tags", "HGET", tags, name)
        return None if value is None else stored_text(value, place, "tags")

    async def wait_flow(self, flow_id: str, timeout: float | None = None) -> flows.FlowState:
        async def finished_state() -> flows.FlowState | None:
            stored = await self._record(flow_id)
            if stored is None:
                raise NotFoundError("flow_not_found", flow_id, op="wait_flow")
            return flow_records.finished_state(stored)

        return await wait_flow(self._events, self._tag(flow_id), flow_id, finished_state, timeout)

    async def list_flows(
        self,
        *,
        partition: int | None = None,
        cursor: str = "",
        limit: int = 50,
        where: api.FlowFilter | None = None,
    ) -> ListingPage[flows.FlowListing]:
        if partition is not None:
            check.partition(partition, self._calls.counts)
        limit = min(check.whole(limit, "limit"), _MAX_PAGE)
        given_cursor(cursor)
        where = where or api.FlowFilter()
        check.instance(where, api.FlowFilter, "where").validate()
        position, after = self._start(partition, cursor)
        if limit <= 0:
            return ListingPage(())
        used = await self._places.partitions_in_use() if partition is None else [partition]
        left = [each for each in used if each >= position]
        damage = Damage("list_flows")
        rows: list[flows.FlowListing] = []
        done, examined = (position, after), 0
        async for index, flow_id, raw in self._each_flow(left, after, limit, where):
            if len(rows) == limit or examined == _MAX_EXAMINED:
                return ListingPage(tuple(rows), sealed(*done), tuple(damage.found))
            done, examined = (index, flow_id), examined + 1
            row = damage.keep(lambda i=flow_id, r=raw: _listing(i, r)) if raw else None
            if row is not None and where.status in (None, row.status):
                rows.append(row)
        return ListingPage(tuple(rows), None, tuple(damage.found))

    def _start(self, partition: int | None, cursor: str) -> tuple[int, str]:
        """The partition to begin with, and the flow after which its page begins."""
        if not cursor:
            return (partition or 0), ""
        with reading_cursor():
            number, after = opened(cursor, 2)
            position, after = int(number), validate_uuid(after, "cursor")
        if partition not in (None, position):
            raise ValidationError("invalid_cursor", "belongs to another partition")
        return position, after

    async def _each_flow(
        self, partitions: Sequence[int], after: str, limit: int, where: api.FlowFilter
    ) -> AsyncIterator[tuple[int, str, Any]]:
        """Partition, id and record of each flow; without a record after many skipped flows."""
        tags = [part for pair in where.tags.items() for part in pair]

        async def page(index: int, start: str) -> tuple[list[Any], str]:
            args = (start, limit, _FLOWS_AT_ONCE, where.namespace or "", *tags)
            return await self._calls.ask(
                *("ff_list_flows", f"{{fp:{index}}}", args),
                lambda reply: (reply[2], text(reply[3])),
            )

        starts = {index: after if index == partitions[0] else "" for index in partitions}
        for part in chunks(partitions, _PARTITIONS_AT_ONCE):
            pages = await at_once(len(part), lambda index: page(index, starts[index]), part)
            for index, found in zip(part, pages, strict=True):
                rows, last = found
                while rows or last:
                    for flow_id, raw in rows:
                        yield index, text(flow_id), raw
                    if last:
                        yield index, last, None
                    rows, last = await page(index, last) if last else ([], "")

    async def list_members(
        self, flow_id: str, *, cursor: str = "", limit: int = 500
    ) -> ListingPage[flows.FlowMember]:
        tag = self._tag(flow_id)
        limit = min(check.whole(limit, "limit"), _MAX_PAGE)
        start = "-"
        if given_cursor(cursor):
            with reading_cursor():
                start = _after_member(flow_id, tag, cursor)
        if limit <= 0:
            return ListingPage(())
        rows, more = await self._members(tag, flow_id, start, limit)
        damage = Damage("list_members")
        found = [damage.keep(lambda row=row: _member(row)) for row in rows]
        following = sealed(flow_id, text(rows[-1][0])) if more else None
        entries = tuple(member for member in found if member is not None)
        return ListingPage(entries, following, tuple(damage.found))

    async def _members(
        self, tag: str, flow_id: str, start: str, limit: int
    ) -> tuple[list[Any], bool]:
        return await self._calls.ask(
            *("ff_flow_members", tag, (flow_id, start, limit)),
            lambda reply: (reply[2], reply[3] == 1),
            op="list_members",
        )

    async def _member_rows(self, flow_id: str) -> AsyncIterator[Any]:
        """All members in the order in which they joined."""
        tag, start, more = self._tag(flow_id), "0", True
        while more:
            rows, more = await self._members(tag, flow_id, start, _MEMBERS_AT_ONCE)
            for row in rows:
                yield row
            start = text(rows[-1][1]) if rows else start

    async def _member_ids(self, flow_id: str, limit: int | None) -> tuple[ExecutionId, ...]:
        found: list[ExecutionId] = []
        async for row in self._member_rows(flow_id):
            found.append(ExecutionId.trusted(text(row[0])))
            if len(found) == limit:
                break
        return tuple(found)

    async def describe_edge(self, flow_id: str, edge_id: str) -> flows.EdgeSnapshot | None:
        tag, edge = self._tag(flow_id), validate_uuid(edge_id, "edge_id")
        place = f"flow {flow_id}: edges"
        stored, noted = await asyncio.gather(
            self._record(flow_id),
            self._calls.read(place, "HGET", keys.edges(tag, flow_id), edge),
        )
        if stored is None or noted is None:
            return None
        child, _, position = text(noted).partition(" ")
        lines = keys.into(tag, flow_id, f"{tag}:{child}")
        line = await self._calls.read(place, "HGET", lines, position)
        found = None if line is None else _edge(flow_id, tag, child, line, stored)
        # The edges of a deleted child no longer exist, even if a new child has its id.
        return found if found is not None and found.edge_id == edge else None

    async def list_edges(
        self,
        flow_id: str,
        *,
        outgoing: ExecutionId | None = None,
        incoming: ExecutionId | None = None,
        cursor: str = "",
        limit: int = 500,
    ) -> ListingPage[flows.EdgeSnapshot]:
        tag = self._tag(flow_id)
        limit = min(check.whole(limit, "limit"), _MAX_PAGE)
        given_cursor(cursor)
        if outgoing is not None and incoming is not None:
            raise ValidationError(
                "invalid_input", "incoming: pass either incoming or outgoing, not both"
            )
        if incoming is not None:
            child = self._calls.checked(incoming, "incoming")
            api.check_member(tag, child)
            with reading_cursor():
                place = _place(flow_id, cursor) if cursor else 0
            return await self._incoming(flow_id, child, place, limit)
        upstream = "" if outgoing is None else self._calls.checked(outgoing, "outgoing")
        if upstream:
            api.check_member(tag, upstream)
        with reading_cursor():
            start = _position(flow_id, tag, cursor) if cursor else ("", "0")
        return await self._outgoing(flow_id, tag, upstream, start, limit)

    async def _outgoing(
        self, flow_id: str, tag: str, upstream: str, start: tuple[str, str], limit: int
    ) -> ListingPage[flows.EdgeSnapshot]:
        damage = Damage("list_edges")
        found: list[flows.EdgeSnapshot] = []
        member, edge = last = start
        if limit <= 0:
            return ListingPage(())
        # A page is short if it skips very many members without edges.
        for _ in range(_EDGE_CALLS):
            first = "-" if not member else f"[{member}" if edge else f"({member}"
            # Read one more to find out whether another page follows.
            args = (flow_id, upstream, first, edge or 0, limit + 1 - len(found))
            reply = await self._calls.fcall("ff_flow_edges", tag, args, op="list_edges")
            since = Stored(f"flow {flow_id}", {"created_at": reply[2]})
            for child, line, of, number in reply[3]:
                if len(found) == limit:
                    return ListingPage(tuple(found), sealed(flow_id, *last), tuple(damage.found))
                last = text(of), text(number)
                known = (text(child), line, since)
                each = damage.keep(lambda k=known: _edge(flow_id, tag, *k))
                if each is not None:
                    found.append(each)
            if not reply[4]:
                return ListingPage(tuple(found), None, tuple(damage.found))
            member, edge = text(reply[4]), text(reply[5])
        return ListingPage(tuple(found), sealed(flow_id, member, edge), tuple(damage.found))

    async def _incoming(
        self, flow_id: str, child: ExecutionId, place: int, limit: int
    ) -> ListingPage[flows.EdgeSnapshot]:
        stored = await self._record(flow_id)
        if stored is None or limit <= 0:
            return ListingPage(())
        damage = Damage("list_edges")
        key, context = keys.into(child.tag, flow_id, child), f"flow {flow_id}: edges"
        places = range(place + 1, place + limit + 2)
        lines = await self._calls.read(context, "HMGET", key, *places)
        found: list[flows.EdgeSnapshot | None] = []
        for line in lines[:limit]:
            known = (child.tag, child.uuid, line, stored)
            found.append(damage.keep(lambda k=known: _edge(flow_id, *k)) if line else None)
        more = None if lines[limit] is None else sealed(flow_id, place + limit)
        return ListingPage(tuple(filter(None, found)), more, tuple(damage.found))

    async def list_outgoing_edges(self, execution_id: ExecutionId) -> list[flows.EdgeSnapshot]:
        return await self._edges_of(execution_id, "outgoing")

    async def list_incoming_edges(self, execution_id: ExecutionId) -> list[flows.EdgeSnapshot]:
        return await self._edges_of(execution_id, "incoming")

    async def _edges_of(self, execution_id: ExecutionId, side: str) -> list[flows.EdgeSnapshot]:
        flow_id = await self.resolve_execution_flow_id(execution_id)
        if flow_id is None:
            return []
        which: dict[str, Any] = {side: execution_id}
        return await read_every(
            lambda cursor: self.list_edges(flow_id, **which, cursor=cursor, limit=_MAX_PAGE)
        )

    async def get_inputs(self, execution_id: ExecutionId) -> flows.FlowInputs:
        return await read_inputs(self._calls, self._calls.checked(execution_id))

    async def evaluate_flow_eligibility(self, execution_id: ExecutionId) -> flows.FlowEligibility:
        known = self._calls.checked(execution_id)
        names = ("state", "deps", "join", "execution_kind")
        raw = await self._calls.read(
            f"{known}: record", "HMGET", keys.core(known.tag, known), *names
        )
        stored = Stored.from_row(known, names, raw)
        if not stored.is_set("state"):
            return "not_found"
        vector = StateVector.from_code(stored.text("state"), known)
        if vector.lifecycle_phase is not LifecyclePhase.RUNNABLE:
            return "not_runnable"
        if vector.ownership_state is not OwnershipState.UNOWNED:
            return "owned"
        if vector.terminal_outcome is not TerminalOutcome.NONE:
            return "terminal"
        join = flow_records.join_snapshot(known, stored)
        if join is None or join.group_state == "satisfied":
            owns_flow = stored.text("execution_kind", "") == SUBFLOW
            return "blocked_by_dependencies" if owns_flow else "eligible"
        return "impossible" if join.group_state == "impossible" else "blocked_by_dependencies"


def _edge(flow_id: str, tag: str, child: str, line: Any, stored: Stored) -> flows.EdgeSnapshot:
    decoded = stored_text(line, f"flow {flow_id}", f"edge into {child}")
    created = stored.number("created_at")
    return flow_records.edge_snapshot(flow_id, tag, child, decoded, created)


def _position(flow_id: str, tag: str, cursor: str) -> tuple[str, str]:
    """The last member that a page of edges looked at, and the number of its last edge.

    Without a number the member has no more edges.
    """
    of, member, edge = opened(cursor, 3)
    if of != flow_id or ExecutionId.parse(member).tag != tag:
        raise ValueError(cursor)
    return member, str(int(edge)) if edge else ""


def _place(flow_id: str, cursor: str) -> int:
    """The last place that a page of the edges into a member looked at."""
    of, place = opened(cursor, 2)
    if of != flow_id or int(place) < 0:
        raise ValueError(cursor)
    return int(place)


def _listing(flow_id: str, raw: Any) -> flows.FlowListing:
    stored = Stored.from_hash(f"flow {flow_id}", raw)
    if stored.is_set("unreadable"):
        raise stored.corrupt("record", "is not a hash")
    return flow_records.flow_listing(flow_id, stored)


def _after_member(flow_id: str, tag: str, cursor: str) -> str:
    """Where the page of a cursor begins; raises an error for a cursor of another flow."""
    of, last = opened(cursor, 2)
    if of != flow_id or ExecutionId.parse(last).tag != tag:
        raise ValueError(cursor)
    return f"({last}"


def _member(row: Sequence[Any]) -> flows.FlowMember:
    execution_id = ExecutionId.trusted(text(row[0]))
    names = ("number", "node", "state", "execution_kind", "deps", "join", "subflow")
    stored = Stored.from_row(execution_id, names, (*row[1:8], *[None] * 6))
    vector = StateVector.from_code(stored.text("state"), execution_id)
    return flows.FlowMember(
        execution_id=execution_id,
        number=stored.number("number"),
        node=stored.text("node", ""),
        public_state=vector.public_state,
        execution_kind=stored.text("execution_kind"),
        join=flow_records.join_snapshot(execution_id, stored),
        # The tag of another partition may follow.
        subflow_id=stored.text("subflow", "").partition(" ")[0] or None,
    )
