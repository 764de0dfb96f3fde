"""The application for code without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NoReturn, ParamSpec, Self, TypeVar, Unpack, overload

from flowfabric.app.fabric import Fabric
from flowfabric.app.run import Run
from flowfabric.app.submission import Calls, SubmitManyError
from flowfabric.app.tasks import SubmitOptions, Task, TaskDecorator
from flowfabric.app.worker import AppWorker
from flowfabric.core.closing import Closing
from flowfabric.core.ids import ExecutionId
from flowfabric.sdk.blocking import SyncTwin, blocking
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.loop_thread import Portal
from flowfabric.sdk.sync import SyncClient

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class SyncRun(SyncTwin[Run[R_co]], Generic[R_co]):
    """`Run` without `await`."""

    __slots__ = ()

    @property
    def id(self) -> ExecutionId:
        """The execution's id."""
        return self._target.id

    @property
    def duplicate(self) -> bool:
        """Whether the id or idempotency key was already taken: this is the earlier execution."""
        return self._target.duplicate

    state = blocking(Run[R_co].state)
    info = blocking(Run[R_co].info)
    wait = blocking(Run[R_co].wait)
    result = blocking(Run[R_co].result)
    cancel = blocking(Run[R_co].cancel)
    signal = blocking(Run[R_co].signal)
    approve = blocking(Run[R_co].approve)
    stream = blocking(Run[R_co].stream)

    def __repr__(self) -> str:
        return f"Sync{self._target!r}"

    def __reduce__(self) -> NoReturn:
        self._target.__reduce__()


class SyncAppWorker(SyncTwin[AppWorker]):
    """A worker for programs without an event loop.

    `worker.run()` serves until SIGTERM or SIGINT; `with sync.worker():` serves in the background
    of the block.
    """

    @property
    def config(self) -> WorkerConfig:
        """The worker's settings."""
        return self._target.config

    def _call(self, use: Callable[[AppWorker], Coroutine[Any, Any, T]]) -> T:
        # In the calling thread, because only the main thread receives signals.
        return asyncio.run(use(self._target))

    run = blocking(AppWorker.run)

    def __enter__(self) -> Self:
        self._caller.call(self._target.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self._caller.call(lambda: self._target.__aexit__(None, None, None))


class SyncFabric(SyncTwin[Fabric], Closing):
    """`Fabric` without `await`, safe to use from several threads.

    >>> with SyncFabric(app) as sync:
    ...     print(sync.submit(greet, "Ada").result(timeout=10))
    """

    def __init__(self, app: Fabric) -> None:
        self._portal = Portal("ff-sync-fabric")
        super().__init__(app.twin(), self._portal)

    @property
    def task(self) -> TaskDecorator:
        """Registers a function as a task of the application, as `Fabric.task` does."""
        return self._target.task

    @overload
    def submit(self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> SyncRun[R]: ...

    @overload
    def submit(self, task: str, /, *args: Any, **kwargs: Any) -> SyncRun[Any]: ...

    def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> SyncRun[Any]:
        """Submit one execution and return a handle on it. Arguments become JSON.

        >>> run = sync.submit(greet.options(priority=5), "Ada")
        """
        return self._handle(self._call(lambda app: app.submit(task, *args, **kwargs)))

    @overload
    def submit_many(self, task: Task[..., R], calls: Calls) -> list[SyncRun[R]]: ...

    @overload
    def submit_many(self, task: str, calls: Calls) -> list[SyncRun[Any]]: ...

    def submit_many(self, task: Any, calls: Calls) -> list[SyncRun[Any]]:
        """Submit many executions of one task in few round trips, as `Fabric.submit_many` does."""
        try:
            runs: list[Run[Any]] = self._call(lambda app: app.submit_many(task, calls))
        except SubmitManyError as error:
            raise error.with_runs(self._handle) from error.__cause__
        return [self._handle(run) for run in runs]

    @overload
    def get_run(self, execution_id: str, task: Task[..., R]) -> SyncRun[R]: ...

    @overload
    def get_run(self, execution_id: str, task: str | None = None) -> SyncRun[Any]: ...

    def get_run(self, execution_id: str, task: Any = None) -> SyncRun[Any]:
        """A handle on an execution by its id; with its task, results are typed."""
        return self._handle(self._target.get_run(execution_id, task))

    def _handle(self, run: Run[R]) -> SyncRun[R]:
        return SyncRun(run, self._portal)

    def named(self, name: str, **options: Unpack[SubmitOptions]) -> Task[..., Any]:
        """A task that other programs define, by its name, with options for its submissions."""
        return self._target.named(name, **options)

    worker = blocking(Fabric.worker, SyncAppWorker)
    disconnect = blocking(Fabric.disconnect)

    def client(self) -> SyncClient:
        """The client of this application; it is closed with this object."""
        return SyncClient(self._target.client, self._portal)

    def close(self) -> None:
        """Close connections and stop the private thread. The application stays usable."""
        # Not `aclose`: the embedded server belongs to the application.
        self._portal.close(self._target.disconnect)
