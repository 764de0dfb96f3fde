"""Submitting executions, following them and answering their waits."""

import asyncio
import functools
import logging
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Literal, ParamSpec, Self, TypeVar, Unpack

import msgspec

from flowfabric.core.contracts import executions, streams, suspension
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import (
    FlowFabricError,
    NotFoundError,
    StateError,
    TransportError,
    ValidationError,
)
from flowfabric.core.ids import ExecutionId, new_uuid, validate_namespace
from flowfabric.core.state import PublicState
from flowfabric.core.text import plural
from flowfabric.engine import overview
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.events import F, FeedRequest, Start, Subscriptions
from flowfabric.engine.api.executions import Executions
from flowfabric.engine.api.leases import Leases
from flowfabric.engine.api.reads import Listings, Reads
from flowfabric.engine.api.secrets import Secrets
from flowfabric.engine.api.steps import Steps
from flowfabric.engine.api.streams import Streams
from flowfabric.engine.api.suspensions import Suspensions
from flowfabric.engine.api.waitpoints import SentSignal, Signals, Waitpoints
from flowfabric.engine.connect import Place, open_backend
from flowfabric.sdk import diagnosis
from flowfabric.sdk.engine_calls import FlowCalls, engine_call
from flowfabric.sdk.failures import StoredFailure
from flowfabric.sdk.fleet_calls import FleetCalls
from flowfabric.sdk.following import EventFeed, Tail
from flowfabric.sdk.limiting import QuotaCalls
from flowfabric.sdk.spending import BudgetCalls
from flowfabric.sdk.submissions import Submissions

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_RETRY_S = 0.2
_CHECK_WORKER_AFTER_S = 1.0
_DIAGNOSIS_S = 2.0
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
    """The execution has no result; `info` has its details."""

    def __init__(self, info: executions.ExecutionInfo) -> None:
        super().__init__(info)
        self.info = info

    @property
    def reason(self) -> str:
        """Why it ended. For an exception: type and message, also of its causes."""
        return self._failure.message or self.info.cancellation_reason or ""

    @property
    def category(self) -> str | None:
        """The category of the failure, which retry policies refer to."""
        return self.info.failure_category

    @property
    def attempts(self) -> int:
        """How many attempts were made."""
        return self.info.total_attempt_count

    @property
    def _failure(self) -> StoredFailure:
        return StoredFailure.parse(self.info.failure_reason or "")

    def _first_line(self) -> str:
        return self.reason.partition("\n")[0] or "no reason given"

    def __repr__(self) -> str:
        info, reason = self.info, self._first_line()
        brief = reason if len(reason) <= _SHOWN_CHARS else f"{reason[:_SHOWN_CHARS]}…"
        state = info.public_state.value
        return f"{type(self).__name__}({info.execution_id.compact}, {state}: {brief})"

    def __str__(self) -> str:
        info, attempts = self.info, plural(self.attempts, "attempt")
        text = f"{info.execution_kind} {info.public_state.value} after {attempts}"
        return f"{text}: {self._first_line()}"


class NotFinished(RunError):
    """The execution has not ended yet."""

    def __str__(self) -> str:
        return f"{self.info.execution_kind} is {self.info.public_state.value}, not finished."


class ExecutionFailed(RunError):
    """The execution failed for good.

    >>> try:
    ...     await run.result()
    ... except ExecutionFailed as error:
    ...     print(error.exception_type, error.attempts, error.traceback)
    """

    @property
    def exception_type(self) -> str | None:
        """The class of the exception that the handler raised; None if it raised none."""
        return self._failure.exception_type

    @property
    def traceback(self) -> str | None:
        """The handler's traceback as Python prints it; None if it raised nothing."""
        return self._failure.traceback


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


def run_error(info: executions.ExecutionInfo) -> RunError:
    """The exception for an execution that has no result."""
    return _ERRORS.get(info.public_state, NotFinished)(info)


