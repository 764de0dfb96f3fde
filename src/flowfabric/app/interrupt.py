"""Threads for `def` handlers, and a way to stop a handler that runs on one."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from flowfabric.core.forks import end_child, generation


class Interrupted(BaseException):
    """Raised inside a `def` handler that must stop; `reason` says why.

    Not an `Exception`, so that a handler's own `except Exception` does not swallow it.
    """

    reason: BaseException | None = None

    def __str__(self) -> str:
        return str(self.reason or "the handler must stop")


class ThreadCall:
    """A call on a handler thread into which another thread can raise an exception.

    Python delivers it between two bytecodes, so a handler that computes in Python stops at once;
    one that waits inside C code stops when it returns from there.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Ends with the thread's work. Cancelling it stops nothing: see `interrupt`."""
        self._function = function
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._reason: BaseException | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def interrupt(self, reason: BaseException) -> None:
        """Stop the running call, or refuse to start it. Only the first reason counts."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            if self._thread is not None:
                # Python raises a class, so the reason travels on one made for it.
                told = type("Interrupted", (Interrupted,), {"reason": reason})
                _raise_in(self._thread, told)

    def run(self) -> None:
        """On the handler thread: run the function and keep what it returned or raised."""
        born = generation()
        try:
            with self._lock:
                if self._reason is None:
                    self._thread = threading.get_ident()
            if self._thread is None:
                raise Interrupted  # noqa: TRY301
            self._result = self._context.run(self._function)
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the future
            self._error = error
        if generation() != born:
            end_child(self._error)
        while self._thread is not None:
            try:
                with self._lock:
                    # From here on no exception can reach the thread's next call.
                    _raise_in(self._thread, None)
                    self._thread = None
            except Interrupted as error:
                self._error = error

    def deliver(self) -> None:
        """On the handler thread: end the future."""
        # The loop is closed when the process is on its way out.
        with contextlib.suppress(RuntimeError):
            self.future.get_loop().call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self.future.done():
            return
        error = self._error
        if error is None:
            self.future.set_result(self._result)
            return
        if isinstance(error, StopIteration):
            # A future cannot carry it.
            error = RuntimeError("the handler raised StopIteration")
            error.__cause__ = self._error
        self.future.set_exception(error)
        # Nobody may be left to look at it.
        self.future.exception()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


class HandlerThreads:
    """A thread for every running `def` handler, reused by the next.

    The worker's permits bound how many run; a handler that cannot be stopped keeps its thread
    without taking one from others. Daemon threads, so that such a handler cannot hold up the end
    of the process.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def start(self, function: Callable[[], Any]) -> ThreadCall:
        """Run a function on a thread, in a copy of the caller's context."""
        call = ThreadCall(function)
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._count += 1
                name = f"ff-handler-{self._count}"
                threading.Thread(target=self._main, name=name, daemon=True).start()
        self._calls.put(call)
        return call

    def close(self) -> None:
        """End idle threads now and busy ones after their call."""
        with self._lock:
            for _ in range(self._count):
                self._calls.put(None)

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            # Before the result is seen, or the next call would start a thread it does not need.
            with self._lock:
                self._idle += 1
            call.deliver()
            del call
