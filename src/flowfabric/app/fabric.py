"""The application object, for code with an event loop and for code without."""

import asyncio
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Self, TypeVar, Unpack, cast, overload

from flowfabric.app.calls import (
    Calls,
    Keys,
    SubmitManyError,
    arguments_of,
    check_sizes,
    created,
    keys_of,
    payloads_of,
    refusal,
    sent,
)
from flowfabric.app.flow import Flow, FlowBuilder, SyncFlow, SyncFlowBuilder
from flowfabric.app.run import Run, SyncRun
from flowfabric.app.tasks import (
    SubmitOptions,
    Task,
    TaskDecorator,
    TaskFunction,
    as_task,
    shared_fields,
)
from flowfabric.app.worker import AppWorker, SyncAppWorker
from flowfabric.core.closing import AsyncClosing, Closing
from flowfabric.core.contracts.executions import Created, CreateOutcome, NewExecution
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import ConflictError, EngineError, TransportError, invalid_input
from flowfabric.core.ids import validate_namespace
from flowfabric.core.text import plural
from flowfabric.engine.api import check
from flowfabric.engine.api.executions import PART
from flowfabric.engine.connect import ServerLocation
from flowfabric.engine.layers.tracing import enable as enable_tracing
from flowfabric.engine.lookup import parse_name
from flowfabric.sdk.blocking import SyncTwin, blocking
from flowfabric.sdk.client import Client
from flowfabric.sdk.config import WorkerConfig, default_worker_id
from flowfabric.sdk.loop_thread import Portal
from flowfabric.sdk.sync import SyncClient

P = ParamSpec("P")
R = TypeVar("R")


