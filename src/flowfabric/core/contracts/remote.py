"""Claims as a server hands them to workers over HTTP."""

from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from flowfabric.core.contracts.flows import NO_INPUTS, FlowInput, FlowInputs
from flowfabric.core.contracts.leases import Claim, Handle, HandleKind, ResumeCause
from flowfabric.core.contracts.steps import (
    NO_STEPS,
    StepError,
    StepKind,
    StepPage,
    StepRecord,
    StepStatus,
)
from flowfabric.core.contracts.suspension import ResumeSignal
from flowfabric.core.ids import ExecutionId

_NO_INPUTS: dict[str, "RemoteInput"] = {}


class RemoteInput(msgspec.Struct, frozen=True):
    """The outcome and result of an upstream in the flow."""

    execution_id: ExecutionId
    outcome: str
    result_b64: bytes | None
    encoding: str


class RemoteSignal(msgspec.Struct, frozen=True, kw_only=True):
    """A signal that ended the wait before this lease."""

    signal_id: str
    waitpoint_key: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: int
    payload_b64: bytes | None
    payload_encoding: str

    @classmethod
    def of(cls, signal: ResumeSignal) -> Self:
        """A signal of the engine, to be sent."""
        fields = msgspec.structs.asdict(signal)
        return cls(payload_b64=fields.pop("payload"), **fields)


class RemoteStep(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded step of the execution."""

    step_key: str
    seq: int
    kind: StepKind
    status: StepStatus
    codec: str
    result_b64: bytes | None
    error: StepError | None
    attempt_index: int
    lease_epoch: int
    started_at: int
    finished_at: int | None
    fire_at: int | None
    child_execution_id: ExecutionId | None

    @classmethod
    def of(cls, step: StepRecord) -> Self:
        """A record of the engine, to be sent."""
        fields = msgspec.structs.asdict(step)
        return cls(result_b64=fields.pop("result"), **fields)

    @property
    def record(self) -> StepRecord:
        """The record of the engine that was received."""
        fields = msgspec.structs.asdict(self)
        return StepRecord(result=fields.pop("result_b64"), **fields)


class RemoteClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed attempt with everything its handler needs."""

    handle: bytes
    """Opaque; every call about the attempt sends it back. It is a credential."""
    execution_id: ExecutionId
    execution_kind: str
    lane_id: str
    namespace: str
    attempt_index: int
    attempt_type: str
    seq_base: int
    """Number the frames of this lease upwards from here; the first one is `seq_base + 1`."""
    kind: HandleKind
    """`fresh`, `resumed` or `reclaimed`."""
    payload_b64: bytes
    payload_encoding: str
    tags: Mapping[str, str]
    lease_ttl_ms: int
    lease_expires_at: int
    attempt_timeout_ms: int | None
    """The time left for the attempt."""
    execution_deadline_at: int | None
    resume_cause: ResumeCause | None
    """Why the attempt continues after a suspension."""
    signals: Sequence[RemoteSignal]
    """The signals that ended the suspension."""
    flow_id: str | None
    inputs: Mapping[str, RemoteInput]
    """The results of upstreams in the flow, by input name."""
    fired_by: ExecutionId | None
    """The upstream that decided an any_of or quorum."""
    steps: Sequence[RemoteStep]
    """The first recorded steps of the execution."""
    steps_after: int | None
    """The `seq` after which there are more steps; null if there are none."""
    quota_policy_id: str | None

    @classmethod
    def of(cls, claim: Claim, signals: Sequence[ResumeSignal] = ()) -> Self:
        """A claim of the engine, to be sent, and the signals that resumed the attempt."""
        handle, given = claim.handle, claim.inputs
        return cls(
            handle=handle.opaque,
            execution_id=handle.execution_id,
            execution_kind=claim.execution_kind,
            lane_id=handle.lane_id,
            namespace=claim.namespace,
            attempt_index=handle.attempt_index,
            attempt_type=claim.attempt_type,
            seq_base=handle.seq_base,
            kind=handle.kind,
            payload_b64=claim.input_payload,
            payload_encoding=claim.payload_encoding,
            tags=claim.tags,
            lease_ttl_ms=handle.lease_ttl_ms,
            lease_expires_at=claim.lease_expires_at,
            attempt_timeout_ms=claim.attempt_timeout_ms,
            execution_deadline_at=claim.execution_deadline_at,
            resume_cause=claim.resume_cause,
            signals=[RemoteSignal.of(each) for each in signals],
            flow_id=claim.flow_id,
            inputs=_NO_INPUTS if given is NO_INPUTS else _sent(given),
            fired_by=given.fired_by,
            steps=[RemoteStep.of(each) for each in claim.steps.steps],
            steps_after=claim.steps.next_after_seq,
            quota_policy_id=claim.quota_policy_id,
        )

    @property
    def claim(self) -> Claim:
        """The claim of the engine that was received."""
        inputs = NO_INPUTS
        if self.inputs or self.fired_by is not None:
            inputs = FlowInputs(
                {
                    name: FlowInput(each.execution_id, each.outcome, each.result_b64, each.encoding)
                    for name, each in self.inputs.items()
                },
                self.fired_by,
            )
        return Claim(
            handle=Handle.decode(self.handle, self.kind),
            execution_kind=self.execution_kind,
            attempt_type=self.attempt_type,
            input_payload=self.payload_b64,
            payload_encoding=self.payload_encoding,
            tags=self.tags,
            namespace=self.namespace,
            lease_expires_at=self.lease_expires_at,
            attempt_timeout_ms=self.attempt_timeout_ms,
            execution_deadline_at=self.execution_deadline_at,
            resume_cause=self.resume_cause,
            flow_id=self.flow_id,
            inputs=inputs,
            steps=self._steps,
            quota_policy_id=self.quota_policy_id,
        )

    @property
    def _steps(self) -> StepPage:
        if not self.steps and self.steps_after is None:
            return NO_STEPS
        return StepPage(tuple(each.record for each in self.steps), self.steps_after)


def _sent(given: FlowInputs) -> dict[str, RemoteInput]:
    return {
        name: RemoteInput(each.execution_id, each.outcome, each.result, each.encoding)
        for name, each in given.inputs.items()
    }


class RemoteClaims(msgspec.Struct, frozen=True):
    """The answer to a claim over HTTP."""

    claims: Sequence[RemoteClaim]
    draining: bool = False
    """An operator is draining the worker: finish running tasks and claim nothing more."""
    unknown_tasks: Sequence[str] = ()
    """The tasks that the worker does not know and that were left to others."""
    waited_ms: int = 0
    """How long after the request the claims were made; negative for those of an earlier request."""
