"""A coroutine on a thread of its own, out of reach of code that blocks the worker's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from flowfabric.core.errors import TransportError
from flowfabric.core.forks import forget_on_fork, leave_behind
from flowfabric.engine.api.backend import Backend

log = logging.getLogger(__name__)

Connect = Callable[[], Awaitable[Backend]]
"""Opens a backend in the running event loop."""


async def opened(connect: Connect) -> Backend:
    """A backend. Opening only reads, so a connection that is lost meanwhile is opened again."""
    for tries_left in (2, 1, 0):
        try:
            return await connect()
        except TransportError as error:
            if not (error.ambiguous and tries_left):
                raise
    raise AssertionError("unreachable")


class LoopThread:
    """Runs `main` in an event loop of its own, once. `main` calls `ready` when it is set up.

    A crash after that is logged with `crashed`: what has ended, and the record's action.
    """

    def __init__(
        self, name: str, main: Callable[[], Coroutine[Any, Any, None]], crashed: tuple[str, str]
    ) -> None:
        self._name = name
        self._main = main
        self._crashed = crashed
        self._failure: BaseException | None = None
        self._stopping = False
        self._reset()
        forget_on_fork(self)

    def forget(self) -> None:
        """In a forked child: the thread is gone and the loop is the parent's."""
        leave_behind(self._loop, self._thread, self._task)
        self._reset()

    def _reset(self) -> None:
        self._gate = threading.Lock()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Start and wait for `ready`; raises what `main` raised before. Ignored after `stop`."""
        with self._gate:
            if self._stopping or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def ready(self) -> None:
        """Let `start` return."""
        self._ready.set()

    @property
    def is_ready(self) -> bool:
        """Whether `start` has returned, or is about to."""
        return self._ready.is_set()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Cancel `main` and wait for the thread."""
        with self._gate:
            self._stopping = True
            thread = self._thread
        if thread is not None:
            self.call(self._cancel)
            thread.join()

    def call(self, function: Callable[[], object]) -> None:
        """Call this in the thread's loop, if it runs."""
        loop = self._loop
        if loop is not None:
            # The loop is closed when `main` has ended already.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function)

    def _cancel(self) -> None:
        # Once: a second stop must not interrupt the cleanup of the first.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _run(self) -> None:
        try:
            asyncio.run(self._guarded())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                message, action = self._crashed
                log.critical(message, exc_info=error, extra={"action": action})
        finally:
            self._ready.set()

    async def _guarded(self) -> None:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        # `stop` may have found no loop to call.
        if not self._stopping:
            with contextlib.suppress(asyncio.CancelledError):
                await self._main()