class Fabric(AsyncClosing):
    """An application: its tasks and the deployment they run on.

    Without a url it uses `FF_URL`, otherwise `FF_HOST`, otherwise an embedded Valkey in the
    `.flowfabric` folder that all processes of the project share. With `tracing`, this process makes
    OpenTelemetry spans, as with `FF_TRACING=1`.

    >>> app = Fabric()
    >>> @app.task(retry=Retry(3), timeout="5m")
    ... async def greet(name: str) -> str:
    ...     return f"Hello, {name}!"
    """

    def __init__(
        self, url: str | None = None, namespace: str = "default", *, tracing: bool = False
    ) -> None:
        self.namespace = validate_namespace(namespace)
        if tracing:
            enable_tracing()
        self.tasks: dict[str, TaskFunction[..., Any, ..., Any]] = {}
        self.location = ServerLocation(None if url is None else check.text(url, "url"))
        self._openings: dict[asyncio.AbstractEventLoop, asyncio.Task[Client]] = {}

    def __repr__(self) -> str:
        tasks = plural(len(self.tasks), "task")
        return f"Fabric({self.location.peer}, namespace={self.namespace!r}, {tasks})"

    @property
    def task(self) -> TaskDecorator:
        """Registers a function, `async def` or `def`, as a task: `@app.task` or `@app.task(…)`.

        `timeout` limits one attempt, `deadline` the whole execution; `retention` is how long it is
        kept after its end; `retry=3` is short for `Retry(3)`. The worker passes a first parameter
        annotated `Context`, or `SyncContext` in a `def` function.

        >>> @app.task(retry=3, timeout="5m")
        ... async def greet(ctx: Context, name: str) -> str:
        ...     return f"Hello, {name}!"
        """
        return TaskDecorator(self)

    def named(self, name: str, **options: Unpack[SubmitOptions]) -> Task[..., Any]:
        """A task by its name, with options for its submissions; other programs may define it.

        If this application defines it, its own options apply, too.

        >>> run = await app.named("resize", priority=5).submit("cat.png", 300)
        """
        own = self.tasks.get(name)
        if own is not None:
            return own.options(**options)
        return Task(self, shared_fields(name), options=options)

    async def client(self) -> Client:
        """The connected client of this application and event loop."""
        loop = asyncio.get_running_loop()
        # A client belongs to the loop that it was made in; threads may each run a loop.
        opening = self._openings.get(loop)
        if opening is None:
            self._forget_ended_loops()
            opening = self._openings[loop] = asyncio.create_task(self._open())
        try:
            return await asyncio.shield(opening)
        except BaseException as error:
            # The next caller tries to connect again.
            if opening.done() and self._openings.get(loop) is opening:
                del self._openings[loop]
            caller = asyncio.current_task()
            if opening.cancelled() and not (caller and caller.cancelling()):
                raise TransportError("transport", "the application was closed") from error
            raise

    def _forget_ended_loops(self) -> None:
        for loop in list(self._openings):
            if loop.is_closed():
                self._openings.pop(loop, None)

    async def _open(self) -> Client:
        return Client(await self.location.open(), self.namespace)

    @overload
    async def submit(self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...

    @overload
    async def submit(self, task: str, /, *args: Any, **kwargs: Any) -> Run[Any]: ...

    async def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Submit one execution and return a handle on it. Arguments become JSON.

        >>> run = await app.submit(greet, "Ada")
        >>> run = await app.submit(greet.options(idempotency_key="greet-ada"), "Ada")
        """
        task = as_task(self, task)
        payload = task.encode(args, kwargs)
        client = await self.client()
        await client.backend.places.learn_lane(task.lane)
        [execution_id] = client.mint(task.lane, 1)
        new = task.new_execution(execution_id, payload)
        if task.key:
            new = client.place(task.keyed(new, task.key, args, kwargs))
        try:
            return self._run(task, await client.backend.executions.create_execution(new))
        except ConflictError as error:
            raise refusal(error, new) from None

    @overload
    async def submit_many(
        self, task: Task[..., R], calls: Calls, idempotency_keys: Keys = None
    ) -> list[Run[R]]: ...

    @overload
    async def submit_many(
        self, task: str, calls: Calls, idempotency_keys: Keys = None
    ) -> list[Run[Any]]: ...

    async def submit_many(
        self, task: Task[..., Any] | str, calls: Calls, idempotency_keys: Keys = None
    ) -> list[Run[Any]]:
        """Submit many executions of one task in few round trips.

        Each call is a list of positional arguments or a mapping of named ones. If one of them
        does not fit, nothing is sent. If only some calls could be stored, raises
        `SubmitManyError`. `idempotency_keys` has one key per call.

        >>> runs = await app.submit_many(greet, [["Ada"], ["Grace"]])
        """
        task = as_task(self, task)
        if task.key:
            problem = "A batch cannot share one key. Pass idempotency_keys=, one per call."
            raise invalid_input("idempotency_key", problem)
        given = arguments_of(calls)
        payloads = payloads_of(task.encode, given)
        keys = None if idempotency_keys is None else keys_of(idempotency_keys, len(given))
        if not payloads:
            return []
        client = await self.client()
        await client.backend.places.learn_lane(task.lane)
        check_sizes(payloads, client.backend.max_payload_bytes)
        new: dict[int, NewExecution] = {}

        def prepare(part: Sequence[int]) -> None:
            for position, execution_id in zip(part, client.mint(task.lane, len(part)), strict=True):
                made = task.new_execution(execution_id, payloads[position])
                if keys is not None:
                    made = client.place(task.keyed(made, keys[position], *given[position]))
                new[position] = made

        if keys is not None:
            # Nothing is sent if a key is refused.
            prepare(range(len(payloads)))

        async def send(part: Sequence[int]) -> list[Run[Any] | EngineError]:
            if keys is None:
                prepare(part)
            return [
                outcome if isinstance(outcome, EngineError) else self._run(task, outcome)
                for outcome in await client.submit_many([new[position] for position in part])
            ]

        try:
            answers = await sent(list(map(len, payloads)), send)
        except EngineError as error:
            prepare([position for position in range(len(payloads)) if position not in new])
            is_one_call = len(new) <= PART and len({e.execution_id.tag for e in new.values()}) == 1
            if is_one_call and not getattr(error, "ambiguous", False):
                # The engine refused it.
                raise
            unsure = {n: self.get_run(new[n].execution_id, task) for n in sorted(new)}
            raise SubmitManyError({}, {}, unsure) from error
        return created(new, answers)

    def _run(self, task: Task[..., Any], outcome: CreateOutcome) -> Run[Any]:
        known = not isinstance(outcome, Created)
        return Run(self.client, outcome.execution_id, task.returns, task.name, duplicate=known)

    @overload
    def get_run(self, execution_id: str, task: Task[..., R]) -> Run[R]: ...

    @overload
    def get_run(self, execution_id: str, task: str | None = None) -> Run[Any]: ...

    def get_run(self, execution_id: str, task: Task[..., Any] | str | None = None) -> Run[Any]:
        """A handle on an execution by its id; with its task, results are typed.

        A UUID, or the first characters of an id, is enough if only one execution of the namespace
        has it. This sends nothing: the first call on the handle looks the execution up, and
        raises an error if there is none or more than one.

        >>> run = app.get_run(stored_id, greet)
        >>> print(await run.result(timeout="5s"))
        """
        known = as_task(self, "" if task is None else task)
        return Run(self.client, parse_name(execution_id), known.returns, known.name)

    def flow(
        self,
        kind: str,
        *,
        tags: Mapping[str, str] | None = None,
        namespace: str | None = None,
        flow_id: str | None = None,
    ) -> FlowBuilder:
        """Start to build a flow: a graph of tasks. The kind is a name for flows of this sort.

        Pass a UUID as `flow_id` if your program may run again: the same graph is stored only once.

        >>> flow = app.flow("thumbnails", tags={"shop.order": "17"})
        >>> photo = flow.add(fetch, "https://example.org/cat.png")
        >>> flow.add(resize, photo, width=300)
        >>> print(await (await flow.submit()).result(timeout="1m"))
        """
        return FlowBuilder(self, kind, tags, namespace, flow_id)

    def get_flow(self, flow_id: str) -> Flow:
        """A handle on an existing flow, by its id. It is looked up on first use.

        >>> print(await app.get_flow(stored_id).graph())
        """
        return Flow(self, flow_id)

    def worker(
        self,
        *,
        concurrency: int = 64,
        lanes: Sequence[str] | None = None,
        lane_weights: Mapping[str, int] | None = None,
        capabilities: Iterable[str] = (),
        namespaces: Iterable[str] = (),
        lease_ttl: Duration = 30,
        block_limit: Duration | None = None,
        batch: int = 64,
        scanners: bool = True,
        on_unknown_kind: Literal["fail", "release"] = "release",
        worker_id: str | None = None,
    ) -> AppWorker:
        """A worker for this application's tasks; `await worker.run()` serves.

        Without `lanes` it serves the lanes of all tasks, in equal turns: with `lane_weights`, such
        as `{"urgent": 3}`, some get more turns. Without `namespaces` it serves the application's
        own; `["*"]` means all of them, and several get equal shares. `batch` limits how many
        executions one call claims or completes. If a task blocks the event loop for longer than
        `block_limit` (default: three leases), the worker releases its other executions. Tasks that
        the application does not have wait for a worker that knows them; with
        `on_unknown_kind="fail"` they fail.
        """
        named = dict.fromkeys(task.lane for task in self.tasks.values())
        config = WorkerConfig(
            namespace=self.namespace,
            lanes=lanes or tuple(named) or ("default",),
            lane_weights=lane_weights or {},
            # Checked and kept as a tuple there.
            capabilities=cast("Sequence[str]", capabilities),
            namespaces=cast("Sequence[str]", namespaces),
            lease_ttl_ms=to_ms(lease_ttl, "lease_ttl"),
            block_limit_ms=None if block_limit is None else to_ms(block_limit, "block_limit"),
            max_concurrent_tasks=concurrency,
            batch=batch,
            scanners=scanners,
            worker_id=worker_id or default_worker_id(),
        )
        return AppWorker(self.location, self.tasks, config, on_unknown_kind=on_unknown_kind)

    def twin(self) -> Self:
        """The same application with connections of its own, for another event loop."""
        twin = copy.copy(self)
        twin._openings = {}  # noqa: SLF001
        return twin

    async def aclose(self) -> None:
        """Close this event loop's connections, and release the embedded Valkey.

        Workers and other event loops that still use the application keep the embedded Valkey.
        """
        await self.disconnect()
        self.location.close()

    async def disconnect(self) -> None:
        """Close connections; the next use opens new ones. The embedded Valkey keeps running."""
        self._forget_ended_loops()
        opening = self._openings.pop(asyncio.get_running_loop(), None)
        if opening is None:
            return
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().aclose()


class SyncFabric(SyncTwin[Fabric], Closing):
    """`Fabric` without `await`, safe to use from several threads.

    >>> with SyncFabric(app) as sync:
    ...     print(sync.submit(greet, "Ada").result(timeout=10))
    """

    def __init__(self, app: Fabric) -> None:
        self._portal = Portal("ff-sync-fabric")
        super().__init__(app.twin(), self._portal)
        self.namespace = app.namespace
        self.tasks = app.tasks

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
    def submit_many(
        self, task: Task[..., R], calls: Calls, idempotency_keys: Keys = None
    ) -> list[SyncRun[R]]: ...

    @overload
    def submit_many(
        self, task: str, calls: Calls, idempotency_keys: Keys = None
    ) -> list[SyncRun[Any]]: ...

    def submit_many(
        self, task: Any, calls: Calls, idempotency_keys: Keys = None
    ) -> list[SyncRun[Any]]:
        """Submit many executions of one task in few round trips, as `Fabric.submit_many` does."""
        try:
            runs: list[Run[Any]] = self._call(
                lambda app: app.submit_many(task, calls, idempotency_keys)
            )
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

    def flow(
        self,
        kind: str,
        *,
        tags: Mapping[str, str] | None = None,
        namespace: str | None = None,
        flow_id: str | None = None,
    ) -> SyncFlowBuilder:
        """Start to build a flow; see `Fabric.flow`."""
        return SyncFlowBuilder(self._target, self._portal, kind, tags, namespace, flow_id)

    def get_flow(self, flow_id: str) -> SyncFlow:
        """A handle on an existing flow, by its id."""
        return SyncFlow(self._target.get_flow(flow_id), self._portal)

    named = blocking(Fabric.named)
    worker = blocking(Fabric.worker, SyncAppWorker)
    disconnect = blocking(Fabric.disconnect)

    def client(self) -> SyncClient:
        """The client of this application; it is closed with this object."""
        return SyncClient(self._target.client, self._portal)

    def close(self) -> None:
        """Close connections and stop the private thread. The application stays usable."""
        # Not `aclose`: the embedded Valkey belongs to the application.
        self._portal.close(self._target.disconnect)
