"""Running an application's tasks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from flowfabric.app import codec
from flowfabric.app.context import Context
from flowfabric.app.finite import NonFiniteNumber
from flowfabric.app.interrupt import HandlerThreads
from flowfabric.app.place import Place
from flowfabric.app.tasks import Task
from flowfabric.core.errors import ConfigError, LeaseLost
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.failures import HandlerFailure
from flowfabric.sdk.runtime import Handler, RunSummary, WorkerRuntime
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker

__all__ = ["AppWorker"]

log = logging.getLogger(__name__)

_Start = Callable[[ClaimedTask, list[Any], dict[str, Any]], Awaitable[Any]]
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class AppWorker:
    """A worker for the tasks of one application.

    `await worker.run()` serves until SIGTERM or SIGINT; `async with app.worker():` serves in the
    background of the block.
    """

    def __init__(
        self,
        place: Place,
        tasks: Mapping[str, Task[..., Any]],
        config: WorkerConfig,
        *,
        on_unknown_kind: Literal["fail", "release"] = "fail",
    ) -> None:
        if not tasks:
            raise ConfigError("worker", "there are no tasks: decorate a function with @app.task()")
        self.config = config
        self._place = place
        self._tasks = tasks
        self._on_unknown: Literal["fail", "release"] = on_unknown_kind
        self._threads = HandlerThreads()
        self._runtime: WorkerRuntime | None = None
        self._stop_asked = False
        self._background: asyncio.Task[RunSummary] | None = None

    async def run(
        self,
        *,
        grace_s: float = 30.0,
        on_shutdown: Literal["release", "fail"] = "release",
        signals: bool = True,
        ready: Callable[[], None] | None = None,
    ) -> RunSummary:
        """Serve until stopped, then drain; returns what was done."""
        # Settings are checked there, before the embedded server starts.
        worker = await Worker.connect(self.config, self._place.open)
        self._runtime = runtime = WorkerRuntime(worker, on_unknown_kind=self._on_unknown)
        for kind, task in self._tasks.items():
            runtime.on(kind, self._handler(task, runtime))
        if self._stop_asked:
            runtime.stop()
        try:
            with _on_signals(runtime.stop) if signals else contextlib.nullcontext():
                if ready is not None:
                    ready()
                return await runtime.run(grace_s=grace_s, on_shutdown=on_shutdown)
        finally:
            self._runtime, self._stop_asked = None, False
            self._threads.close()
            self._threads = HandlerThreads()
            await worker.aclose()

    def stop(self) -> None:
        """End a run: no new claims, running handlers may finish."""
        self._stop_asked = True
        if self._runtime is not None:
            self._runtime.stop()

    # --- handlers -------------------------------------------------------------------------

    def _handler(self, task: Task[..., Any], runtime: WorkerRuntime) -> Handler:
        start = self._start_async(task) if task.is_async else self._start_in_thread(task)
        loop = None if task.is_async else asyncio.get_running_loop()

        async def handle(claimed: ClaimedTask) -> tuple[bytes, str] | None:
            try:
                args, kwargs = task.convert(*codec.decode_call(claimed.input_payload))
                if task.takes_context:
                    args.insert(0, Context(claimed, lambda: runtime.shutting_down, loop))
                call = start(claimed, args, kwargs)
            except (ValueError, TypeError) as error:
                raise HandlerFailure(f"{task.name}: {error}", "extractor_payload_decode") from error
            result = await call
            try:
                return None if result is None else codec.encode(result)
            except NonFiniteNumber as error:
                reason = f"{task.name}: result: {error.details[0]}"
                raise HandlerFailure(reason, "permanent") from None

        return handle

    @staticmethod
    def _start_async(task: Task[..., Any]) -> _Start:
        function = task.function

        def start(_: ClaimedTask, args: list[Any], kwargs: dict[str, Any]) -> Awaitable[Any]:
            return function(*args, **kwargs)

        return start

    def _start_in_thread(self, task: Task[..., Any]) -> _Start:
        signature = inspect.signature(task.function)

        def start(claimed: ClaimedTask, args: list[Any], kwargs: dict[str, Any]) -> Awaitable[Any]:
            # Here, where a call that does not fit can be told from an error of the handler.
            signature.bind(*args, **kwargs)
            return self._in_thread(claimed, functools.partial(task.function, *args, **kwargs))

        return start

    async def _in_thread(self, claimed: ClaimedTask, function: Callable[[], Any]) -> Any:
        call = self._threads.start(function)
        cancel_handler = claimed.on_lease_lost

        def lost(error: LeaseLost) -> None:
            # At once and from the keeper's thread: the event loop may be blocked.
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
            # The permit stays taken until the thread has really stopped.
            await asyncio.wait([call.future])
            if call.future.exception() is None:
                return call.future.result()
            raise

    # --- in the background -------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        started = asyncio.Event()
        self._background = background = asyncio.create_task(
            self.run(signals=False, ready=started.set, grace_s=5.0)
        )
        waiting = asyncio.create_task(started.wait())
        try:
            await asyncio.wait([waiting, background], return_when=asyncio.FIRST_COMPLETED)
            if not started.is_set():
                await background
        except BaseException:
            # Nobody will leave a block that was never entered.
            self._background = None
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            raise
        finally:
            waiting.cancel()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if self._background is not None:
            await self._background
            self._background = None


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None]) -> Generator[None]:
    """The first SIGTERM or SIGINT asks for a drain, the second ends the process at once."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if asked:
            # Whatever still runs may never end, and the event loop may be blocked by it.
            os._exit(128 + number)
        asked = True
        loop.call_soon_threadsafe(announce)

    def announce() -> None:
        log.info("stopping: waiting for running tasks", extra={"action": "worker_draining"})
        stop()

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
