"""The application object for ordinary, blocking code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NoReturn, TypeVar, overload

from flowfabric.app.fabric import Fabric
from flowfabric.app.run import Run
from flowfabric.app.submission import SubmitManyError
from flowfabric.app.tasks import Task
from flowfabric.core.closing import Closing
from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.contracts.streams import StreamedFrame, Visibility
from flowfabric.core.contracts.suspension import SignalOutcome
from flowfabric.core.durations import Duration
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.sdk.client import Outcome
from flowfabric.sdk.portal import Portal, iterate

__all__ = ["SyncFabric", "SyncRun"]

R = TypeVar("R")
T = TypeVar("T")


class SyncRun(Generic[R]):
    """`Run` without `await`."""

    __slots__ = ("_call", "_run", "duplicate", "id")

    def __init__(self, run: Run[R], call: Callable[..., Any]) -> None:
        self._run = run
        self._call = call
        self.id: ExecutionId = run.id
        self.duplicate = run.duplicate

    def state(self) -> PublicState:
        """Where the execution is now."""
        return self._call(self._run.state)

    def info(self) -> ExecutionInfo:
        """Everything an operator would see of it."""
        return self._call(self._run.info)

    def wait(self, timeout: Duration | None = None) -> Outcome:
        """Wait until it has ended, however it ended."""
        return self._call(lambda: self._run.wait(timeout))

    def result(self, timeout: Duration | None = None) -> R:
        """Wait for the result. `ExecutionFailed` and its siblings tell why there is none."""
        return self._call(lambda: self._run.result(timeout))

    def cancel(self, reason: str = "") -> None:
        """End it deliberately; a running handler learns of it with its next renewal."""
        self._call(lambda: self._run.cancel(reason))

    def signal(
        self, waitpoint: str, name: str, payload: Any = None, **options: Any
    ) -> SignalOutcome:
        """Answer a wait of the handler; the payload becomes JSON."""
        return self._call(lambda: self._run.signal(waitpoint, name, payload, **options))

    def approve(
        self, waitpoint: str, name: str = "approved", payload: Any = None, *, decided_by: str = ""
    ) -> SignalOutcome:
        """Answer a wait as an operator; the handler can trust `decided_by`."""
        return self._call(
            lambda: self._run.approve(waitpoint, name, payload, decided_by=decided_by)
        )

    def stream(
        self,
        attempt: int | Literal["latest"] = "latest",
        follow_attempts: bool = True,  # noqa: FBT001, FBT002 - given by name as a rule
        after: str = "0-0",
        visibility: Visibility = "all",
    ) -> Iterator[StreamedFrame]:
        """The handler's output as it comes, until the execution has ended."""
        tail = self._run.stream(attempt, follow_attempts, after, visibility)
        return iterate(tail, self._call)

    def __repr__(self) -> str:
        return f"Sync{self._run!r}"

    def __reduce__(self) -> NoReturn:
        self._run.__reduce__()


class SyncFabric(Closing):
    """Submits an application's tasks from code without an event loop; safe from several threads.

    >>> with SyncFabric(app) as sync:
    ...     print(sync.submit(greet, "Ada").result(timeout=10))
    """

    def __init__(self, app: Fabric) -> None:
        self._app = app
        self._portal = Portal("ff-sync-fabric")
        self._lock = threading.Lock()
        self._twin: Fabric | None = None

    def _fabric(self) -> Fabric:
        """The same application with connections of the portal's own loop.

        In a forked child that is another loop, where it connects anew.
        """
        with self._lock:
            if self._twin is None:
                self._twin = Fabric(namespace=self._app.namespace)
                self._twin.place, self._twin.tasks = self._app.place, self._app.tasks
            return self._twin

    def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._portal.call(make)

    def submit(
        self,
        task: Task[..., R] | str,
        /,
        *args: Any,
        lane: str | None = None,
        priority: int | None = None,
        idempotency_key: str | None = None,
        delay: Duration | None = None,
        tags: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> SyncRun[R]:
        """Submit one execution and return a handle on it. Arguments become JSON."""

        async def submit() -> Run[R]:
            return await self._fabric().submit(
                task,
                *args,
                lane=lane,
                priority=priority,
                idempotency_key=idempotency_key,
                delay=delay,
                tags=tags,
                **kwargs,
            )

        return SyncRun(self._call(submit), self._call)

    def submit_many(
        self,
        task: Task[..., R] | str,
        calls: Sequence[Sequence[Any] | Mapping[str, Any]],
        **options: Any,
    ) -> list[SyncRun[R]]:
        """Submit one task many times in few round trips; takes the options of the async form."""

        async def submit() -> list[Run[R]]:
            return await self._fabric().submit_many(task, calls, **options)

        try:
            runs = self._call(submit)
        except SubmitManyError as error:
            raise error.with_runs(lambda run: SyncRun(run, self._call)) from error.__cause__
        return [SyncRun(run, self._call) for run in runs]

    @overload
    def get_run(self, execution_id: str, task: Task[..., R]) -> SyncRun[R]: ...

    @overload
    def get_run(self, execution_id: str, task: str | None = None) -> SyncRun[Any]: ...

    def get_run(self, execution_id: str, task: Task[..., Any] | str | None = None) -> SyncRun[Any]:
        """A handle on an execution whose id was kept; with its task, results are typed."""
        return SyncRun(self._fabric().get_run(execution_id, task), self._call)

    def close(self) -> None:
        """Close connections and end the private thread. The application itself stays usable."""
        twin = self._twin

        async def last() -> None:
            if twin is not None:
                # Not `twin.aclose()`: the embedded server belongs to the application.
                await twin.disconnect()

        self._portal.close(last)
