"""Handles on submitted executions."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, Literal, TypeVar, Unpack

import msgspec

from flowfabric.app import codec
from flowfabric.core.annotations import annotation
from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.contracts.streams import Visibility
from flowfabric.core.contracts.suspension import SignalOutcome
from flowfabric.core.durations import Duration
from flowfabric.core.errors import FlowFabricError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.waitpoints import SignalOptions
from flowfabric.engine.lookup import IdStart, find_execution
from flowfabric.engine.overview import Wait
from flowfabric.sdk.blocking import Caller, SyncTwin, blocking
from flowfabric.sdk.client import Client, Outcome
from flowfabric.sdk.diagnosis import Diagnosis
from flowfabric.sdk.following import Tail

R_co = TypeVar("R_co", covariant=True)

_SHOWN_BYTES = 200


class UnexpectedResult(FlowFabricError):
    """The stored result does not fit the task's annotation: another version wrote it."""

    def __init__(
        self, kind: str, execution_id: ExecutionId, stored: bytes, expected: Any, problem: str
    ) -> None:
        super().__init__(kind, execution_id, stored, expected, problem)
        self.kind = kind
        """The task; empty if the handle was made without one."""
        self.execution_id = execution_id
        self.stored = stored
        self.expected = expected
        """The task's return annotation in this program."""
        self.problem = problem

    def __str__(self) -> str:
        shown = self.stored[:_SHOWN_BYTES].decode(errors="replace")
        more = "…" if len(self.stored) > _SHOWN_BYTES else ""
        named = f"{self.kind} " if self.kind else ""
        expected = annotation(self.expected)
        return (
            f"{named}{self.execution_id.compact}: the stored result {shown}{more} does not fit "
            f"{expected}: {self.problem}. Correct the task's return annotation, or read `stored`."
        )


def decoded_result(
    kind: str, execution_id: ExecutionId, stored: bytes | None, encoding: str, returns: Any
) -> Any:
    """A stored result as the type that its task returns."""
    try:
        return codec.decode(stored, encoding, returns)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise UnexpectedResult(kind, execution_id, stored or b"", returns, str(error)) from error


