"""What a worker elsewhere does with an attempt besides completing it.

Every call can be repeated after a lost answer, and all but usage are fenced by the handle.
"""

from typing import Annotated, Any, Literal

import msgspec

from flowfabric.core.conditions import Condition, Single, parse_condition
from flowfabric.core.contracts import suspension
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import AppendOutcome, BestEffort, Frame
from flowfabric.core.contracts.suspension import FreshWaitpoint, ResumePolicy, UsePending
from flowfabric.core.ids import budget_id, derived_uuid
from flowfabric.engine.api.streams import AppendOptions
from flowfabric.engine.api.suspensions import TIMEOUT_BEHAVIORS
from flowfabric.server.bodies import I64, U32, U64, Byte, Uuid, payload_of, words
from flowfabric.server.calls import Call
from flowfabric.server.problems import invalid
from flowfabric.server.queries import NoQuery
from flowfabric.server.remote_claims import RemoteClaimBody
from flowfabric.server.routes.remote import (
    Attempted,
    EndingItems,
    RawItems,
    each_item,
    ended_items,
    rows_of,
    then_claim,
)
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import BulkAnswer, RemoteCompleted
from flowfabric.server.wire import Reply, encode, struct, tagged, variant

routes = Routes()
_FRAME_FIELDS = (
    *("frame_type", "kind", "encoding", "source", "correlation_id", "metadata_json", "ts"),
)
_ROWS: dict[int, Any] = {200: BulkAnswer}


class FailItem(Attempted, frozen=True, kw_only=True):
    """An attempt that failed; the stored policy decides on a retry."""

    reason: str
    category: str | None = None


