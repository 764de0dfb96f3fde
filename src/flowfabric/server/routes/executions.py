"""Creating and changing executions (10 §3.1)."""

import msgspec

from flowfabric.core.contracts import executions as contracts
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import Dependency
from flowfabric.core.contracts.leases import AlreadySatisfied, Fence, Revoked
from flowfabric.core.contracts.suspension import Resumed
from flowfabric.core.errors import NotFoundError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.backend import Backend
from flowfabric.server import bodies
from flowfabric.server.bodies import (
    I32,
    I64,
    U16,
    U32,
    U64,
    EdgeKind,
    LaneName,
    Numbers,
    OfExecution,
    PolicyObject,
    Uuid,
)
from flowfabric.server.calls import Call
from flowfabric.server.problems import invalid, not_json, problem_of
from flowfabric.server.queries import NoQuery, split, whole
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import RAW, Counted, variants
from flowfabric.server.wire import Reply, answer, tagged, variant

routes = Routes()
_ENGINE_SOURCES = ("flow_cascade", "system_timeout")
_PAYLOADS = ("input_payload", "input_payload_b64")


class DependsOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An edge from an existing member of the flow to the new one."""

    upstream: ExecutionId
    kind: EdgeKind | None = None
    input_name: str | None = None
    data_passing_ref: str | None = None
    edge_id: Uuid | None = None

    def dependency(self, counts: PartitionCounts) -> Dependency:
        """The edge as the engine takes it, which checks the kind."""
        return Dependency(
            upstream=self.upstream.check_partition(counts),
            kind=self.kind or "success_only",  # pyright: ignore[reportArgumentType]
            input_name=self.input_name or "",
            data_passing_ref=self.data_passing_ref or "",
            edge_id=self.edge_id or "",
        )


class CreateExecution(msgspec.Struct, frozen=True, kw_only=True):
    """One execution to create."""

    namespace: str
    execution_kind: str
    lane_id: LaneName | None = None
    execution_id: ExecutionId | None = None
    partition_id: U16 | None = None
    input_payload: Numbers = msgspec.UNSET
    input_payload_b64: bytes | None = None
    payload_encoding: str | None = None
    priority: I32 | None = None
    creator_identity: str | None = None
    idempotency_key: str | None = None
    tags: dict[str, str] = {}
    policy: PolicyObject | None = None
    delay_until: I64 | None = None
    execution_deadline_at: I64 | None = None
    flow_id: Uuid | None = None
    depends_on: list[DependsOn] = []

    def new(self, backend: Backend, payload: bytes | None = None) -> NewExecution:
        """The execution as the engine takes it; `payload` is that of a raw upload."""
        if payload is None:
            given = bodies.payload_of(self.input_payload, self.input_payload_b64, _PAYLOADS[0])
            payload = given or b""
        execution_id, shards = self._identity(backend)
        if self.partition_id is not None and self.partition_id != execution_id.partition:
            raise invalid("partition_id", "differs from the partition of execution_id")
        return NewExecution(
            execution_id=execution_id,
            execution_kind=self.execution_kind,
            input_payload=payload,
            payload_encoding=self.payload_encoding or "",
            namespace=self.namespace,
            lane_id=self.lane_id or "default",
            priority=self.priority,
            creator_identity=self.creator_identity or "",
            idempotency_key=self.idempotency_key or "",
            tags=self.tags,
            policy=None if self.policy is None else self.policy.policy,
            delay_until=self.delay_until,
            execution_deadline_at=self.execution_deadline_at,
            flow_id=self.flow_id,
            depends_on=tuple(each.dependency(backend.counts) for each in self.depends_on),
            shards=shards,
        )

    def _identity(self, backend: Backend) -> tuple[ExecutionId, int]:
        """The id, and over how many partitions its lane is spread if the id was minted for it."""
        if self.execution_id is not None:
            return self.execution_id.check_partition(backend.counts), 0
        if self.flow_id is not None:
            minted = ExecutionId.deterministic_for_flow(self.flow_id, new_uuid(), backend.counts)
            return minted, 0
        lane, key = self.lane_id or "default", self.idempotency_key
        shards = backend.places.shards(lane)
        named = (self.namespace, key) if key else None
        return ExecutionId.solo(lane, backend.counts, shards, named), shards


@routes.post(
    "/v1/executions",
    scope="submit",
    limit="large",
    documented=CreateExecution,
    forms=(RAW,),
    answers={201: variants(contracts.Created), 200: variants(contracts.Duplicate)},
    errors=(404, 409),
)
async def create_execution(call: Call[bytes, NoQuery]) -> Reply:
    """Create an execution.

    Send JSON, or the payload itself as `application/octet-stream` with the other fields as query
    parameters. 200 means that the idempotency key or the id was used before.
    """
    content_type = call.request.headers.get(b"content-type")
    payload = None
    if bodies.is_json(content_type):
        wanted = bodies.decode(call.body, CreateExecution)
    elif (content_type or b"").partition(b";")[0].strip().lower() == RAW.encode():
        wanted, payload = _from_query(call.request.query), call.body
    else:
        raise not_json(415)
    call.check_namespace(wanted.namespace)
    if wanted.flow_id is not None:
        await call.visible_flow(wanted.flow_id)
    if wanted.execution_id is None and wanted.flow_id is None:
        await call.backend.places.learn_lane(wanted.lane_id or "default")
    new = wanted.new(call.backend, payload)
    try:
        return created(await call.backend.executions.create_execution(new))
    except NotFoundError as error:
        raise problem_of(error, new.flow_id or "") from error


def created(outcome: contracts.CreateOutcome) -> Reply:
    """The answer to a create."""
    if isinstance(outcome, contracts.Created):
        return answer({"Created": outcome}, 201)
    return answer({"Duplicate": outcome})


def _from_query(raw: bytes) -> CreateExecution:
    fields: dict[str, object] = {}
    for name, value in split(raw):
        if name in ("tags", "policy", "depends_on"):
            try:
                fields[name] = msgspec.json.decode(value)
            except (msgspec.MsgspecError, RecursionError):
                raise invalid(name, "must be JSON") from None
        elif name in ("partition_id", "priority", "delay_until", "execution_deadline_at"):
            fields[name] = whole(name, value)
        elif name not in _PAYLOADS:
            fields[name] = value
    try:
        return msgspec.convert(fields, CreateExecution, dec_hook=bodies.decode_field)
    except msgspec.ValidationError as error:
        raise bodies.refusal(error, in_query=True) from None


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Why an execution is cancelled, and by whom."""

    execution_id: ExecutionId
    reason: str
    source: str | None = None
    lease_id: Uuid | None = None
    lease_epoch: U64 | None = None
    attempt_id: Uuid | None = None

    def check_source(self) -> str:
        """The source, unless only the engine itself may use it."""
        source = self.source or "operator_override"
        if source in _ENGINE_SOURCES:
            raise invalid("source", f"{source!r} is reserved for the engine")
        return source

    @property
    def fence(self) -> Fence:
        """What proves the lease."""
        return Fence(self.lease_id or "", self.lease_epoch, self.attempt_id or "")


