"""From ordinary code into an event loop: one private loop on its own thread."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from flowfabric.valkey.transport import forget_on_fork, leave_behind

__all__ = ["Portal", "iterate"]

T = TypeVar("T")

_JOIN_S = 5.0


class Portal:
    """Runs coroutines for any number of threads. Starts with its first call.

    A forked child gets a thread and a loop of its own: `generation` tells that what belonged to
    the old loop must be opened again.
    """

    def __init__(self, name: str = "ff-portal") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.generation = 0
        forget_on_fork(self)
        # Only a weak reference: a forgotten portal must not live until the end.
        atexit.register(_close, weakref.ref(self))

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` gives on the private loop and wait for its result."""
        loop = self._running()
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking call from inside its own event loop would never return")
        future = asyncio.run_coroutine_threadsafe(make(), loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C ends the wait, not the work.
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run `last`, cancel whatever is left, end the thread. Calls still waiting fail."""
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


def iterate(
    source: AsyncIterator[T], call: Callable[[Callable[[], Coroutine[Any, Any, list[T]]]], list[T]]
) -> Iterator[T]:
    """A plain iterator over what an async one gives; `call` runs coroutines on its loop."""

    async def next_one() -> list[T]:
        try:
            return [await anext(source)]
        except StopAsyncIteration:
            return []

    while one := call(next_one):
        yield one[0]


def _close(portal: weakref.ref[Portal]) -> None:
    alive = portal()
    if alive is not None:
        alive.close()


async def _wind_up(last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    if last is not None:
        await last()
    current = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not current]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
