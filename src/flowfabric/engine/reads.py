"""Reading executions. Nothing here changes state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from flowfabric.core import keys
from flowfabric.core.contracts.events import Event, decode_history
from flowfabric.core.contracts.executions import (
    AttemptRecord,
    ExecutionContext,
    ExecutionInfo,
    ExecutionSnapshot,
    WhyWaiting,
)
from flowfabric.core.errors import NotFoundError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId, is_execution_id
from flowfabric.core.policy import NO_POLICY, ExecutionPolicy, parse_policy
from flowfabric.core.state import PublicState
from flowfabric.core.stored import corrupt, stored_text
from flowfabric.core.text import lossless
from flowfabric.engine.arguments import MAX_EXACT, checked_text, each_text, whole
from flowfabric.engine.coverage import Gaps, waits_for_worker
from flowfabric.engine.record import Record

__all__ = ["Reads"]


class Reads(Gaps):
    """Single-execution reads."""

    async def _record(self, execution_id: ExecutionId) -> Record | None:
        key = keys.core(execution_id.tag, execution_id)
        fields = await self.read(f"{execution_id}: record", "HGETALL", key)
        return Record.decode(execution_id, fields) if fields else None

    async def _existing(self, execution_id: ExecutionId, op: str) -> Record:
        record = await self._record(self.checked(execution_id))
        if record is None:
            raise NotFoundError("execution_not_found", op=op)
        return record

    async def read_execution_info(self, execution_id: ExecutionId) -> ExecutionInfo:
        """An execution as operators read it."""
        return (await self._existing(execution_id, "read_execution_info")).info()

    async def read_execution_state(self, execution_id: ExecutionId) -> PublicState:
        """The public state: the authoritative completion signal."""
        return (await self._existing(execution_id, "read_execution_state")).public_state

    async def describe_execution(self, execution_id: ExecutionId) -> ExecutionSnapshot | None:
        """A strictly decoded picture, or None when there is no such execution."""
        execution_id = self.checked(execution_id)
        record, tags = await asyncio.gather(self._record(execution_id), self._tags(execution_id))
        return None if record is None else record.snapshot(tags)

    async def _tags(self, execution_id: ExecutionId) -> Mapping[str, str]:
        key = keys.tags(execution_id.tag, execution_id)
        fields = await self.read(f"{execution_id}: tags", "HGETALL", key)
        return {
            stored_text(name, execution_id, "tags"): stored_text(value, execution_id, "tags")
            for name, value in fields.items()
        }

    async def get_execution_result(self, execution_id: ExecutionId) -> bytes | None:
        """The result bytes, or None when there is none (yet, or any more)."""
        execution_id = self.checked(execution_id)
        key = keys.result(execution_id.tag, execution_id)
        return await self.read(f"{execution_id}: result", "GET", key)

    async def read_outcome(self, execution_id: ExecutionId) -> tuple[ExecutionInfo, bytes | None]:
        """State and result of one moment: what a waiter needs when the execution ended."""
        execution_id = self.checked(execution_id)
        key = keys.result(execution_id.tag, execution_id)
        info, result = await asyncio.gather(
            self._existing(execution_id, "read_outcome"),
            self.read(f"{execution_id}: result", "GET", key),
        )
        return info.info(), result

    async def read_execution_context(self, execution_id: ExecutionId) -> ExecutionContext:
        """What a handler would be given."""
        execution_id = self.checked(execution_id)
        key = keys.payload(execution_id.tag, execution_id)
        record, tags, payload = await asyncio.gather(
            self._record(execution_id),
            self._tags(execution_id),
            self.read(f"{execution_id}: payload", "GET", key),
        )
        if record is None:
            raise invalid_input("execution_id", "no such execution")
        encoding = record.text("payload_encoding", "")
        return ExecutionContext(payload or b"", record.kind, tags, encoding)

    async def read_execution_policy(self, execution_id: ExecutionId) -> ExecutionPolicy:
        """The policy that holds for an execution, its defaults filled in."""
        execution_id = self.checked(execution_id)
        core = keys.core(execution_id.tag, execution_id)
        key = keys.policy(execution_id.tag, execution_id)
        known, stored = await asyncio.gather(
            self.transport.call("EXISTS", core, key=core),
            self.read(f"{execution_id}: policy", "GET", key),
        )
        if not known:
            raise NotFoundError("execution_not_found", op="read_execution_policy")
        try:
            return parse_policy(stored) or NO_POLICY
        except ValidationError as error:
            raise corrupt(execution_id, "policy", error.detail) from error

    async def find_executions(self, uuid_prefix: str, limit: int = 10) -> list[ExecutionId]:
        """Executions of any partition whose UUID begins so: how people abbreviate an id."""
        checked_text(uuid_prefix, "uuid_prefix")
        limit = min(whole(limit, "limit"), MAX_EXACT)
        if limit < 1:
            return []
        tags = [f"{{fp:{index}}}" for index in await self.partitions_in_use()]
        found: list[Any] = await asyncio.gather(
            *(self._beginning_with(tag, uuid_prefix, limit) for tag in tags)
        )
        return [
            ExecutionId.trusted(member)
            for tag, page in zip(tags, found, strict=True)
            for member in map(lossless, page)
            if is_execution_id(member, tag)
        ][:limit]

    async def _beginning_with(self, tag: str, uuid_prefix: str, limit: int) -> Any:
        key = keys.index(tag, "all_executions")
        first = f"{tag}:{uuid_prefix}"
        # `~` sorts after everything a UUID is made of.
        bounds = (f"[{first}", f"({first}~", "BYLEX", "LIMIT", 0, limit)
        return await self.read(f"{tag}: all_executions", "ZRANGE", key, *bounds)

    async def get_execution_namespace(self, execution_id: ExecutionId) -> str | None:
        """The namespace, or None when there is no such execution."""
        record = await self._record(self.checked(execution_id))
        return None if record is None else record.namespace

    async def get_execution_tag(self, execution_id: ExecutionId, key: str) -> str | None:
        """One tag's value, or None."""
        execution_id = self.checked(execution_id)
        checked_text(key, "key")
        name = keys.tags(execution_id.tag, execution_id)
        value = await self.read(f"{execution_id}: tags", "HGET", name, key)
        return None if value is None else stored_text(value, execution_id, "tags")

    async def get_execution_tags(self, execution_id: ExecutionId) -> Mapping[str, str]:
        """All tags of an execution."""
        return await self._tags(self.checked(execution_id))

    async def read_exec_core_fields(
        self, execution_id: ExecutionId, names: Sequence[str]
    ) -> dict[str, str | None]:
        """Record fields by their documented names, for tools; None where unset."""
        names = each_text(names, "names")
        record = await self._record(self.checked(execution_id))
        known = {} if record is None else record.named_fields()
        return {name: known.get(name) for name in names}

    async def read_current_attempt_index(self, execution_id: ExecutionId) -> int:
        """The number of the last attempt, 0 before the first claim."""
        record = await self._record(self.checked(execution_id))
        return 0 if record is None else max(0, record.attempt_count - 1)

    async def read_total_attempt_count(self, execution_id: ExecutionId) -> int:
        """How many attempts there were; the index the next new one gets."""
        record = await self._record(self.checked(execution_id))
        return 0 if record is None else record.attempt_count

    async def read_attempts(self, execution_id: ExecutionId) -> list[AttemptRecord]:
        """Every attempt, oldest first."""
        record = await self._existing(execution_id, "read_attempts")
        eid = record.execution_id
        archived = await asyncio.gather(
            *(
                self.read(
                    f"attempt {index} of {eid}: record",
                    "HGETALL",
                    keys.attempt(eid.tag, eid, index),
                )
                for index in range(record.attempt_count)
            )
        )
        return record.attempts(archived)

    async def read_execution_history(self, execution_id: ExecutionId) -> list[Event]:
        """The newest unusual lease events of one execution, oldest first."""
        eid = (await self._existing(execution_id, "read_execution_history")).execution_id
        entries = await self.read(f"{eid}: history", "LRANGE", keys.history(eid.tag, eid), 0, -1)
        return [decode_history(eid.partition, entry, eid) for entry in entries]

    async def explain_execution(self, execution_id: ExecutionId) -> WhyWaiting:
        """Why an execution is not running.

        What capabilities are missing is judged now, by the workers registered for its lane and
        namespace, and only while it waits for one.
        """
        record = await self._existing(execution_id, "explain_execution")
        tag = record.execution_id.tag
        lane_key = keys.lane(tag, record.lane_id, "config")
        edges_key = keys.unresolved(tag, record.execution_id)
        context = f"lane {record.lane_id} of {tag}"
        lane_state, edges = await asyncio.gather(
            self.read(f"{context}: config", "HGET", lane_key, "state"),
            self.read(f"{record.execution_id}: unresolved", "SCARD", edges_key),
        )
        near = None
        if waits_for_worker(record.vector):
            required = record.required_capabilities
            near = await self.coverage(record.namespace, record.lane_id, required)
        return WhyWaiting(
            public_state=record.public_state,
            blocking_reason=record.vector.blocking_reason.value,
            blocking_detail=record.text("blocking_detail", ""),
            since=record.last_transition_at,
            lane_state=stored_text(lane_state, context, "state") if lane_state else "active",
            retry_at=record.maybe_number("delay_until"),
            missing_capabilities=() if near is None else near.missing,
            live_workers=None if near is None else near.workers,
            unresolved_edges=edges,
            waitpoints=await self._waited_for(record),
        )

    async def _waited_for(self, record: Record) -> tuple[str, ...]:
        """The waitpoints whose signals would end the execution's pause."""
        if record.public_state is not PublicState.SUSPENDED:
            return ()
        eid = record.execution_id
        key = keys.suspension(eid.tag, eid)
        stored = await self.read(f"{eid}: suspension", "HGET", key, "waitpoints")
        return () if stored is None else tuple(stored_text(stored, eid, "waitpoints").split(","))
