"""Submitting and inspecting executions."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self, TypedDict, Unpack

import msgspec

from flowfabric.core.closing import ClosedOnce
from flowfabric.core.contracts.executions import (
    Cancelled,
    CreateOutcome,
    ExecutionContext,
    ExecutionInfo,
    NewExecution,
)
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import (
    FlowFabricError,
    TransportError,
    ValidationError,
)
from flowfabric.core.ids import ExecutionId, validate_lane, validate_namespace
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.state import PublicState
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.executions import Executions
from flowfabric.engine.api.leases import Leases
from flowfabric.engine.api.listings import Listings
from flowfabric.engine.api.reads import Reads
from flowfabric.engine.valkey.connect import Place, open_backend
from flowfabric.sdk.client_signals import ClientSignals, engine_call
from flowfabric.sdk.event_feed import ClientEvents, EventFeed

_RETRY_S = 0.2
_SHOWN_CHARS = 200


class ExecutionOptions(TypedDict, total=False):
    """What may be set for an execution besides its kind and payload."""

    lane: str
    execution_id: ExecutionId | None
    payload_encoding: str
    priority: int | None
    creator_identity: str
    idempotency_key: str
    """Submissions with the same key create one execution."""
    tags: Mapping[str, str] | None
    policy: ExecutionPolicy | None
    delay_until: int | None
    delay_ms: int | None
    execution_deadline_at: int | None


class Outcome(msgspec.Struct, frozen=True):
    """How an execution ended."""

    execution_id: ExecutionId
    state: PublicState
    result: bytes | None
    result_encoding: str
    failure_reason: str | None
    failure_category: str | None
    attempts: int


class RunError(FlowFabricError):
    """The execution did not end with a result; `info` holds what is known about it."""

    def __init__(self, info: ExecutionInfo) -> None:
        super().__init__(info)
        self.info = info

    def _reason(self) -> str:
        reason = self.info.failure_reason or self.info.cancellation_reason or "no reason given"
        # Where it happened follows on further lines, in `info.failure_reason`.
        return reason.partition("\n")[0]

    def __repr__(self) -> str:
        info, reason = self.info, self._reason()
        brief = reason if len(reason) <= _SHOWN_CHARS else f"{reason[:_SHOWN_CHARS]}…"
        return f"{type(self).__name__}({info.execution_id}, {info.public_state.value}: {brief})"

    def __str__(self) -> str:
        info, reason = self.info, self._reason()
        count = info.total_attempt_count
        attempts = f"{count} attempt{'' if count == 1 else 's'}"
        return f"{info.execution_kind} {info.public_state.value} after {attempts}: {reason}"


class NotFinished(RunError):
    """The execution has not ended yet."""

    def __str__(self) -> str:
        return f"{self.info.execution_kind} is {self.info.public_state.value}, not finished."


class ExecutionFailed(RunError):
    """The execution failed for good."""


class ExecutionExpired(RunError):
    """The execution ran out of time."""


class ExecutionCancelled(RunError):
    """The execution was cancelled."""


_ERRORS: dict[PublicState, type[RunError]] = {
    PublicState.FAILED: ExecutionFailed,
    PublicState.EXPIRED: ExecutionExpired,
    PublicState.CANCELLED: ExecutionCancelled,
    PublicState.SKIPPED: ExecutionCancelled,
}


class Client(ClientSignals, ClientEvents, ClosedOnce):
    """Submits work and follows it. Async; `SyncClient` is the same for ordinary code.

    >>> async with await Client.connect("valkey://127.0.0.1:6379") as client:
    ...     created = await client.submit("resize", b'{"width": 80}')
    ...     print(await client.result(created.execution_id))
    """

    def __init__(self, backend: Backend, namespace: str = "default") -> None:
        self.backend = backend
        self.namespace = namespace
        self._events = backend.events
        self._feeds: weakref.WeakSet[EventFeed[Any]] = weakref.WeakSet()

    @classmethod
    async def connect(cls, place: Place, namespace: str = "default") -> Self:
        """A client of the deployment at an address or url."""
        namespace = validate_namespace(namespace)
        return cls(await open_backend(place), namespace)

    def new_execution(
        self, kind: str, payload: bytes = b"", **options: Unpack[ExecutionOptions]
    ) -> NewExecution:
        """One execution to submit, with an id minted for its lane unless one is given."""
        fields: dict[str, Any] = dict(options)
        lane = fields.pop("lane", "default")
        execution_id = fields.pop("execution_id", None)
        if fields.get("tags", ()) is None:
            del fields["tags"]
        if execution_id is None:
            execution_id = ExecutionId.solo(validate_lane(lane, "lane"), self.backend.counts)
        return NewExecution(
            execution_id=ExecutionId.parse(execution_id).check_partition(self.backend.counts),
            execution_kind=kind,
            input_payload=payload,
            lane_id=lane,
            namespace=self.namespace,
            **fields,
        )

    async def submit(
        self, kind: str, payload: bytes = b"", **options: Unpack[ExecutionOptions]
    ) -> CreateOutcome:
        """Submit one execution; with an idempotency key or a fixed id at most once."""
        new = self.new_execution(kind, payload, **options)
        return await self.backend.executions.create_execution(new)

    submit_many = engine_call("executions", Executions.create_many)
    inspect = engine_call("reads", Reads.describe_execution)
    replay = engine_call("executions", Executions.replay_execution)
    revoke_lease = engine_call("leases", Leases.revoke_lease)
    change_priority = engine_call("executions", Executions.change_priority)
    list = engine_call("listings", Listings.list_executions)

    async def wait(self, execution_id: ExecutionId, timeout: Duration | None = None) -> Outcome:
        """Wait until the execution has ended, without polling."""
        if timeout is None:
            return await self._ended(execution_id)
        limit = asyncio.timeout(to_ms(timeout, "timeout") / 1000)
        try:
            async with limit:
                return await self._ended(execution_id)
        except TimeoutError:
            if not limit.expired():
                raise
        given = f"{timeout:g} s" if isinstance(timeout, (int, float)) else str(timeout)
        raise TimeoutError(f"Execution {execution_id} did not finish within {given}.")

    async def _ended(self, execution_id: ExecutionId) -> Outcome:
        known = False
        while True:
            try:
                await self.backend.events.wait_ended(execution_id)
                known = True
                info, result = await self.backend.reads.read_outcome(execution_id)
            except TransportError as error:
                # The execution is known to exist: wait through an outage.
                if not known or not error.retryable or self.closed:
                    raise
                await asyncio.sleep(_RETRY_S)
                continue
            # A replay may have started it again between the event and the read.
            if info.completed_at is not None:
                return _outcome(info, result)

    async def result(
        self, execution_id: ExecutionId, timeout: Duration | None = None
    ) -> bytes | None:
        """Wait for the result bytes; an execution that ended otherwise raises its `RunError`."""
        return (await self.success(execution_id, timeout)).result

    async def success(self, execution_id: ExecutionId, timeout: Duration | None = None) -> Outcome:
        """Wait for a successful end; any other raises its `RunError`."""
        outcome = await self.wait(execution_id, timeout)
        if outcome.state is PublicState.COMPLETED:
            return outcome
        raise _ERRORS[outcome.state](await self.backend.reads.read_execution_info(execution_id))

    async def result_now(self, execution_id: ExecutionId) -> bytes | None:
        """The result bytes without waiting; `NotFinished` when it has not ended."""
        info, result = await self.backend.reads.read_outcome(execution_id)
        if info.public_state is PublicState.COMPLETED:
            return result
        raise _ERRORS.get(info.public_state, NotFinished)(info)

    async def cancel(self, execution_id: ExecutionId, reason: str = "") -> Cancelled:
        """Cancel from any phase; a running handler learns of it with its next renewal."""
        return await self.backend.executions.cancel_execution(execution_id, reason)

    async def read_context(self, execution_id: ExecutionId) -> ExecutionContext | None:
        """Payload, kind and tags, or None when there is no such execution."""
        try:
            return await self.backend.reads.read_execution_context(execution_id)
        except ValidationError:
            if await self.backend.reads.describe_execution(execution_id) is None:
                return None
            raise

    def mint(self, lane: str, count: int) -> Iterable[ExecutionId]:
        """New ids for executions of a lane."""
        return ExecutionId.mint_solo_many(lane, self.backend.counts, count)

    async def _close(self) -> None:
        """Close every connection; calls still waiting fail."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.backend.aclose)
            for feed in list(self._feeds):
                closing.push_async_callback(feed.aclose)


def _outcome(info: ExecutionInfo, result: bytes | None) -> Outcome:
    return Outcome(
        info.execution_id,
        info.public_state,
        result,
        info.result_encoding,
        info.failure_reason or info.cancellation_reason,
        info.failure_category,
        info.total_attempt_count,
    )