class Client(Submissions, FleetCalls, FlowCalls, BudgetCalls, QuotaCalls, Subscriptions):
    """Submits work and follows it. Async; `SyncClient` is the same for ordinary code.

    >>> async with await Client.connect("valkey://127.0.0.1:6379") as client:
    ...     created = await client.submit("resize", b'{"width": 80}')
    ...     print(await client.result(created.execution_id))
    """

    def __init__(self, backend: Backend, namespace: str = "default") -> None:
        self.backend = backend
        self.namespace = namespace
        self._feeds: weakref.WeakSet[EventFeed[Any]] = weakref.WeakSet()
        self._worker_check: asyncio.Task[None] | None = None
        self._warned = False

    @classmethod
    async def connect(cls, place: Place, namespace: str = "default") -> Self:
        """A client of the deployment at an address or url."""
        namespace = validate_namespace(namespace)
        return cls(await open_backend(place), namespace)

    inspect = engine_call(Reads.describe_execution)
    replay = engine_call(Executions.replay_execution)
    purge = engine_call(Executions.purge_execution)
    revoke_lease = engine_call(Leases.revoke_lease)
    change_priority = engine_call(Executions.change_priority)
    list = engine_call(Listings.list_executions)
    deliver_signal = engine_call(Signals.deliver_signal)
    verify_and_deliver = engine_call(Signals.verify_and_deliver)
    read_waitpoint_token = engine_call(Signals.read_waitpoint_token)
    list_pending_waitpoints = engine_call(Waitpoints.list_pending_waitpoints)
    close_waitpoint = engine_call(Waitpoints.close_waitpoint)
    resume = engine_call(Suspensions.resume_execution)
    list_suspended = engine_call(Suspensions.list_suspended)
    rotate_waitpoint_hmac_secret_all = engine_call(Secrets.rotate_waitpoint_hmac_secret_all)
    list_waitpoint_hmac_kids = engine_call(Secrets.list_waitpoint_hmac_kids)
    steps = engine_call(Steps.read_steps)
    read_stream = engine_call(Streams.read_stream)
    read_summary = engine_call(Streams.read_summary)

    async def wait(self, execution_id: ExecutionId, timeout: Duration | None = None) -> Outcome:
        """Wait until the execution has ended, without polling."""
        ended = functools.partial(self._stopped, execution_id, self._outcome, suspended=False)
        return await self._within(timeout, execution_id, ended, "did not finish")

    async def _within(
        self,
        timeout: Duration | None,
        execution_id: ExecutionId,
        operation: Callable[[], Coroutine[Any, Any, R]],
        problem: str,
    ) -> R:
        """Run the operation; if it times out, the error explains what it waits for."""
        limit = asyncio.timeout(None if timeout is None else to_ms(timeout, "timeout") / 1000)
        check = asyncio.get_running_loop().call_later(
            _CHECK_WORKER_AFTER_S, self._check_for_worker, execution_id
        )
        try:
            async with limit:
                return await operation()
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            check.cancel()
        given = f"{timeout:g} s" if isinstance(timeout, (int, float)) else str(timeout)
        detail = await self._detail(execution_id)
        why = "" if detail is None else f" {diagnosis.unfinished(detail)}"
        shown = ExecutionId(execution_id).compact
        raise TimeoutError(f"Execution {shown} {problem} within {given}.{why}")

    def _check_for_worker(self, execution_id: ExecutionId) -> None:
        """Warn once if no worker serves the execution; concurrent waits share one check."""
        if not self._warned and (self._worker_check is None or self._worker_check.done()):
            self._worker_check = asyncio.create_task(self._warn_without_worker(execution_id))

    async def _warn_without_worker(self, execution_id: ExecutionId) -> None:
        detail = await self._detail(execution_id)
        if detail is not None and diagnosis.lacks_worker(detail):
            self._warned = True
            info, why = detail.execution, diagnosis.why_not_running(detail)
            about = info.execution_kind, info.execution_id.compact, why
            extra = {"action": "no_worker", "execution_id": execution_id}
            log.warning("%s %s waits: %s", *about, extra=extra)

    async def explain(self, execution_id: ExecutionId) -> diagnosis.Diagnosis:
        """Why an execution is not running and what would help."""
        return diagnosis.explain(await overview.read_detail(self.backend, execution_id))

    async def _detail(self, execution_id: ExecutionId) -> overview.ExecutionDetail | None:
        """What the explanation of a wait needs; None if it cannot be read quickly."""
        try:
            async with asyncio.timeout(_DIAGNOSIS_S):
                return await overview.read_detail(self.backend, execution_id)
        except (FlowFabricError, TimeoutError):
            return None

    async def wait_until_suspended(
        self, execution_id: ExecutionId, timeout: Duration | None = None
    ) -> overview.Wait:
        """Wait until the execution waits for an answer, without polling; returns its question.

        If it ends instead, raises its `RunError`, or `execution_not_suspended` after a success.

        >>> wait = await client.wait_until_suspended(run.id, timeout=10)  # doctest: +SKIP
        >>> print(wait.prompt)  # doctest: +SKIP
        """
        suspended = functools.partial(self._stopped, execution_id, self._wait, suspended=True)
        return await self._within(timeout, execution_id, suspended, "was not suspended")

    async def _stopped(
        self,
        execution_id: ExecutionId,
        read: Callable[[ExecutionId], Coroutine[Any, Any, R | None]],
        *,
        suspended: bool,
    ) -> R:
        """Wait until the execution has ended or is suspended; returns what `read` then finds."""
        known, events = False, self.backend.events
        while True:
            try:
                await (events.wait_suspended if suspended else events.wait_ended)(execution_id)
                known = True
                found = await read(execution_id)
            except TransportError as error:
                # The execution exists, so keep waiting during an outage.
                if not known or not error.retryable or self.closed:
                    raise
                await asyncio.sleep(_RETRY_S)
                continue
            # A replay or an answer may have started it again between the event and the read.
            if found is not None:
                return found

    async def _outcome(self, execution_id: ExecutionId) -> Outcome | None:
        info, result = await self.backend.reads.read_outcome(execution_id)
        if info.completed_at is None:
            return None
        return Outcome(
            info.execution_id,
            info.public_state,
            result,
            info.result_encoding,
            info.failure_reason or info.cancellation_reason,
            info.failure_category,
            info.total_attempt_count,
        )

    async def _wait(self, execution_id: ExecutionId) -> overview.Wait | None:
        wait, _ = await overview.read_wait(self.backend, execution_id)
        if wait.public_state is PublicState.SUSPENDED:
            return wait
        info = await self.backend.reads.read_execution_info(execution_id)
        if info.completed_at is None:
            return None
        if info.public_state in _ERRORS:
            raise _ERRORS[info.public_state](info)
        problem = f"{info.execution_kind} completed and waits for no answer"
        raise StateError("execution_not_suspended", problem, op="wait_until_suspended")

    async def result(
        self, execution_id: ExecutionId, timeout: Duration | None = None
    ) -> bytes | None:
        """Wait for the result bytes; an execution that ended otherwise raises its `RunError`."""
        return (await self.success(execution_id, timeout)).result

    async def success(self, execution_id: ExecutionId, timeout: Duration | None = None) -> Outcome:
        """Wait for success; any other outcome raises its `RunError`."""
        outcome = await self.wait(execution_id, timeout)
        if outcome.state is PublicState.COMPLETED:
            return outcome
        raise _ERRORS[outcome.state](await self.backend.reads.read_execution_info(execution_id))

    async def result_now(self, execution_id: ExecutionId) -> bytes | None:
        """The result bytes without waiting; raises `NotFinished` if it has not ended."""
        info, result = await self.backend.reads.read_outcome(execution_id)
        if info.public_state is PublicState.COMPLETED:
            return result
        raise run_error(info)

    async def cancel(self, execution_id: ExecutionId, reason: str = "") -> executions.Cancelled:
        """Cancel the execution; a running handler stops when its lease is next renewed."""
        return await self.backend.executions.cancel_execution(execution_id, reason)

    async def read_context(self, execution_id: ExecutionId) -> executions.ExecutionContext | None:
        """Payload, kind and tags; None if there is no such execution."""
        try:
            return await self.backend.reads.read_execution_context(execution_id)
        except ValidationError:
            if await self.backend.reads.describe_execution(execution_id) is None:
                return None
            raise

    async def signal(
        self,
        execution_id: ExecutionId,
        waitpoint: str,
        signal_name: str,
        *,
        by: str = "",
        **options: Unpack[SentSignal],
    ) -> suspension.SignalOutcome:
        """Answer an open wait, named by its key or id, without its token.

        `by` says who answers; the handler cannot trust it.
        """
        found = await self._find(execution_id, waitpoint)
        token = await self.backend.signals.read_waitpoint_token(execution_id, found.waitpoint_id)
        if token is None:
            raise NotFoundError("waitpoint_not_found", f"{waitpoint!r} was closed in the meantime")
        return await self.backend.signals.deliver_signal(
            *(execution_id, found.waitpoint_id, token, signal_name),
            source_identity=by,
            **options,
        )

    async def approve(
        self,
        execution_id: ExecutionId,
        waitpoint: str | None = None,
        signal_name: str = "approved",
        *,
        by: str = "",
        payload: bytes | None = None,
        payload_encoding: str | None = None,
    ) -> suspension.SignalOutcome:
        """Decide as an operator; `waitpoint` is the key or the id of an open one.

        You may leave it out if only one is open. The handler trusts `by`: pass the person you
        authenticated. Each person decides once per signal name; a repeat is a `DuplicateSignal`.

        >>> await client.approve(run.id, "approval", by="ada")  # doctest: +SKIP
        """
        found = await self._find(execution_id, waitpoint)
        return await self.backend.signals.deliver_approval_signal(
            execution_id,
            found.waitpoint_id,
            signal_name,
            decided_by=by,
            payload=payload,
            payload_encoding=payload_encoding,
        )

    async def _find(
        self, execution_id: ExecutionId, waitpoint: str | None
    ) -> suspension.OpenWaitpoint:
        """The open waitpoint with this id or key; for None, the only one.

        Raises `invalid_input` if several match, `waitpoint_not_found` if none does.
        """
        entries = await overview.read_open_waitpoints(self.backend, execution_id)
        found = entries if waitpoint is None else overview.named(entries, waitpoint)
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(f"{one.waitpoint_id} ({one.waitpoint_key})" for one in found)
            which = "several are open" if waitpoint is None else f"{waitpoint!r} matches several"
            raise ValidationError("invalid_input", f"waitpoint: {which}; pass one of the ids {ids}")
        if not entries:
            state = (await self.backend.reads.read_execution_state(execution_id)).value
            problem = f"the execution is {state} and waits for no answer"
        else:
            keys = ", ".join(sorted(repr(one.waitpoint_key) for one in entries))
            problem = f"no open waitpoint {waitpoint!r}; the open ones are {keys}"
        raise NotFoundError("waitpoint_not_found", problem)

    def tail(
        self,
        execution_id: ExecutionId,
        attempt: int | Literal["latest"] = "latest",
        follow_attempts: bool = True,  # noqa: FBT001, FBT002 - given by name as a rule
        after: str = "0-0",
        visibility: streams.Visibility = "all",
    ) -> Tail:
        """The output as it arrives, across retries and reclaims, until the execution has ended.

        `after` is a position in the output of the first attempt that is read.

        >>> async for frame in client.tail(run.id):  # doctest: +SKIP
        ...     print(frame.payload)
        """

        execution_id = ExecutionId.parse(execution_id)

        async def here() -> tuple[Backend, ExecutionId]:
            return self.backend, execution_id

        return Tail(
            here,
            attempt,
            follow_attempts=follow_attempts,
            after=after,
            visibility=visibility,
        )

    async def _follow(self, request: FeedRequest[F], cursor: Start) -> EventFeed[F]:
        """A feed that resubscribes after an outage of the server."""
        if request.options.get("group") is not None:
            # A fixed member name, so that it keeps its partitions when it resubscribes.
            request.options.setdefault("member", new_uuid())
        feed = EventFeed(lambda start: self.backend.events.follow(request, start))
        self._feeds.add(feed)
        return await feed.begin(cursor)

    async def _close(self) -> None:
        """Close every connection; pending calls fail."""
        if self._worker_check is not None:
            self._worker_check.cancel()
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.backend.aclose)
            for feed in list(self._feeds):
                closing.push_async_callback(feed.aclose)
