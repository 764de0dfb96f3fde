"""The application object."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, cast, overload

from flowfabric.app import codec
from flowfabric.app.place import Place
from flowfabric.app.run import Run
from flowfabric.app.submission import (
    SubmitManyError,
    arguments_of,
    at_position,
    check_options,
    check_sizes,
    created,
)
from flowfabric.app.tasks import Task, TaskOptions
from flowfabric.app.worker import AppWorker
from flowfabric.core.capabilities import normalise
from flowfabric.core.closing import AsyncClosing
from flowfabric.core.contracts.executions import Created, CreateOutcome, NewExecution
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import (
    ConfigError,
    EngineError,
    TransportError,
    ValidationError,
    invalid_input,
)
from flowfabric.core.ids import ExecutionId, validate_namespace
from flowfabric.core.retry import Retry
from flowfabric.engine.executions import BATCH
from flowfabric.sdk.client import Client
from flowfabric.sdk.config import WorkerConfig, default_worker_id

__all__ = ["Fabric"]

P = ParamSpec("P")
R = TypeVar("R")


class Fabric(AsyncClosing):
    """An application: its tasks, and the deployment they run on.

    Without a url it uses `FF_URL`, else `FF_HOST`, else an embedded Valkey under `./.flowfabric`
    that all processes of the project share.

    >>> app = Fabric()
    >>> @app.task(retry=Retry(3), timeout="5m")
    ... async def greet(name: str) -> str:
    ...     return f"Hello, {name}!"
    """

    def __init__(self, url: str | None = None, namespace: str = "default") -> None:
        self.namespace = validate_namespace(namespace)
        self.tasks: dict[str, Task[..., Any]] = {}
        self.place = Place(url)
        self._client: Client | None = None
        self._opening: asyncio.Task[Client] | None = None

    def __repr__(self) -> str:
        count = len(self.tasks)
        tasks = f"{count} task{'' if count == 1 else 's'}"
        return f"Fabric({self.place.peer}, namespace={self.namespace!r}, {tasks})"

    # --- tasks --------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[P, Awaitable[R]] | Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        name: str | None = None,
        *,
        lane: str = "default",
        timeout: Duration | None = None,
        deadline: Duration | None = None,
        retry: Retry | int | None = None,
        capabilities: Iterable[str] = (),
        retention: Duration | None = None,
    ) -> Callable[[Callable[P, Awaitable[R]] | Callable[P, R]], Task[P, R]]: ...

    def task(
        self,
        name: Callable[..., Any] | str | None = None,
        *,
        lane: str = "default",
        timeout: Duration | None = None,
        deadline: Duration | None = None,
        retry: Retry | int | None = None,
        capabilities: Iterable[str] = (),
        retention: Duration | None = None,
    ) -> Any:
        """Register a function, `async def` or `def`, as a task: `@app.task` or `@app.task(…)`.

        `timeout` limits one attempt, `deadline` the whole execution, `retention` is how long it
        is kept after its end; `retry=3` is short for `Retry(3)`. A first parameter annotated
        `Context` is filled by the worker.
        """
        if callable(name):
            return self.task()(name)
        options = TaskOptions(
            lane=lane,
            timeout=timeout,
            deadline=deadline,
            retry=retry,
            capabilities=normalise(capabilities),
            retention=retention,
        )

        def register(function: Any) -> Task[..., Any]:
            task: Task[..., Any] = Task(function, name, options)
            if task.name in self.tasks:
                raise ConfigError("task", f"there are two tasks named {task.name!r}", "name")
            self.tasks[task.name] = task
            return task

        return register

    # --- submitting -----------------------------------------------------------------------

    async def client(self) -> Client:
        """The connected client of this application and event loop."""
        opening = self._opening
        # A client belongs to the loop it was made in; one of a loop that ended is of no use.
        if opening is None or opening.get_loop() is not asyncio.get_running_loop():
            self._client = None
            opening = self._opening = asyncio.create_task(self._open())
        if self._client is not None:
            return self._client
        try:
            client = await asyncio.shield(opening)
        except BaseException as error:
            # A connection that could not be made is tried again by the next caller.
            if opening.done() and self._opening is opening:
                self._opening = None
            if opening.cancelled() and not _asked_to_stop():
                raise TransportError("transport", "the application was closed meanwhile") from error
            raise
        if self._opening is opening:
            self._client = client
        return client

    async def _open(self) -> Client:
        return Client(await self.place.open(), self.namespace)

    def call(
        self,
        task: Task[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[str, str, bytes, Any]:
        """Kind, default lane, payload and policy of a call, checked against the signature."""
        if isinstance(task, Task):
            args, kwargs = task.bind(args, kwargs)
            return task.name, task.lane, codec.encode_call(args, kwargs), task.policy
        if isinstance(task, str):
            return task, "default", codec.encode_call(args, kwargs), None
        problem = f"must be a task or its name, got {task!r}: decorate it with @app.task()"
        raise invalid_input("task", problem)

    async def submit(
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
    ) -> Run[R]:
        """Submit one execution and return a handle on it. Arguments become JSON.

        >>> run = await app.submit(greet, "Ada", priority=5, idempotency_key="greet-ada")
        """
        if not (lane is None and priority is None and tags is None and idempotency_key is None):
            check_options(lane, priority, idempotency_key, tags)
        delay_ms = None if delay is None else to_ms(delay, "delay")
        kind, home, payload, policy = self.call(task, args, kwargs)
        client = await self.client()
        outcome = await client.submit(
            kind,
            payload,
            lane=lane or home,
            payload_encoding=codec.JSON,
            priority=priority,
            idempotency_key=idempotency_key or "",
            tags=tags,
            policy=policy,
            delay_ms=delay_ms,
        )
        return self._outcome(task, outcome)

    async def submit_many(
        self,
        task: Task[..., R] | str,
        calls: Sequence[Sequence[Any] | Mapping[str, Any]],
        *,
        lane: str | None = None,
        priority: int | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> list[Run[R]]:
        """Submit many executions of one task in few round trips.

        Each call is a list of positional arguments or a mapping of named ones. Nothing is sent
        when one of them cannot be. `SubmitManyError` tells what was stored when the engine, or the
        way to it, failed half-way.

        >>> runs = await app.submit_many(greet, [["Ada"], ["Grace"]])
        """
        check_options(lane, priority, None, tags)
        if not isinstance(calls, Iterable):
            raise invalid_input("calls", f"must be a list of calls, got {type(calls).__name__}")
        prepared = [self._prepared(task, call, place) for place, call in enumerate(calls)]
        if not prepared:
            return []
        client = await self.client()
        at = lane or prepared[0][1]
        new = [
            NewExecution(
                execution_id=execution_id,
                execution_kind=kind,
                input_payload=payload,
                payload_encoding=codec.JSON,
                namespace=self.namespace,
                lane_id=at,
                priority=priority,
                policy=policy,
                tags=tags or {},
            )
            for execution_id, (kind, _, payload, policy) in zip(
                client.mint(at, len(prepared)), prepared, strict=True
            )
        ]
        check_sizes(new, client.backend.limits.max_payload_bytes)
        try:
            outcomes = await client.submit_many(new)
        except EngineError as error:
            if len(new) <= BATCH and not getattr(error, "ambiguous", False):
                # It was one call, and the engine did not do it.
                raise
            unsure = {n: self._run(task, e.execution_id) for n, e in enumerate(new)}
            raise SubmitManyError({}, {}, unsure) from error
        return created(outcomes, lambda outcome: self._outcome(task, outcome))

    def _prepared(
        self, task: Task[..., Any] | str, call: object, position: int
    ) -> tuple[str, str, bytes, Any]:
        args, kwargs = arguments_of(call, position)
        try:
            return self.call(task, args, kwargs)
        except ValidationError as error:
            raise at_position(error, position) from error

    def _outcome(self, task: Task[..., R] | str, outcome: CreateOutcome) -> Run[R]:
        duplicate = not isinstance(outcome, Created)
        return self._run(task, outcome.execution_id, duplicate=duplicate)

    def _run(
        self, task: Task[..., R] | str, execution_id: ExecutionId, *, duplicate: bool = False
    ) -> Run[R]:
        kind, returns = (task, Any) if isinstance(task, str) else (task.name, task.returns)
        return Run(self.client, execution_id, returns, kind=kind, duplicate=duplicate)

    @overload
    def get_run(self, execution_id: str, task: Task[..., R]) -> Run[R]: ...

    @overload
    def get_run(self, execution_id: str, task: str | None = None) -> Run[Any]: ...

    def get_run(self, execution_id: str, task: Task[..., Any] | str | None = None) -> Run[Any]:
        """A handle on an execution whose id was kept; with its task, results are typed.

        Nothing is asked of the server here: an id that does not exist shows with the first use.

        >>> run = app.get_run(stored_id, greet)
        >>> print(await run.result(timeout="5s"))
        """
        if task is not None and not isinstance(task, (Task, str)):
            raise invalid_input("task", f"must be a task or its name, got {task!r}")
        return self._run("" if task is None else task, ExecutionId.parse(execution_id))

    # --- working ----------------------------------------------------------------------------

    def worker(
        self,
        *,
        concurrency: int = 64,
        lanes: Sequence[str] | None = None,
        capabilities: Iterable[str] = (),
        lease_ttl: Duration = 30,
        block_limit: Duration | None = None,
        batch: int = 64,
        scanners: bool = True,
        on_unknown_kind: Literal["fail", "release"] = "fail",
        worker_id: str | None = None,
    ) -> AppWorker:
        """A worker for this application's tasks; `await worker.run()` serves.

        Without `lanes` it serves every lane that a task names. `batch` is the most executions
        one call claims or completes. When a task blocks the event loop for longer than
        `block_limit`, three leases unless set, the worker releases the other executions it holds.
        """
        named = dict.fromkeys(task.lane for task in self.tasks.values())
        served = lanes or tuple(named)
        config = WorkerConfig(
            namespace=self.namespace,
            lanes=served or ("default",),
            # Checked and kept as a tuple there.
            capabilities=cast("Sequence[str]", capabilities),
            lease_ttl_ms=to_ms(lease_ttl, "lease_ttl"),
            block_limit_ms=None if block_limit is None else to_ms(block_limit, "block_limit"),
            max_concurrent_tasks=concurrency,
            batch=batch,
            scanners=scanners,
            worker_id=worker_id or default_worker_id(),
        )
        return AppWorker(self.place, self.tasks, config, on_unknown_kind=on_unknown_kind)

    # --- ending -----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close connections and let the embedded server go."""
        await self.disconnect()
        self.place.close()

    async def disconnect(self) -> None:
        """Close connections, also one that is being made; the next use makes a new one.

        The embedded server goes on.
        """
        opening, self._client, self._opening = self._opening, None, None
        if opening is None or opening.get_loop() is not asyncio.get_running_loop():
            return
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().aclose()


def _asked_to_stop() -> bool:
    """Whether the current task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
