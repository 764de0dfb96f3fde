"""Waitpoints, which executions wait for, and the signals that answer them."""

from typing import Any, Protocol, TypedDict, Unpack

import msgspec

from flowfabric.core import ids
from flowfabric.core.conditions import OPERATOR
from flowfabric.core.contracts import suspension
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern

_DAY_MS = 86_400_000
_JSON = "json"
_MAX_PAYLOAD_BYTES = 65_536
_MAX_NAME_BYTES = 256
_MAX_FIELD_BYTES = 512


class LastWait(msgspec.Struct, frozen=True, kw_only=True):
    """The newest suspension of an execution, open or closed."""

    reason: str
    since: int
    until: int | None
    closed_at: int | None
    close_reason: str
    answers: list[suspension.ResumeSignal]
    """The signals that ended it."""
    prompt: str | None = None
    details: Any = None


class SignalOptions(TypedDict, total=False):
    """The options of a signal besides its payload."""

    signal_category: str
    source_type: str
    correlation_id: str
    idempotency_key: str
    """Signals with the same key count once."""
    target_scope: str
    signal_id: str | None
    created_at: int | None
    dedup_ttl_ms: int
    resume_delay_ms: int
    max_signals_per_execution: int | None
    signal_maxlen: int


class SentSignal(SignalOptions, total=False):
    """The payload and options of a signal."""

    payload: bytes | None
    payload_encoding: str | None


class BridgedSignal(SentSignal, total=False):
    """A signal forwarded by a bridge, with the sender that it claims."""

    source_identity: str


class Waitpoints(Concern, Protocol):
    """Waitpoints: what executions wait for, and the signals that arrived."""

    async def create_waitpoint(
        self,
        handle: Handle,
        waitpoint_key: str,
        expires_in_ms: int,
        *,
        prompt: str | None = None,
        details: Any = None,
    ) -> suspension.PendingWaitpoint:
        """Create a waitpoint that buffers signals until a suspension uses it; keeps the lease.

        `prompt` and `details` describe the question, as in `Suspensions.suspend`.
        """
        ...

    async def close_waitpoint(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        reason: str = "proactive_close",
        *,
        handle: Handle | None = None,
    ) -> bool:
        """Close a waitpoint; False if it was closed before. Workers pass their handle."""
        ...

    async def list_pending_waitpoints(
        self, execution_id: ExecutionId, after: str = "", limit: int = 100
    ) -> suspension.OpenWaitpoints:
        """Pending and active waitpoints by id, without their tokens."""
        ...

    async def read_last_wait(self, execution_id: ExecutionId) -> LastWait | None:
        """The newest suspension, open or closed; None if there was none."""
        ...

    async def observe_signals(self, handle: Handle) -> list[suspension.ResumeSignal]:
        """The signals that resumed this attempt, oldest first."""
        ...

    async def read_signal(
        self, execution_id: ExecutionId, signal_id: str, waitpoint_key: str | None = None
    ) -> suspension.ResumeSignal | None:
        """One accepted signal with its payload, or None if it was deleted."""
        ...

    async def read_waits(
        self, execution_id: ExecutionId, *wanted: str
    ) -> list[suspension.PastWait]:
        """The past waitpoints of the current run; a replay starts a new run.

        Includes the signals of the `wanted` keys, unless there are too many. A damaged record under
        one of these keys raises `corruption`; under any other key it is left out and logged.
        """
        ...

    async def read_wait_signals(
        self, execution_id: ExecutionId, wait: suspension.PastWait
    ) -> list[suspension.ResumeSignal]:
        """The signals that a waitpoint received, oldest first."""
        ...


class CheckedSignal(msgspec.Struct, frozen=True):
    """A signal whose form is correct; the store decides whether a waitpoint accepts it."""

    options: dict[str, Any]
    payload: bytes | None
    token: str | None = None
    """The waitpoint's token; None if the engine vouches for the sender."""
    signal_id: str | None = None


