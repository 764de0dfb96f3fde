"""Reading one execution."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flowfabric.core.contracts import executions as contracts
from flowfabric.core.errors import NotFoundError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import NO_POLICY, ExecutionPolicy, parse_policy
from flowfabric.core.state import BlockingReason, LifecyclePhase, OwnershipState, PublicState
from flowfabric.core.stored import Stored, corrupt, stored_text
from flowfabric.engine.api import check
from flowfabric.engine.api.events import Event
from flowfabric.engine.api.reads import Outcome, Reads
from flowfabric.engine.api.workers import WorkerEntry, least_missing, waits_for_worker
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.feeds import decode_history
from flowfabric.engine.valkey.flow_records import join_snapshot
from flowfabric.engine.valkey.record import Record, question
from flowfabric.engine.valkey.workers import ValkeyWorkers
from flowfabric.valkey.transport import Arg


class ValkeyReads(Reads):
    def __init__(self, calls: FunctionCalls, workers: ValkeyWorkers) -> None:
        self._calls = calls
        self._workers = workers

    async def _record(self, execution_id: ExecutionId) -> Record | None:
        return await Record.read(self._calls, self._calls.checked(execution_id))

    async def _existing(self, execution_id: ExecutionId, op: str) -> Record:
        record = await self._record(execution_id)
        if record is None:
            raise NotFoundError("execution_not_found", op=op)
        return record

    async def _part(
        self, execution_id: ExecutionId, name: Callable[[str, str], str], command: str, *args: Arg
    ) -> Any:
        """The reply to a command on one of the execution's keys."""
        eid = self._calls.checked(execution_id)
        key = name(eid.tag, eid)
        return await self._calls.read(f"{eid}: {key.rpartition(':')[2]}", command, key, *args)

    async def read_execution_info(self, execution_id: ExecutionId) -> contracts.ExecutionInfo:
        return (await self._existing(execution_id, "read_execution_info")).info()

    async def read_execution_state(self, execution_id: ExecutionId) -> PublicState:
        return (await self._existing(execution_id, "read_execution_state")).public_state

    async def describe_execution(
        self, execution_id: ExecutionId
    ) -> contracts.ExecutionSnapshot | None:
        record, tags = await asyncio.gather(
            self._record(execution_id), self.get_execution_tags(execution_id)
        )
        if record is None:
            return None
        detail = await self._no_route(record)
        return record.snapshot(tags, question(await self._suspension(record)), detail)

    async def _no_route(self, record: Record) -> str | None:
        """Why no live worker can take an execution that waits for one; None if one can.

        Only for executions with requirements. Computed on demand, so it is exact from the moment
        the last such worker leaves until the next one registers, and costs no write.
        """
        vector, required = record.state_vector, frozenset(record.required_capabilities)
        must_know = record.offered_to is not None
        if vector.blocking_reason is not BlockingReason.WAITING_FOR_WORKER or not (
            required or must_know
        ):
            return None
        fleet = await self._workers.list_workers(None, limit=None)
        return _route_problem(record, _serving(record, fleet))

    async def get_execution_tags(self, execution_id: ExecutionId) -> Mapping[str, str]:
        fields = await self._part(execution_id, keys.tags, "HGETALL")
        return {
            stored_text(name, execution_id, "tags"): stored_text(value, execution_id, "tags")
            for name, value in fields.items()
        }

    async def get_execution_result(self, execution_id: ExecutionId) -> bytes | None:
        record = await self._record(execution_id)
        return None if record is None else await self._result(record)

    async def read_outcome(self, execution_id: ExecutionId) -> Outcome:
        record = await self._existing(execution_id, "read_outcome")
        return record.info(), await self._result(record)

    async def _result(self, record: Record) -> bytes | None:
        """The result: in the record if it is small, otherwise in a key of its own."""
        small = record.fields.get("result")
        return small or await self._part(record.execution_id, keys.result, "GET")

    async def read_execution_context(self, execution_id: ExecutionId) -> contracts.ExecutionContext:
        record, tags = await asyncio.gather(
            self._record(execution_id), self.get_execution_tags(execution_id)
        )
        if record is None:
            raise invalid_input("execution_id", "no such execution")
        payload = record.fields.get("payload")
        if "payload_key" in record.fields:
            payload = await self._part(execution_id, keys.payload, "GET")
        encoding = record.text("payload_encoding", "")
        return contracts.ExecutionContext(payload or b"", record.execution_kind, tags, encoding)

    async def read_execution_policy(self, execution_id: ExecutionId) -> ExecutionPolicy:
        known, stored = await asyncio.gather(
            self._part(execution_id, keys.core, "EXISTS"),
            self._part(execution_id, keys.policy, "GET"),
        )
        if not known:
            raise NotFoundError("execution_not_found", op="read_execution_policy")
        try:
            return parse_policy(stored) or NO_POLICY
        except ValidationError as error:
            raise corrupt(execution_id, "policy", error.detail) from error

    async def get_execution_namespace(self, execution_id: ExecutionId) -> str | None:
        record = await self._record(execution_id)
        return None if record is None else record.namespace

    async def get_execution_tag(self, execution_id: ExecutionId, key: str) -> str | None:
        value = await self._part(execution_id, keys.tags, "HGET", check.text(key, "key"))
        return None if value is None else stored_text(value, execution_id, "tags")

    async def read_exec_core_fields(
        self, execution_id: ExecutionId, names: Sequence[str]
    ) -> dict[str, str | None]:
        names = check.texts(names, "names")
        record = await self._record(execution_id)
        known = {} if record is None else record.named_fields()
        return {name: known.get(name) for name in names}

    async def read_current_attempt_index(self, execution_id: ExecutionId) -> int:
        record = await self._record(execution_id)
        return 0 if record is None else record.current_attempt_index

    async def read_total_attempt_count(self, execution_id: ExecutionId) -> int:
        record = await self._record(execution_id)
        return 0 if record is None else record.total_attempt_count

    async def read_attempts(self, execution_id: ExecutionId) -> list[contracts.AttemptRecord]:
        record = await self._existing(execution_id, "read_attempts")
        eid = record.execution_id

        async def archived(index: int) -> Mapping[bytes, bytes]:
            key = keys.attempt(eid.tag, eid, index)
            return await self._calls.read(f"attempt {index} of {eid}: record", "HGETALL", key)

        indexes = range(record.total_attempt_count)
        return record.attempts(await asyncio.gather(*map(archived, indexes)))

    async def read_execution_history(self, execution_id: ExecutionId) -> list[Event]:
        eid = (await self._existing(execution_id, "read_execution_history")).execution_id
        entries = await self._part(eid, keys.history, "LRANGE", 0, -1)
        return [decode_history(eid.tag[1:-1], entry, eid) for entry in entries]

    async def explain_execution(self, execution_id: ExecutionId) -> contracts.WhyWaiting:
        record = await self._existing(execution_id, "explain_execution")
        vector, offered_to = record.state_vector, record.offered_to
        tag = record.execution_id.tag
        lane_key = keys.lane(tag, record.lane_id, "config")
        context = f"lane {record.lane_id} of {tag}"
        names = ("state", "reason", "reclaim_grace_ms")
        row = await self._calls.read(f"{context}: config", "HMGET", lane_key, *names)
        lane = Stored.from_row(context, names, row)
        join = join_snapshot(record.execution_id, record)
        required, near, unknown = frozenset(record.required_capabilities), None, None
        fleet: list[WorkerEntry] = []
        if vector.lifecycle_phase is not LifecyclePhase.TERMINAL:
            fleet = await self._workers.list_workers(None, limit=None)
        serving = _serving(record, fleet)
        kind, must_know = record.execution_kind, offered_to is not None
        knowing = [worker for worker in serving if worker.knows(kind, required=must_know)]
        if waits_for_worker(vector):
            near = least_missing(required, serving)
            unknown = kind if not knowing and (serving or must_know) else None
        blocking_reason, blocking_detail = _blocking(record, unknown, serving)
        able = [worker for worker in knowing if required.issubset(worker.capabilities)]
        suspension = await self._suspension(record)
        waitpoints = suspension.text("waitpoints", "")
        return contracts.WhyWaiting(
            public_state=record.public_state,
            blocking_reason=blocking_reason,
            blocking_detail=blocking_detail,
            since=record.last_transition_at,
            lane_state=lane.text("state", "active"),
            lane_reason=lane.text("reason", ""),
            retry_at=record.maybe_number("delay_until")
            or record.retry_at
            or _reclaimed_at(record, lane.number("reclaim_grace_ms", 0)),
            missing_capabilities=() if near is None else near.missing,
            closest_workers=() if near is None else near.closest,
            live_workers=None if near is None else near.workers,
            in_lane=sum(record.lane_id in worker.lanes and not worker.draining for worker in fleet),
            draining_workers=tuple(
                worker.worker_instance_id
                for worker in fleet
                if worker.draining and worker.is_for(record.lane_id, record.namespace)
            ),
            able_workers=tuple(worker.worker_instance_id for worker in able),
            unknown_task=unknown,
            offered_to=offered_to,
            unresolved_edges=0 if join is None else join.running_count,
            join=join,
            waitpoints=tuple(waitpoints.split(",")) if waitpoints else (),
            **question(suspension),
        )

    async def _suspension(self, record: Record) -> Stored:
        """What a suspended execution waits for, and its question; empty if it is not suspended."""
        names, row = ("waitpoints", "prompt", "details"), [None] * 3
        if record.public_state is PublicState.SUSPENDED:
            row = await self._part(record.execution_id, keys.suspension, "HMGET", *names)
        return Stored.from_row(record.execution_id, names, row)


