"""Event loops on threads of their own: out of reach of blocking code, or for code that has none."""

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
_LAST_S = 3.0
"""How long `last` may take; what is left of `_JOIN_S` is for cancelling the calls."""


async def opened(connect: Connect) -> Backend:
    """A backend. Opening only reads, so a connection that is lost meanwhile is opened again."""
    for _ in range(2):
        try:
            return await connect()
        except TransportError as error:
            if not error.ambiguous:
                raise
    return await connect()


class LoopThread(ABC):
    """Runs `_main` in an event loop of its own, once."""

    crashed: ClassVar[tuple[str, str] | None] = None
    """The message of the log record about a crash after `_ready`, and its action."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopping = False
        self._reset()
        forget_on_fork(self)

    @abstractmethod
    async def _main(self) -> None:
        """Set `_ready` when set up. `stop` cancels this."""

    def forget(self) -> None:
        """In a forked child: the thread is gone and the loop is the parent's."""
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
        """Start and wait for `_ready`; raises what `_main` raised before. Ignored after `stop`."""
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
        """Whether the thread runs."""
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
        """Call this in the thread's loop, if it runs."""
        loop = self._loop
        if loop is not None:
            # The loop is closed when `_main` has ended already.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function)

    def _cancel(self) -> None:
        # Once: a second stop must not interrupt the cleanup of the first.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not asyncio.run(): it may start a thread at its end, which an exiting process cannot.
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
            # `stop` may have found no task to cancel.
            if not self._stopping:
                with contextlib.suppress(asyncio.CancelledError):
                    await self._main()
        finally:
            others = [task for task in asyncio.all_tasks() if task is not current]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


class PortalClosed(RuntimeError):
    """The portal takes no more calls."""


class Portal(LoopThread):
    """Runs coroutines for any number of threads. Starts with its first call.

    A forked child gets a thread and a loop of its own. `generation` then differs, and what
    belonged to the old loop must be opened again.
    """

    def __init__(self, name: str = "ff-portal") -> None:
        super().__init__(name)
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.generation = 0
        _open.add(self)

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` gives on the private loop and wait for its result."""
        self.start()
        # Under the lock: a coroutine handed to a loop that has stopped would never run.
        with self._gate:
            if self._stopping or self._loop is None:
                raise PortalClosed("this client is closed")
            if threading.current_thread() is self._thread:
                raise RuntimeError("a blocking call inside its own event loop would never return")
            future = asyncio.run_coroutine_threadsafe(make(), self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C ends the wait, not the work.
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run `last`, cancel the calls that wait, end the thread; then raise what `last` raised."""
        _open.discard(self)
        self._last = last
        self.stop(_JOIN_S)
        failure, self._failure = self._failure, None
        if failure is not None and not isinstance(failure, TimeoutError):
            raise failure

    def forget(self) -> None:
        """In a forked child: the calls to come use a new loop."""
        super().forget()
        self.generation += 1

    async def _main(self) -> None:
        self._ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            if self._last is not None:
                async with asyncio.timeout(_LAST_S):
                    await self._last()


# Weak: a portal that was never used must not live until the end.
_open: weakref.WeakSet[Portal] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    with contextlib.ExitStack() as closing:
        for portal in list(_open):
            closing.callback(portal.close)


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
