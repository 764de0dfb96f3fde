"""Stopping a `def` handler whose lease was lost."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Interruptible"]


class Interruptible:
    """A call on a pool thread into which another thread can raise an exception.

    Python delivers it between two bytecodes, so a handler that computes in Python stops at once;
    one that waits inside C code stops when it returns from there.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._pending: BaseException | None = None

    def __call__(self) -> Any:
        with self._lock:
            if self._pending is not None:
                raise self._pending
            self._thread = threading.get_ident()
        try:
            return self._call()
        finally:
            # Once this lock was held, no exception can reach the thread's next call.
            with self._lock:
                self._thread = None

    def interrupt(self, error: BaseException) -> None:
        """Raise the error's type in the running call, or refuse to start it."""
        with self._lock:
            self._pending = error
            if self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(_Interrupted)
                )


class _Interrupted(BaseException):
    """Not an `Exception`, so that a handler's own `except Exception` does not swallow it."""
