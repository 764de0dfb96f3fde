"""A private event loop on its own thread, for code that has none."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from flowfabric.core.forks import forget_on_fork, generation, leave_behind

T = TypeVar("T")

_JOIN_S = 5.0
_LAST_S = 3.0
"""How long `last` may take; what is left of `_JOIN_S` is for cancelling the calls."""


class PortalClosed(RuntimeError):
    """The portal takes no more calls."""


class Portal:
    """Runs coroutines for any number of threads. Starts with its first call.

    A forked child gets a thread and a loop of its own. `generation` then differs, and what
    belonged to the old loop must be opened again.
    """

    def __init__(self, name: str = "ff-portal") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.generation = 0
        forget_on_fork(self)
        _open.add(self)

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` gives on the private loop and wait for its result."""
        # Under the lock: a coroutine handed to a loop that has stopped would never run.
        with self._lock:
            loop = self._running()
            if threading.current_thread() is self._thread:
                raise RuntimeError(
                    "a blocking call from inside its own event loop would never return"
                )
            future = asyncio.run_coroutine_threadsafe(make(), loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C ends the wait, not the work.
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        """The loop, started by the first call. Call it under the lock."""
        if self._closed:
            raise PortalClosed("this client is closed")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name=self._name, daemon=True
            )
            self._thread.start()
        return self._loop

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run `last`, cancel the calls that wait, end the thread; then raise what `last` raised."""
        _open.discard(self)
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is None or thread is None:
            return
        ended = asyncio.run_coroutine_threadsafe(_wind_up(last), loop)
        try:
            ended.result(_JOIN_S)
        except TimeoutError:
            ended.cancel()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_JOIN_S)
            if not thread.is_alive():
                loop.close()

    def forget(self) -> None:
        """In a forked child: the thread is gone and the loop is the parent's."""
        leave_behind(self._loop, self._thread)
        self._lock = threading.Lock()
        self._loop = self._thread = None
        self.generation += 1


def refuse_after_fork(born: int) -> None:
    """Refuse a context's operation in a process that was forked after `born`."""
    if generation() != born:
        raise RuntimeError(
            "This process was forked inside a handler: only its parent can use the context."
        )


class LoopCaller:
    """Runs coroutines on a loop that another thread runs already."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._born = generation()

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` returns and wait for its result."""
        refuse_after_fork(self._born)
        operation = make()
        try:
            done = asyncio.run_coroutine_threadsafe(operation, self._loop)
        except RuntimeError:
            # The loop is closed, so the coroutine never starts.
            operation.close()
            raise
        return done.result()


# Weak: a forgotten portal must not live until the end.
_open: weakref.WeakSet[Portal] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    with contextlib.ExitStack() as closing:
        for portal in list(_open):
            closing.callback(portal.close)


async def _wind_up(last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    try:
        if last is not None:
            async with asyncio.timeout(_LAST_S):
                await last()
    finally:
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
