"""Submitting and inspecting executions."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self, cast

import msgspec

from flowfabric.core.closing import ClosedOnce
from flowfabric.core.contracts.executions import (
    Cancelled,
    CreateOutcome,
    ExecutionContext,
    ExecutionInfo,
    ExecutionPage,
    ExecutionSnapshot,
    NewExecution,
    PriorityChanged,
    Replayed,
)
from flowfabric.core.contracts.leases import RevokeOutcome
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import (
    EngineError,
    FlowFabricError,
    TransportError,
    ValidationError,
    invalid_input,
)
from flowfabric.core.ids import ExecutionId, validate_lane, validate_namespace
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.state import PublicState
from flowfabric.core.tags import validate_creation_tags
from flowfabric.engine.api.listings import Filter
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.connect import Place, open_backend
from flowfabric.sdk.client_signals import ClientSignals
from flowfabric.sdk.event_feed import ClientEvents, EventFeed

_RETRY_S = 0.2
_SHOWN_CHARS = 200


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
    """The execution did not end with a result. `info` tells all about it."""

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
        return f"{self.info.execution_kind} is {self.info.public_state.value}: wait for it"


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

    def __init__(self, backend: ValkeyBackend, namespace: str = "default") -> None:
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
        self,
        kind: str,
        payload: bytes = b"",
        *,
        lane: str = "default",
        execution_id: ExecutionId | None = None,
        **fields: Any,
    ) -> NewExecution:
        """One execution to submit, with an id minted for its lane unless one is given."""
        _check_fields(fields)
        if execution_id is None:
            execution_id = ExecutionId.solo(validate_lane(lane, "lane"), self.backend.counts)
        return NewExecution(
            execution_id=self.backend.calls.checked(execution_id),
            execution_kind=kind,
            input_payload=payload,
            lane_id=lane,
            namespace=self.namespace,
            **fields,
        )

    async def submit(
        self,
        kind: str,
        payload: bytes = b"",
        *,
        lane: str = "default",
        payload_encoding: str = "",
        priority: int | None = None,
        creator_identity: str = "",
        idempotency_key: str = "",
        tags: Mapping[str, str] | None = None,
        policy: ExecutionPolicy | None = None,
        delay_until: int | None = None,
        delay_ms: int | None = None,
        execution_deadline_at: int | None = None,
        execution_id: ExecutionId | None = None,
    ) -> CreateOutcome:
        """Submit one execution; with an idempotency key or a fixed id at most once."""
        new = self.new_execution(
            kind,
            payload,
            lane=lane,
            execution_id=execution_id,
            payload_encoding=payload_encoding,
            priority=priority,
            creator_identity=creator_identity,
            idempotency_key=idempotency_key,
            tags={} if tags is None else tags,
            policy=policy,
            delay_until=delay_until,
            delay_ms=delay_ms,
            execution_deadline_at=execution_deadline_at,
        )
        return await self.backend.executions.create_execution(new)

    async def submit_many(self, items: Sequence[NewExecution]) -> list[CreateOutcome | EngineError]:
        """Submit many in few round trips; answers stand in input order."""
        return await self.backend.executions.create_many(items)

    async def inspect(self, execution_id: ExecutionId) -> ExecutionSnapshot | None:
        """A snapshot, or None when it never existed or was trimmed."""
        return await self.backend.reads.describe_execution(execution_id)

    async def wait(self, execution_id: ExecutionId, timeout: Duration | None = None) -> Outcome:
        """Wait until the execution has ended; the end is pushed, not polled for."""
        execution_id = self.backend.calls.checked(execution_id)
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
        raise TimeoutError(f"{execution_id} has not ended within {given}")

    async def _ended(self, execution_id: ExecutionId) -> Outcome:
        known = False
        while True:
            try:
                await self.backend.events.wait_ended(execution_id)
                known = True
                info, result = await self.backend.reads.read_outcome(execution_id)
            except TransportError as error:
                # Once it was seen, an outage of the server does not end the wait.
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
        info, result = await self.backend.reads.read_outcome(
            self.backend.calls.checked(execution_id)
        )
        if info.public_state is PublicState.COMPLETED:
            return result
        raise _ERRORS.get(info.public_state, NotFinished)(info)

    async def cancel(self, execution_id: ExecutionId, reason: str = "") -> Cancelled:
        """Cancel from any phase; a running handler learns of it with its next renewal."""
        return await self.backend.executions.cancel_execution(execution_id, reason)

    async def replay(
        self,
        execution_id: ExecutionId,
        reason: str = "",
        *,
        requested_by: str = "",
        expected_replay_count: int | None = None,
        keep_steps: bool = False,
    ) -> Replayed:
        """Rerun a finished execution under the same id.

        With `expected_replay_count`, raises `replay_not_allowed` unless it was replayed exactly
        that often, so that a repeated call does not replay twice. `keep_steps` keeps the results
        of its steps.
        """
        return await self.backend.executions.replay_execution(
            execution_id,
            reason=reason,
            requested_by=requested_by,
            expected_replay_count=expected_replay_count,
            keep_steps=keep_steps,
        )

    async def revoke_lease(
        self,
        execution_id: ExecutionId,
        *,
        expected_lease_id: str = "",
        reason: str = "operator",
        revoked_by: str = "operator",
    ) -> RevokeOutcome:
        """Take the lease from the worker that holds it; another worker continues the attempt.

        With `expected_lease_id`, raises `stale_lease` if another lease is held by now.
        """
        return await self.backend.leases.revoke_lease(
            execution_id,
            expected_lease_id=expected_lease_id,
            reason=reason,
            revoked_by=revoked_by,
        )

    async def change_priority(self, execution_id: ExecutionId, priority: int) -> PriorityChanged:
        """Move an execution that is not running yet forward or back."""
        return await self.backend.executions.change_priority(execution_id, priority)

    async def read_context(self, execution_id: ExecutionId) -> ExecutionContext | None:
        """Payload, kind and tags, or None when there is no such execution."""
        try:
            return await self.backend.reads.read_execution_context(execution_id)
        except ValidationError:
            if await self.backend.reads.describe_execution(execution_id) is None:
                return None
            raise

    async def list(
        self, *, cursor: str = "", limit: int = 50, where: Filter | None = None
    ) -> ExecutionPage:
        """Executions, page by page."""
        return await self.backend.listings.list_executions(cursor=cursor, limit=limit, where=where)

    def mint(self, lane: str, count: int) -> Iterable[ExecutionId]:
        """New ids for executions of a lane."""
        return ExecutionId.mint_solo_many(lane, self.backend.counts, count)

    async def _close(self) -> None:
        """Close every connection; who still waits gets an error."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.backend.aclose)
            for feed in list(self._feeds):
                closing.push_async_callback(feed.aclose)


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse what would be taken for something else, or fail somewhere deep inside."""
    tags: object = fields.get("tags")
    if tags is not None and not tags:
        # The engine looks at tags when there are any; an empty text is not "no tags".
        validate_creation_tags(cast("Mapping[str, str]", tags))
    policy: object = fields.get("policy")
    if policy is not None and not isinstance(policy, ExecutionPolicy):
        problem = f"must be an ExecutionPolicy, got {type(policy).__name__}: parse_policy makes one"
        raise invalid_input("policy", problem, undecodable=True)
    for name in ("payload_encoding", "creator_identity", "idempotency_key"):
        value: object = fields.get(name, "")
        if not isinstance(value, str):
            problem = f"must be text, got {type(value).__name__}"
            raise invalid_input(name, problem, undecodable=True)


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
