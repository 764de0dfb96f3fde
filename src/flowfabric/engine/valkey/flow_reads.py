"""Reading flows, their members and edges."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from flowfabric.core.contracts import flows
from flowfabric.core.ids import ExecutionId
from flowfabric.core.stored import Stored
from flowfabric.engine.api import flows as api
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, text
from flowfabric.engine.valkey.flow_records import flow_snapshot, inputs_of, join_snapshot

_MEMBERS_AT_ONCE = 500
_IDS_AT_ONCE = 1000


class FlowReads:
    """The part of `Flows` that only reads."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    def _tag(self, flow_id: str) -> str:
        return api.tag_of(flow_id, self._calls.counts)

    async def _member_ids(
        self, tag: str, flow_id: str, limit: int | None
    ) -> tuple[ExecutionId, ...]:
        found: list[ExecutionId] = []
        while True:
            most = _IDS_AT_ONCE if limit is None else min(_IDS_AT_ONCE, limit - len(found))
            key = keys.members(tag, flow_id)
            last = len(found) + most - 1
            page = await self._calls.read(f"flow {flow_id}", "ZRANGE", key, len(found), last)
            found += (ExecutionId.trusted(text(member)) for member in page)
            if len(page) < most or len(found) == limit:
                return tuple(found)

    async def resolve_execution_flow_id(self, execution_id: ExecutionId) -> str | None:
        known = self._calls.checked(execution_id)
        place = f"{known}: record"
        stored = await self._calls.read(place, "HGET", keys.core(known.tag, known), "flow_id")
        return None if stored is None else text(stored)

    async def describe_flow(self, flow_id: str) -> flows.FlowSnapshot | None:
        tag = self._tag(flow_id)
        place = f"flow {flow_id}"
        raw = await self._calls.read(place, "HGETALL", keys.flow(tag, flow_id))
        if not raw:
            return None
        tags = await self._calls.read(f"{place}: tags", "HGETALL", keys.flow_tags(tag, flow_id))
        joins: list[flows.JoinSnapshot] = []
        async for row in self.members(flow_id):
            stored = Stored(row.execution_id, {"deps": row.deps or None, "join": row.join or None})
            if join := join_snapshot(row.execution_id, stored):
                joins.append(join)
        texts = {text(name): text(value) for name, value in tags.items()}
        return flow_snapshot(flow_id, Stored.from_hash(place, raw), texts, tuple(joins))

    async def members(self, flow_id: str) -> AsyncIterator[flows.Member]:
        tag, after = self._tag(flow_id), "0"
        while True:
            args = (flow_id, after, _MEMBERS_AT_ONCE)
            reply = await self._calls.fcall("ff_flow_members", tag, args, op="list_members")
            for row in reply[2]:
                after = text(row[0])
                yield _member(row)
            if len(reply[2]) < _MEMBERS_AT_ONCE:
                return

    async def get_inputs(self, execution_id: ExecutionId) -> flows.FlowInputs:
        return await self._calls.ask_about(
            execution_id, "ff_get_inputs", (), lambda reply: inputs_of(reply[2:4])
        )


def _member(row: Sequence[Any]) -> flows.Member:
    node, state, kind, deps, join = (
        None if part is None else text(part) for part in (*row[2:7], *[None] * 5)[:5]
    )
    return flows.Member(
        execution_id=ExecutionId.trusted(text(row[1])),
        node=node or "",
        state=state or "",
        execution_kind=kind or "",
        deps=deps or "",
        join=join or "",
    )
