"""Running an application's tasks."""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, Self, TypeVar

from flowfabric.app import codec
from flowfabric.app.context import Context, SyncContext
from flowfabric.app.inputs import REFERRING, decode_referring, missing_note
from flowfabric.app.stopping import HandlerThreads, on_signals
from flowfabric.app.tasks import TaskFunction
from flowfabric.core.errors import ConfigError, LeaseLost, PayloadMismatch, ValidationError
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.connect import ServerLocation
from flowfabric.sdk.blocking import SyncTwin, blocking
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.failures import FinalFailure, HandlerFailure
from flowfabric.sdk.loop_thread import LoopCaller, Portal
from flowfabric.sdk.runtime import Handler, RunSummary, WorkerRuntime
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker

T = TypeVar("T")
AnyTask = TaskFunction[..., Any, ..., Any]


class AppWorker:
    """A worker for the tasks of one application.

    `await worker.run()` serves until SIGTERM or SIGINT; `async with app.worker():` serves in the
    background of the block. Without an event loop, `with app.worker():` serves on a thread.
    """

    def __init__(
        self,
        location: ServerLocation,
        tasks: Mapping[str, AnyTask],
        config: WorkerConfig,
        *,
        on_unknown_kind: Literal["fail", "release"] = "release",
    ) -> None:
        if not tasks:
            raise ConfigError("worker", "The app has no tasks. Decorate a function with @app.task.")
        self.config = config
        self._location = location
        self._tasks = tasks
        self._on_unknown: Literal["fail", "release"] = on_unknown_kind
        self._runtime: WorkerRuntime | None = None
        self._stop_asked = False
        self._background: asyncio.Task[RunSummary] | None = None
        self._portal: Portal | None = None

    async def run(
        self,
        *,
        grace_s: float = 30.0,
        on_shutdown: Literal["release", "fail"] = "release",
        signals: bool = True,
        ready: Callable[[], object] = lambda: None,
        until_idle: Callable[[], Awaitable[int]] | None = None,
    ) -> RunSummary:
        """Serve until stopped, then wait for running tasks; returns what was done."""
        # Checks settings before it starts the embedded Valkey.
        worker = await Worker.connect(
            *(self.config, self._location.open),
            tasks=sorted(self._tasks),
            no_others=self._on_unknown == "release",
        )
        self._threads = HandlerThreads()
        self._runtime = runtime = WorkerRuntime(worker, on_unknown_kind=self._on_unknown)
        for kind in self._tasks:
            runtime.on(kind, self._newest(kind, runtime))
        if self._stop_asked:
            runtime.stop()
        try:
            announce = functools.partial(self.announce_stop, grace_s)
            stopping = on_signals(runtime.stop, announce=announce)
            with stopping if signals else contextlib.nullcontext():
                ready()
                return await runtime.run(
                    grace_s=grace_s, on_shutdown=on_shutdown, until_idle=until_idle
                )
        finally:
            self._runtime, self._stop_asked = None, False
            self._threads.close()
            await worker.aclose()

    def stop(self) -> None:
        """Claim nothing more and return from `run` when running handlers have finished."""
        self._stop_asked = True
        if self._runtime is not None:
            self._runtime.stop()

    def announce_stop(self, grace_s: float) -> None:
        """Log what the shutdown waits for, whatever the log level."""
        if self._runtime is not None:
            self._runtime.announce_stop(grace_s)

    @property
    def backend(self) -> Backend | None:
        """The engine that it serves; None while it is not running."""
        return None if self._runtime is None else self._runtime.worker.backend

    def release_leases(self) -> int:
        """Release every lease so that other workers can take over at once. Thread-safe."""
        return 0 if self._runtime is None else self._runtime.worker.keeper.release_all()

    def _newest(self, kind: str, runtime: WorkerRuntime) -> Handler:
        """The handler of a task; picks up a redefinition, such as a rerun notebook cell."""
        task = self._tasks[kind]
        handle = self._handler(task, runtime)

        def run(claimed: ClaimedTask) -> Awaitable[Any]:
            nonlocal task, handle
            if self._tasks[kind] is not task:
                task = self._tasks[kind]
                handle = self._handler(task, runtime)
            return handle(claimed)

        return run

    def _handler(self, task: AnyTask, runtime: WorkerRuntime) -> Handler:
        arguments, function = task.arguments, task.function
        signature = inspect.signature(function)
        caller = LoopCaller(asyncio.get_running_loop())
        make_context = Context if task.is_async else functools.partial(SyncContext, caller=caller)

        async def handle(claimed: ClaimedTask) -> tuple[bytes, str] | None:
            try:
                if claimed.payload_encoding == REFERRING:
                    call_of = decode_referring(claimed.input_payload, claimed.claim.inputs)
                else:
                    call_of = codec.decode_call(claimed.input_payload)
                args, kwargs = arguments.convert(*call_of)
                if arguments.takes_context:
                    args.insert(0, make_context(claimed, runtime))
                try:
                    if task.is_async:
                        call = function(*args, **kwargs)
                    else:
                        # Checked before the call: a TypeError in it would be the handler's own.
                        signature.bind(*args, **kwargs)
                        bound = functools.partial(function, *args, **kwargs)
                        call = self._in_thread(claimed, bound)
                except TypeError as error:
                    given = args[arguments.takes_context :]
                    raise PayloadMismatch(arguments.misfit(given, kwargs, error)) from error
            except (PayloadMismatch, ValueError, TypeError) as error:
                category = PayloadMismatch.category
                note = missing_note(claimed.claim.inputs)
                raise HandlerFailure(f"{task.name}: {error}{note}", category) from error
            try:
                result = await call
            except Exception as error:
                if task.retry is None or task.retry.allows(error):
                    raise
                raise FinalFailure from error
            try:
                return None if result is None else codec.encode(result, "result")
            except ValidationError as error:
                # Not retried: another attempt would repeat the work and fail the same way.
                reason = _unwritable(result) or error.details[0].replace(": ", " ", 1)
                raise HandlerFailure(f"{task.name}: the {reason}", "permanent") from None

        return handle

    async def _in_thread(self, claimed: ClaimedTask, function: Callable[[], Any]) -> Any:
        call = self._threads.start(function)
        cancel_handler = claimed.on_lease_lost

        def lost(error: LeaseLost) -> None:
            # Runs on the keeper's thread, because the event loop may be blocked.
            call.interrupt(error)
            if cancel_handler is not None:
                cancel_handler(error)

        claimed.on_lease_lost = lost
        if claimed.lease_lost is not None:
            call.interrupt(claimed.lease_lost)
        try:
            return await asyncio.shield(call.future)
        except asyncio.CancelledError as cancelled:
            call.interrupt(claimed.lease_lost or cancelled)
            # Keep the permit until the thread has stopped.
            await asyncio.wait([call.future])
            if call.future.exception() is None:
                return call.future.result()
            raise

    async def __aenter__(self) -> Self:
        started = asyncio.get_running_loop().create_future()
        self._background = background = asyncio.create_task(
            self.run(signals=False, ready=lambda: started.set_result(None), grace_s=5.0)
        )
        try:
            await asyncio.wait([started, background], return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                await background
        except BaseException:
            # `__aexit__` does not run if `__aenter__` raises.
            self._background = None
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        if self._background is not None:
            await self._background
            self._background = None

    def __enter__(self) -> Self:
        self._portal = portal = Portal("ff-worker")
        try:
            portal.call(self.__aenter__)
        except BaseException:
            portal.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        portal, self._portal = self._portal, None
        if portal is not None:
            try:
                portal.call(self.__aexit__)
            finally:
                portal.close()


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
        # On the calling thread, because only the main thread receives signals.
        return asyncio.run(use(self._target))

    run = blocking(AppWorker.run)

    def __enter__(self) -> Self:
        self._target.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._target.__exit__()


def _unwritable(result: object) -> str | None:
    """The likely mistake if the result is a coroutine or generator."""
    if inspect.iscoroutine(result):
        result.close()
        return "result is a coroutine: await it and return its value"
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        return "result is a generator: return a list, or write output with `ctx.stream()`"
    return None
