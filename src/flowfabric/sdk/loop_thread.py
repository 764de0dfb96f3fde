"""Event loops on their own threads: safe from blocking code, and for code without a loop."""

import asyncio
import atexit
import contextlib
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from flowfabric.core.errors import TransportError
from flowfabric.core.forks import forget_on_fork, generation, leave_behind
from flowfabric.engine.api.backend import Backend

log = logging.getLogger(__name__)

T = TypeVar("T")

Connect = Callable[[], Awaitable[Backend]]
"""Opens a backend in the running event loop."""

_JOIN_S = 5.0
_CLEANUP_S = 3.0
"""How long `cleanup` may take; the rest of `_JOIN_S` is for cancelling calls."""


async def opened(connect: Connect) -> Backend:
    """A new backend. Opening only reads, so it is tried again if the connection breaks."""
    for _ in range(2):
        try:
            return await connect()
        except TransportError as error:
            if not error.ambiguous:
                raise
    return await connect()


class LoopThread(ABC):
    """Runs `_main` once, in its own event loop on its own thread."""

    crashed: ClassVar[tuple[str, str] | None] = None
    """Message and action of the log record if `_main` crashes after `_ready`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopping = False
        self._reset()
        forget_on_fork(self)

    @abstractmethod
    async def _main(self) -> None:
        """Must set `_ready` once it is set up. `stop` cancels it."""

    def forget(self) -> None:
        """In a forked child: drop the thread and the loop, which only exist in the parent."""
        leave_behind(self._loop, self._thread, self._task)
        self._reset()

    def _reset(self) -> None:
        self._gate = threading.Lock()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Start and wait for `_ready`; raises what `_main` raised before. No-op after `stop`."""
        with self._gate:
            if self._stopping:
                return
            if self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float | None = None) -> None:
        """Cancel `_main` and wait for the thread."""
        with self._gate:
            self._stopping = True
            thread = self._thread
        if thread is not None:
            self.post(self._cancel)
            thread.join(timeout)

    def post(self, function: Callable[[], object]) -> None:
        """Call the function in the thread's loop, if it is running."""
        loop = self._loop
        if loop is not None:
            # The loop is closed if `_main` has ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function)

    def _cancel(self) -> None:
        # Only once: a second stop must not interrupt the cleanup of the first.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not asyncio.run(): it may start a thread at the end, which fails in an exiting process.
        try:
            loop.run_until_complete(self._guarded())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set() and self.crashed is not None:
                message, action = self.crashed
                log.critical(message, exc_info=error, extra={"action": action})
        finally:
            loop.close()
            self._ready.set()

    async def _guarded(self) -> None:
        current = self._task = asyncio.current_task()
        try:
            # `stop` may have been called before there was a task to cancel.
            if not self._stopping:
                with contextlib.suppress(asyncio.CancelledError):
                    await self._main()
        finally:
            others = [task for task in asyncio.all_tasks() if task is not current]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


class PortalClosed(RuntimeError):
    """The portal is closed and accepts no more calls."""


class Portal(LoopThread):
    """Runs coroutines for any number of threads. Starts with its first call.

    A forked child gets its own thread and loop: `generation` changes, and what belonged to the old
    loop must be opened again.
    """

    def __init__(self, name: str = "ff-portal") -> None:
        super().__init__(name)
        self._cleanup: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.generation = 0
        _open_portals.add(self)

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` returns on the private loop and wait for its result."""
        self.start()
        # Under the lock, because a coroutine would never run in a loop that has stopped.
        with self._gate:
            if self._stopping or self._loop is None:
                raise PortalClosed("this client is closed")
            if threading.current_thread() is self._thread:
                raise RuntimeError("a blocking call inside its own event loop would never return")
            future = asyncio.run_coroutine_threadsafe(make(), self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C interrupts only this wait, so cancel the coroutine too.
            future.cancel()
            raise

    def close(self, cleanup: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run `cleanup`, cancel pending calls and end the thread. Raises what `cleanup` raised."""
        _open_portals.discard(self)
        self._cleanup = cleanup
        self.stop(_JOIN_S)
        failure, self._failure = self._failure, None
        if failure is not None and not isinstance(failure, TimeoutError):
            raise failure

    def forget(self) -> None:
        """In a forked child: later calls use a new loop."""
        super().forget()
        self.generation += 1

    async def _main(self) -> None:
        self._ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            if self._cleanup is not None:
                async with asyncio.timeout(_CLEANUP_S):
                    await self._cleanup()


# Weak, so that unused portals do not live until the process exits.
_open_portals: weakref.WeakSet[Portal] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    with contextlib.ExitStack() as closing:
        for portal in list(_open_portals):
            closing.callback(portal.close)


def refuse_after_fork(born: int) -> None:
    """Raise an error if this process was forked after generation `born`."""
    if generation() != born:
        raise RuntimeError(
            "This process was forked inside a handler: only its parent can use the context."
        )


class LoopCaller:
    """Runs coroutines on a loop that is already running on another thread."""

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