class FailItems(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts that failed; with `claim`, the next ones are claimed in the same call."""

    items: list[FailItem]
    claim: RemoteClaimBody | None = None


@routes.post(
    "/v1/remote/fail",
    scope="remote",
    limit="bulk",
    documented=FailItems,
    answers={200: RemoteCompleted},
)
async def remote_fail(call: Call[EndingItems, NoQuery]) -> Reply:
    """Fail attempts; with `claim`, also claim the next ones. The claim does not wait.

    The result is `RetryScheduled` or `TerminalFailed`.
    """

    async def fail(item: FailItem, handle: Handle) -> Any:
        category = "transient" if item.category is None else item.category
        outcome = await call.backend.executions.fail(handle, item.reason, category)
        return variant(outcome, "cascade")

    return await then_claim(call, await rows_of(call, ended_items(call), FailItem, fail))


class DelayItem(Attempted, frozen=True, kw_only=True):
    """An attempt to resume later: at a time, or after a duration."""

    delay_until: I64 | None = None
    delay_ms: U64 | None = None


class DelayItems(msgspec.Struct, frozen=True):
    """Attempts to resume later."""

    items: list[DelayItem]


@routes.post("/v1/remote/delay", scope="remote", limit="bulk", documented=DelayItems, answers=_ROWS)
async def remote_delay(call: Call[RawItems, NoQuery]) -> Reply:
    """Release leases until a time; with 0, other workers resume the attempts at once."""

    async def delay(item: DelayItem, handle: Handle) -> Any:
        if (item.delay_until is None) == (item.delay_ms is None):
            raise invalid("delay_until, delay_ms", "send exactly one of them")
        until = await _at(call, item.delay_until, item.delay_ms)
        # The engine takes no time before 1970.
        return variant(await call.backend.executions.delay(handle, max(1, until or 0)))

    return await each_item(call, DelayItem, delay)


async def _at(call: Call[Any, Any], at: int | None, after_ms: int | None) -> int | None:
    """A time that may be given as a duration from the engine's now."""
    if after_ms is None:
        return at
    return await call.backend.meta.server_time_ms() + after_ms


class WaitpointBinding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A waitpoint to create, or with `pending` one that was created before."""

    waitpoint_id: Uuid
    waitpoint_key: str | None = None
    pending: bool | None = None

    @property
    def binding(self) -> FreshWaitpoint | UsePending:
        """As the engine takes it."""
        if self.pending:
            return UsePending(self.waitpoint_id)
        return FreshWaitpoint(self.waitpoint_id, self.waitpoint_key or "")


class SuspendItem(Attempted, frozen=True, kw_only=True):
    """What an attempt waits for: one signal on `waitpoint_key`, or a `condition`."""

    waitpoint_key: str | None = None
    signal_name: str | list[str] | None = None
    """Which signals end the wait; by default any."""
    condition: Any = None
    """As 05 §3 writes it, such as `{"Single":{…}}`."""
    waitpoints: list[WaitpointBinding] | None = None
    suspension_id: Uuid | None = None
    """A repeat with it gets the same waitpoints and tokens; by default, the same item is one."""
    reason_code: str | None = None
    timeout_at: I64 | None = None
    timeout_ms: U64 | None = None
    timeout_behavior: Annotated[str, words(TIMEOUT_BEHAVIORS)] | None = None
    resume_delay_ms: U64 | None = None
    prompt: str | None = None
    details: Any = None
    idempotency_key: str | None = None

    @property
    def until(self) -> Condition:
        """The condition that ends the wait."""
        if (self.condition is None) == (self.waitpoint_key is None):
            raise invalid("condition, waitpoint_key", "send exactly one of them")
        if self.condition is not None:
            return parse_condition(encode(self.condition))
        name = self.signal_name
        names = tuple(name) if isinstance(name, list) else name
        return Single(self.waitpoint_key or "", names)

    def identity(self, handle: Handle) -> str:
        """The id of the suspension; the same for a repeat under the same lease."""
        return self.suspension_id or derived_uuid(handle.lease_id, encode(self).decode())


class SuspendItems(msgspec.Struct, frozen=True):
    """What attempts wait for."""

    items: list[SuspendItem]


@routes.post(
    "/v1/remote/suspend", scope="remote", limit="bulk", documented=SuspendItems, answers=_ROWS
)
async def remote_suspend(call: Call[RawItems, NoQuery]) -> Reply:
    """Release leases until signals arrive. `AlreadySatisfied` means that you keep the lease.

    Otherwise, the result is `Suspended`, with the tokens that allow signals to the waitpoints.
    """

    async def suspend(item: SuspendItem, handle: Handle) -> Any:
        if item.timeout_at is not None and item.timeout_ms is not None:
            raise invalid("timeout_ms", "cannot be combined with timeout_at: send only one of them")
        given = item.waitpoints
        outcome = await call.backend.suspensions.suspend(
            handle,
            condition=item.until,
            waitpoints=None if given is None else [each.binding for each in given],
            suspension_id=item.identity(handle),
            reason_code="waiting_for_signal" if item.reason_code is None else item.reason_code,
            timeout_at=await _at(call, item.timeout_at, item.timeout_ms),
            timeout_behavior=item.timeout_behavior,
            resume_policy=ResumePolicy(resume_delay_ms=item.resume_delay_ms),
            prompt=item.prompt,
            details=item.details,
            idempotency_key=item.idempotency_key,
        )
        details = outcome.details
        fields: dict[str, Any] = {
            "suspension_id": details.suspension_id,
            "waitpoints": [
                struct(each) | {"waitpoint_token": each.waitpoint_token.reveal()}
                for each in details.waitpoints
            ],
        }
        if isinstance(outcome, suspension.AlreadySatisfiedSuspension):
            fields["closer_signal_id"] = outcome.closer_signal_id
        return tagged(outcome.kind, fields)

    reply = await each_item(call, SuspendItem, suspend)
    return msgspec.structs.replace(reply, headers=(("Cache-Control", "no-store"),))


class FrameBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One piece of output."""

    payload: list[Byte] | None = None
    payload_b64: bytes | None = None
    text: str | None = None
    """The payload as text, instead of bytes."""
    frame_type: str | None = None
    kind: str | None = None
    encoding: str | None = None
    source: str | None = None
    correlation_id: str | None = None
    metadata_json: str | None = None
    ts: U64 | None = None

    @property
    def frame(self) -> Frame:
        """As the engine takes it."""
        payload = payload_of(self.payload, self.payload_b64, "payload")
        if self.text is not None:
            if payload is not None:
                raise invalid("text", "cannot be combined with payload: send only one of them")
            payload = self.text.encode()
        given = {name: getattr(self, name) for name in _FRAME_FIELDS}
        fields = {name: value for name, value in given.items() if value is not None}
        return Frame(payload=payload or b"", **fields)


class FramesItem(Attempted, frozen=True, kw_only=True):
    """Output of an attempt, appended all or nothing."""

    frames: list[FrameBody]
    seq: U64
    """Number of the last frame, counted by the worker from `seq_base` of the claim. An item whose
    number is not above all earlier ones is a repeat and is not written."""
    mode: Literal["durable", "summary", "best_effort"] | None = None
    retention_maxlen: U32 | None = None
    ttl_ms: U32 | None = None
    """How long best-effort frames are kept."""


class FramesItems(msgspec.Struct, frozen=True):
    """Output of attempts."""

    items: list[FramesItem]


@routes.post(
    "/v1/remote/frames", scope="remote", limit="bulk", documented=FramesItems, answers=_ROWS
)
async def remote_frames(call: Call[RawItems, NoQuery]) -> Reply:
    """Append output to the streams of attempts."""

    async def append(item: FramesItem, handle: Handle) -> Any:
        options: AppendOptions = {"mode": item.mode or "durable", "seq": item.seq}
        if item.retention_maxlen is not None:
            options["retention_maxlen"] = item.retention_maxlen
        if item.ttl_ms is not None:
            options["best_effort"] = BestEffort(ttl_ms=item.ttl_ms)
        frames = [each.frame for each in item.frames]
        outcome: AppendOutcome = await call.backend.streams.append_frames(handle, frames, **options)
        return tagged("appended", struct(outcome))

    return await each_item(call, FramesItem, append)


class ProgressItem(Attempted, frozen=True, kw_only=True):
    """The progress of an attempt; fields that are not given stay unchanged."""

    pct: U32 | None = None
    message: str | None = None


class ProgressItems(msgspec.Struct, frozen=True):
    """The progress of attempts."""

    items: list[ProgressItem]


@routes.post(
    "/v1/remote/progress", scope="remote", limit="bulk", documented=ProgressItems, answers=_ROWS
)
async def remote_progress(call: Call[RawItems, NoQuery]) -> Reply:
    """Store the progress of attempts."""

    async def progress(item: ProgressItem, handle: Handle) -> Any:
        await call.backend.executions.progress(handle, item.pct, item.message)
        return "Ok"

    return await each_item(call, ProgressItem, progress)


class UsageItem(Attempted, frozen=True, kw_only=True):
    """What an attempt spent of a budget, which is named by its name or id."""

    budget: str
    dimensions: dict[str, U64]
    dedup_key: Annotated[str, msgspec.Meta(min_length=1)]
    """Names this usage within the budget. A repeat with the same key is not counted again."""
    namespace: str | None = None
    """Where the budget's name belongs; `default` if it is not given."""


class UsageItems(msgspec.Struct, frozen=True):
    """What attempts spent."""

    items: list[UsageItem]


@routes.post("/v1/remote/usage", scope="remote", limit="bulk", documented=UsageItems, answers=_ROWS)
async def remote_usage(call: Call[RawItems, NoQuery]) -> Reply:
    """Report usage of budgets.

    The result is `Ok`, `AlreadyApplied`, `SoftBreach` or `HardBreach`. The `action` of a breach is
    what the worker must do. Usage counts even if the lease is lost, because it was spent.
    """

    async def report(item: UsageItem, handle: Handle) -> Any:
        namespace = "default" if item.namespace is None else item.namespace
        call.check_namespace(namespace)
        outcome = await call.backend.budgets.report_usage(
            handle,
            budget_id(item.budget, namespace),
            item.dimensions,
            dedup_key=item.dedup_key or "",
        )
        return variant(outcome, "reserved")

    return await each_item(call, UsageItem, report)
