"""Threads for `def` handlers, and a way to interrupt them."""

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

    Not an `Exception`, so that the handler's own `except Exception` does not catch it.
    """

    reason: BaseException | None = None

    def __str__(self) -> str:
        return str(self.reason or "the handler must stop")


class ThreadCall:
    """A call on a handler thread that another thread can interrupt.

    Python raises the exception between two bytecodes: Python code stops at once, C code when it
    returns.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """The result. Cancelling it does not stop the call: use `interrupt`."""
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
                # Python raises a class, not an instance, so the reason needs its own class.
                _raise_in(self._thread, type("Interrupted", (Interrupted,), {"reason": reason}))

    def run(self) -> None:
        """On the handler thread: run the function and keep its result or error."""
        started_in = generation()
        try:
            with self._lock:
                if self._reason is None:
                    self._thread = threading.get_ident()
            if self._thread is None:
                raise Interrupted  # noqa: TRY301
            self._result = self._context.run(self._function)
        except BaseException as error:  # noqa: BLE001 - the future raises it
            self._error = error
        if generation() != started_in:
            end_child(self._error)
        while self._thread is not None:
            try:
                with self._lock:
                    # After this, no exception can reach the thread's next call.
                    _raise_in(self._thread, None)
                    self._thread = None
            except Interrupted as error:
                self._error = error

    def deliver(self) -> None:
        """On the handler thread: end the future."""
        # The loop may be closed while the process exits.
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
        # Mark it as retrieved: the caller may be gone.
        self.future.exception()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


class HandlerThreads:
    """A thread for every running `def` handler, reused by the next.

    The worker's permits limit how many run. They are daemon threads, so that a handler that cannot
    be stopped does not keep the process alive.
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
            # Before delivering the result, so that the next call reuses this thread.
            with self._lock:
                self._idle += 1
            call.deliver()
            del call