@routes.post(
    "/v1/executions/{id}/cancel",
    scope="operate",
    answers={200: variants(contracts.Cancelled, omit=("cascade",))},
    errors=(404, 409),
)
async def cancel_execution(call: Call[CancelRequest, NoQuery]) -> Reply:
    """Cancel an execution that has not ended."""
    execution_id = call.execution_id()
    source = call.body.check_source()
    await call.visible(execution_id)
    outcome = await call.backend.executions.cancel_execution(
        execution_id, call.body.reason, source=source, fence=call.body.fence
    )
    return answer(variant(outcome, "cascade"))


class ChangePriority(OfExecution, frozen=True, kw_only=True):
    """The new priority of an execution."""

    new_priority: I32


@routes.put(
    "/v1/executions/{id}/priority",
    scope="operate",
    answers={200: variants(contracts.PriorityChanged)},
    errors=(404, 409),
)
async def change_priority(call: Call[ChangePriority, NoQuery]) -> Reply:
    """Change the priority of an execution that is not running yet."""
    execution_id = await call.execution()
    executions = call.backend.executions
    return answer(variant(await executions.change_priority(execution_id, call.body.new_priority)))


class ReplayRequest(OfExecution, frozen=True, kw_only=True):
    """How an execution is replayed."""

    reason: str | None = None
    requested_by: str | None = None
    expected_replay_count: U32 | None = None
    strict: bool | None = None
    reopen_downstream: bool | None = None
    include_completed: bool | None = None
    keep_steps: bool | None = None


@routes.post(
    "/v1/executions/{id}/replay",
    scope="operate",
    optional_body=True,
    answers={200: variants(contracts.Replayed)},
    errors=(404, 409),
)
async def replay_execution(call: Call[ReplayRequest, NoQuery]) -> Reply:
    """Rerun a finished execution under the same id."""
    execution_id, body = await call.execution(), call.body
    outcome = await call.backend.executions.replay_execution(
        execution_id,
        body.reason or "",
        requested_by=body.requested_by or "",
        expected_replay_count=body.expected_replay_count,
        keep_steps=bool(body.keep_steps),
        strict=bool(body.strict),
        reopen_downstream=bool(body.reopen_downstream),
        include_completed=bool(body.include_completed),
    )
    return answer(variant(outcome))


@routes.post(
    "/v1/executions/{id}/revoke-lease",
    scope="operate",
    answers={200: variants(Revoked, AlreadySatisfied, texts=("lease_epoch",))},
    errors=(404,),
)
async def revoke_lease(call: Call[None, NoQuery]) -> Reply:
    """Revoke the lease of a running execution; another worker continues it."""
    outcome = await call.backend.leases.revoke_lease(
        await call.execution(), reason="operator_revoke", revoked_by="operator"
    )
    if isinstance(outcome, Revoked):
        return answer(variant(outcome, lease_epoch=str(outcome.lease_epoch)))
    return answer(variant(outcome))


class ResumeRequest(OfExecution, frozen=True, kw_only=True):
    """How an operator resumes a suspended execution."""

    trigger_type: str | None = None
    resume_delay_ms: U64 | None = None


@routes.post(
    "/v1/executions/{id}/resume",
    scope="operate",
    optional_body=True,
    answers={200: variants(Resumed)},
    errors=(404, 409),
)
async def resume_execution(call: Call[ResumeRequest, NoQuery]) -> Reply:
    """Resume a suspended execution, even if its condition is not met."""
    outcome = await call.backend.suspensions.resume_execution(
        await call.execution(),
        trigger_type="operator" if call.body.trigger_type is None else call.body.trigger_type,
        resume_delay_ms=call.body.resume_delay_ms or 0,
    )
    return answer(variant(outcome))


@routes.put("/v1/executions/{id}/tags", scope="submit", answers={200: Counted}, errors=(404,))
async def set_tags(call: Call[dict[str, str], NoQuery]) -> Reply:
    """Add or replace tags."""
    execution_id = await call.execution()
    count = await call.backend.executions.set_execution_tags(execution_id, call.body)
    return answer(tagged("ok", {"count": count}))