class Signals(Concern, Protocol):
    """Delivering signals, with a waitpoint's token or as an operator."""

    async def deliver_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        waitpoint_token: WaitpointToken | str,
        signal_name: str,
        *,
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        signal_category: str = "default",
        source_type: str = "external",
        source_identity: str = "",
        correlation_id: str = "",
        idempotency_key: str = "",
        target_scope: str = "waitpoint",
        signal_id: str | None = None,
        created_at: int | None = None,
        dedup_ttl_ms: int = _DAY_MS,
        resume_delay_ms: int = 0,
        max_signals_per_execution: int | None = None,
        signal_maxlen: int = 1000,
    ) -> suspension.SignalOutcome:
        """Deliver a signal to a waitpoint; resumes the execution if its condition is met.

        The token proves the right to answer, not who answers: `source_type` and
        `source_identity` are what the sender claims. `source_type="operator"` is refused, because
        only `deliver_approval_signal` vouches for a person.

        A payload labelled `json` must be JSON of at most 100 levels. Without a label, valid JSON
        gets this label and any other payload gets none.

        The last four options are for trusted callers. Pass none of them on behalf of a caller
        who only holds a waitpoint token.
        """
        if source_type == OPERATOR:
            raise invalid_input(
                "source_type", '"operator" is reserved: use deliver_approval_signal'
            )
        options: dict[str, Any] = {
            "name": signal_name,
            "category": signal_category,
            "source_type": source_type,
            "source_identity": source_identity,
            "correlation_id": correlation_id,
            "target_scope": check.one_of(target_scope, "target_scope", ("waitpoint", "execution")),
            "payload_encoding": _check(signal_name, payload, payload_encoding),
            "idempotency_key": idempotency_key,
            "resume_delay_ms": check.whole(resume_delay_ms, "resume_delay_ms", 0),
            "dedup_ttl_ms": check.whole(dedup_ttl_ms, "dedup_ttl_ms", 0),
            "maxlen": check.whole(signal_maxlen, "signal_maxlen", 1),
        }
        for field in ("source_type", "source_identity", "correlation_id", "idempotency_key"):
            ids.validate_text(options[field], field, limit=_MAX_FIELD_BYTES)
        ids.validate_text(signal_category, "signal_category", limit=_MAX_FIELD_BYTES)
        if created_at is not None:
            options["created_at"] = check.timestamp(created_at, "created_at")
        _limit(options, max_signals_per_execution)
        if signal_id is not None:
            ids.validate_uuid(signal_id, "signal_id")
        token = revealed(waitpoint_token, "waitpoint_token")
        signal = CheckedSignal(options, payload, token, signal_id)
        return await self._deliver(execution_id, waitpoint_id, signal)

    async def deliver_approval_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        signal_name: str,
        *,
        idempotency_suffix: str = "",
        decided_by: str = "",
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        lane_id: str = "",
        signal_dedup_ttl_ms: int = _DAY_MS,
        maxlen: int = 1000,
        max_signals_per_execution: int | None = None,
    ) -> suspension.SignalOutcome:
        """Deliver an operator's decision without a token. Authorise this call.

        The signal has the source type "operator" and the identity `decided_by`, which handlers
        and `CountKind.DISTINCT_OPERATORS` trust. Without a suffix, each `decided_by` decides once
        per signal name.
        """
        ids.validate_text(decided_by, "decided_by", limit=_MAX_FIELD_BYTES)
        ids.validate_text(idempotency_suffix, "idempotency_suffix", limit=_MAX_FIELD_BYTES)
        options: dict[str, Any] = {
            "name": signal_name,
            "category": "approval",
            "source_type": OPERATOR,
            "source_identity": decided_by,
            "correlation_id": "",
            "target_scope": "execution",
            "payload_encoding": _check(signal_name, payload, payload_encoding),
            "idempotency_key": f"approval:{signal_name}:{idempotency_suffix or decided_by}",
            "dedup_ttl_ms": check.whole(signal_dedup_ttl_ms, "signal_dedup_ttl_ms", 0),
            "maxlen": check.whole(maxlen, "maxlen", 1),
        }
        _limit(options, max_signals_per_execution)
        if check.text(lane_id, "lane_id"):
            options["lane"] = ids.validate_lane(lane_id)
        return await self._deliver(execution_id, waitpoint_id, CheckedSignal(options, payload))

    async def _deliver(
        self, execution_id: ExecutionId, waitpoint_id: str, signal: CheckedSignal
    ) -> suspension.SignalOutcome:
        """Store a signal whose form was checked."""
        ...

    async def read_waitpoint_token(
        self, execution_id: ExecutionId, waitpoint_id: str
    ) -> WaitpointToken | None:
        """The token of an open waitpoint, signed again if its key expired. Authorise this call."""
        ...

    async def verify_and_deliver(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        presented: WaitpointToken | str,
        signal_name: str,
        **options: Unpack[BridgedSignal],
    ) -> suspension.SignalOutcome:
        """`deliver_signal` for bridges: distinguishes an unknown waitpoint from a wrong token.

        Raises `waitpoint_token_not_found` without an open waitpoint, and `invalid_token` for
        another token. A public bridge must answer both alike. The engine checks the token again.
        """
        ...


def revealed(token: WaitpointToken | str, field: str) -> str:
    """The token's text; the engine checks its form."""
    return (
        token.reveal() if isinstance(token, WaitpointToken) else check.instance(token, str, field)
    )


def _limit(options: dict[str, Any], max_signals: int | None) -> None:
    if max_signals is not None:
        options["max_signals"] = check.whole(max_signals, "max_signals_per_execution", 0)


def _check(name: str, payload: bytes | None, encoding: str | None) -> str:
    """The label to store with the payload. A `json` payload must be decodable."""
    ids.validate_text(name, "signal_name", limit=_MAX_NAME_BYTES, required=True)
    ids.validate_text(encoding or "", "payload_encoding", limit=_MAX_FIELD_BYTES)
    if payload is None:
        return ""
    size = len(check.binary(payload, "payload"))
    if size > _MAX_PAYLOAD_BYTES:
        raise ValidationError(
            "payload_too_large", f"payload is {size} bytes long; the limit is {_MAX_PAYLOAD_BYTES}"
        )
    if encoding not in (None, _JSON):
        return encoding
    problem = check.json_problem(payload)
    if problem and encoding is not None:
        raise invalid_input("payload", f"{problem}. Send it with another payload_encoding.")
    return "" if problem else _JSON