def _reclaimed_at(record: Record, grace_ms: int) -> int | None:
    """When the lane lets another worker take over, if the execution lost its lease."""
    expired = OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    if not grace_ms or record.state_vector.ownership_state is not expired:
        return None
    return record.number("lease_expires_at") + grace_ms


def _serving(record: Record, fleet: Iterable[WorkerEntry]) -> list[WorkerEntry]:
    """The workers of the execution's lane and namespace that may get it."""
    return [worker for worker in fleet if worker.serves(record.lane_id, record.namespace)]


def _route_problem(record: Record, serving: Iterable[WorkerEntry]) -> str | None:
    """Why none of the workers can take the execution, if it has requirements."""
    required, kind = frozenset(record.required_capabilities), record.execution_kind
    must_know = record.offered_to is not None
    knowing = [worker for worker in serving if worker.knows(kind, required=must_know)]
    if must_know and not knowing:
        return f"no live worker knows task {kind}"
    if any(required.issubset(worker.capabilities) for worker in knowing):
        return None
    return "no connected worker satisfies required_capabilities" if required else None


def _blocking(
    record: Record, unknown_task: str | None, serving: Iterable[WorkerEntry]
) -> tuple[str, str]:
    """What it waits for, and the details. Records do not store that no worker can take it."""
    reason, problem = record.state_vector.blocking_reason, None
    if reason is BlockingReason.WAITING_FOR_WORKER:
        problem = _route_problem(record, serving)
        if unknown_task is not None:
            problem = f"no live worker knows task {unknown_task}"
    if problem is None:
        return reason.value, record.text("blocking_detail", "")
    return BlockingReason.WAITING_FOR_CAPABLE_WORKER.value, problem