class Run(Generic[R_co]):
    """A handle on one execution: its state, result and output, and ways to act on it.

    It works in every event loop. To store it, store `str(run.id)`, or `run.id.compact` in a URL:
    `app.get_run(id)` makes another one.
    """

    __slots__ = ("_kind", "_name", "_open", "_returns", "duplicate")

    def __init__(
        self,
        connect: Callable[[], Awaitable[Client]],
        name: ExecutionId | IdStart,
        returns: Any = Any,
        kind: str = "",
        *,
        duplicate: bool = False,
    ) -> None:
        self._open = connect
        self._kind = kind
        self._returns = returns
        self._name = name
        self.duplicate = duplicate
        """Whether `submit` found an earlier execution with this id or idempotency key."""

    @property
    def id(self) -> ExecutionId:
        """The execution's id. If you made the handle from a prefix, the first call looks it up."""
        if isinstance(self._name, ExecutionId):
            return self._name
        problem = f"{self._name.text!r} is not looked up yet. Await run.state() or another call."
        raise invalid_input("id", problem)

    async def _connect(self) -> Client:
        """The client of this event loop. Looks up the id first if only a prefix is known."""
        client = await self._open()
        if not isinstance(self._name, ExecutionId):
            self._name = await find_execution(client.backend, self._name, client.namespace)
        return client

    async def state(self) -> PublicState:
        """The execution's current state."""
        return await (await self._connect()).backend.reads.read_execution_state(self.id)

    async def info(self) -> ExecutionInfo:
        """The details of the execution: times, attempts, failure, lane, priority and more."""
        return await (await self._connect()).backend.reads.read_execution_info(self.id)

    async def explain(self) -> Diagnosis:
        """Why the execution is not running and what would help.

        >>> print(await run.explain())
        """
        return await (await self._connect()).explain(self.id)

    async def wait(self, timeout: Duration | None = None) -> Outcome:
        """Wait until the execution has ended, with any outcome."""
        return await (await self._connect()).wait(self.id, timeout)

    async def result(self, timeout: Duration | None = None) -> R_co:
        """Wait for the result. Without one, raises `ExecutionFailed` or another `RunError`.

        After `timeout`, in seconds or text such as `"5m"`, raises `TimeoutError`; the execution
        continues. A result that does not fit the task's return annotation raises
        `UnexpectedResult`.
        """
        outcome = await (await self._connect()).success(self.id, timeout)
        stored = outcome.result, outcome.result_encoding
        return decoded_result(self._kind, self.id, *stored, self._returns)

    async def cancel(self, reason: str = "") -> None:
        """Cancel the execution; a running handler stops when its lease is next renewed."""
        if not isinstance(reason, str):
            raise invalid_input("reason", f"must be text, got {type(reason).__name__}")
        await (await self._connect()).cancel(self.id, reason)

    async def wait_until_suspended(self, timeout: Duration | None = None) -> Wait:
        """Wait until the handler waits for an answer; returns what it asks.

        An execution that ends instead raises its `RunError`, or `execution_not_suspended` after a
        success. After `timeout` raises `TimeoutError`.

        >>> wait = await run.wait_until_suspended(timeout="10s")
        >>> print(wait.prompt, wait.details)
        """
        return await (await self._connect()).wait_until_suspended(self.id, timeout)

    async def signal(
        self,
        waitpoint: str,
        name: str,
        payload: Any = None,
        *,
        by: str = "",
        **options: Unpack[SignalOptions],
    ) -> SignalOutcome:
        """Answer a wait of the handler, named as in `ctx.wait_for`; the payload becomes JSON.

        `by` says who answers; the handler cannot trust it.

        >>> await run.signal("approval", "approved", {"note": "fine"}, by="ada")
        """
        data, label = (None, None) if payload is None else codec.encode(payload, "payload")
        client = await self._connect()
        return await client.signal(
            self.id, waitpoint, name, by=by, payload=data, payload_encoding=label, **options
        )

    async def approve(
        self,
        waitpoint: str | None = None,
        payload: Any = None,
        *,
        by: str = "",
        name: str = "approved",
    ) -> SignalOutcome:
        """Answer a wait as an operator; the handler can trust `by`.

        Pass the person you authenticated. Each person decides once per signal name. You may leave
        out the waitpoint if only one is open.

        >>> await run.approve(by="ada")
        """
        data, label = (None, None) if payload is None else codec.encode(payload, "payload")
        client = await self._connect()
        return await client.approve(
            self.id, waitpoint, name, by=by, payload=data, payload_encoding=label
        )

    async def reject(
        self, waitpoint: str | None = None, payload: Any = None, *, by: str = ""
    ) -> SignalOutcome:
        """Answer a wait as `approve` does, with the signal `rejected`.

        >>> await run.reject("approval", {"why": "too expensive"}, by="ada")
        """
        return await self.approve(waitpoint, payload, by=by, name="rejected")

    def stream(
        self,
        attempt: int | Literal["latest"] = "latest",
        follow_attempts: bool = True,  # noqa: FBT001, FBT002 - given by name as a rule
        after: str = "0-0",
        visibility: Visibility = "all",
    ) -> Tail:
        """The handler's live output, until the execution has ended.

        >>> async for frame in run.stream():
        ...     print(frame.text, end="")
        """
        return Tail(
            self._output,
            attempt,
            follow_attempts=follow_attempts,
            after=after,
            visibility=visibility,
        )

    async def _output(self) -> tuple[Backend, ExecutionId]:
        return (await self._connect()).backend, self.id

    def __repr__(self) -> str:
        name = self._name.compact if isinstance(self._name, ExecutionId) else self._name.text
        return f"Run({name}, task={self._kind!r})" if self._kind else f"Run({name})"

    def __reduce__(self) -> str:
        raise TypeError(
            "A run cannot be pickled. Send `str(run.id)`; `app.get_run(id)` makes a new handle."
        )


class SyncRun(SyncTwin[Run[R_co]], Generic[R_co]):
    """`Run` without `await`."""

    __slots__ = ("duplicate",)

    def __init__(self, target: Run[R_co], caller: Caller) -> None:
        super().__init__(target, caller)
        self.duplicate = target.duplicate
        """Whether `submit` found an earlier execution with this id or idempotency key."""

    @property
    def id(self) -> ExecutionId:
        """The execution's id. If you made the handle from a prefix, the first call looks it up."""
        return self._target.id

    state = blocking(Run[R_co].state)
    info = blocking(Run[R_co].info)
    explain = blocking(Run[R_co].explain)
    wait = blocking(Run[R_co].wait)
    wait_until_suspended = blocking(Run[R_co].wait_until_suspended)
    result = blocking(Run[R_co].result)
    cancel = blocking(Run[R_co].cancel)
    signal = blocking(Run[R_co].signal)
    approve = blocking(Run[R_co].approve)
    reject = blocking(Run[R_co].reject)
    stream = blocking(Run[R_co].stream)

    def __repr__(self) -> str:
        return f"Sync{self._target!r}"

    def __reduce__(self) -> str:
        return self._target.__reduce__()
