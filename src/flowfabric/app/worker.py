"""Running an application's tasks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, Self

from flowfabric.app import codec
from flowfabric.app.context import Context
from flowfabric.app.interrupt import Interruptible
from flowfabric.app.place import Place
from flowfabric.app.tasks import Task
from flowfabric.core.errors import ConfigError
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.runtime import Handler, RunSummary, WorkerRuntime
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker

__all__ = ["AppWorker"]

log = logging.getLogger(__name__)


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
        self._pool: ThreadPoolExecutor | None = None
        self._runtime: WorkerRuntime | None = None
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
        await self._place.address()
        worker = await Worker.connect(self.config, self._place.open)
        self._runtime = runtime = WorkerRuntime(worker, on_unknown_kind=self._on_unknown)
        for kind, task in self._tasks.items():
            runtime.on(kind, self._handler(task, runtime))
        try:
            with _on_signals(runtime.stop) if signals else contextlib.nullcontext():
                if ready is not None:
                    ready()
                return await runtime.run(grace_s=grace_s, on_shutdown=on_shutdown)
        finally:
            await worker.aclose()
            if self._pool is not None:
                self._pool.shutdown(wait=False)
            self._runtime = None

    def stop(self) -> None:
        """End a run: no new claims, running handlers may finish."""
        if self._runtime is not None:
            self._runtime.stop()

    # --- handlers -------------------------------------------------------------------------

    def _handler(self, task: Task[..., Any], runtime: WorkerRuntime) -> Handler:
        call = self._call_async(task) if task.is_async else self._call_in_thread(task)
        loop = None if task.is_async else asyncio.get_running_loop()

        async def handle(claimed: ClaimedTask) -> tuple[bytes, str] | None:
            try:
                args, kwargs = task.convert(*codec.decode_call(claimed.input_payload))
            except (ValueError, TypeError) as error:
                await claimed.fail(f"{task.name}: {error}", "extractor_payload_decode")
                return None
            if task.takes_context:
                args.insert(0, Context(claimed, lambda: runtime.shutting_down, loop))
            result = await call(claimed, args, kwargs)
            return None if result is None else codec.encode(result)

        return handle

    @staticmethod
    def _call_async(
        task: Task[..., Any],
    ) -> Callable[[ClaimedTask, list[Any], dict[str, Any]], Awaitable[Any]]:
        function = task.function

        def call(_: ClaimedTask, args: list[Any], kwargs: dict[str, Any]) -> Awaitable[Any]:
            return function(*args, **kwargs)

        return call

    def _call_in_thread(
        self, task: Task[..., Any]
    ) -> Callable[[ClaimedTask, list[Any], dict[str, Any]], Awaitable[Any]]:
        function = task.function

        async def call(claimed: ClaimedTask, args: list[Any], kwargs: dict[str, Any]) -> Any:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.config.permits, "ff-handler")
            loop = asyncio.get_running_loop()
            run = Interruptible(functools.partial(function, *args, **kwargs))
            cancel_handler = claimed.on_lease_lost

            def lost(error: Any) -> None:
                run.interrupt(error)
                if cancel_handler is not None:
                    cancel_handler(error)

            claimed.on_lease_lost = lost
            try:
                return await loop.run_in_executor(self._pool, run)
            except asyncio.CancelledError:
                run.interrupt(asyncio.CancelledError())
                raise

        return call

    # --- in the background -------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        started = asyncio.Event()
        self._background = asyncio.create_task(
            self.run(signals=False, ready=started.set, grace_s=5.0)
        )
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait([waiting, self._background], return_when=asyncio.FIRST_COMPLETED)
        if not started.is_set():
            waiting.cancel()
            await self._background
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

    def on_signal() -> None:
        nonlocal asked
        if asked:
            raise SystemExit(130)
        asked = True
        log.info("stopping: waiting for running tasks", extra={"action": "worker_draining"})
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
