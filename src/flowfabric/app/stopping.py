"""How a worker process stops on SIGTERM and SIGINT, and how `def` handlers are interrupted."""

import asyncio
import contextlib
import contextvars
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

from flowfabric.core.forks import at_fork, end_child, forget_on_fork, generation

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MARGIN_S = 5.0
"""How long after the grace period to check whether the event loop is blocked."""
_REQUESTED = 128
"""Added to a signal number that was requested by another process instead of received."""
_BLOCKED_S = 3.0
_FLUSH_S = 3.0


def _is_blocked(loop: asyncio.AbstractEventLoop) -> bool:
    turned = threading.Event()
    # A closed loop counts as not blocked.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(turned.set)
        return not turned.wait(_BLOCKED_S)
    return False


class _Signals:
    """Receives SIGTERM and SIGINT even while the main thread is blocked in user code.

    The interpreter writes each signal number to a socket that another thread reads: a handler
    function would have to wait for the main thread. The handler function only writes if user code
    has replaced the wakeup descriptor.
    """

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self._writer.settimeout(0)
        self._old_handlers: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._on_signal) for number in _SIGNALS
        }
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Signals must still wake the event loop. A duplicate, because the loop closes its own.
        self._next = None if self._old_fd == -1 else socket.socket(fileno=socket.dup(self._old_fd))
        forget_on_fork(self)

    def remove(self, *, ignore: bool) -> None:
        """Restore the handlers, or ignore signals from now on; `arrivals` ends."""
        if not self._old_handlers:
            return
        if ignore:
            self._old_handlers = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
        now = signal.set_wakeup_fd(self._old_fd)
        if now != self._writer.fileno():
            signal.set_wakeup_fd(now)
        self._restore()
        self._writer.close()

    def forget(self) -> None:
        """In a forked child: restore default handling, so that signals do not reach the parent."""
        if self._old_handlers:
            signal.set_wakeup_fd(-1)
            self._restore()

    def request(self, number: int) -> None:
        """Stop as if this signal had arrived, but never count as a second one. Thread-safe."""
        with contextlib.suppress(OSError):
            self._writer.send(bytes((number | _REQUESTED,)))

    def arrivals(self) -> Generator[int]:
        """Yield each signal and request until `remove`; yield 0 when the reader times out."""
        with self.reader, self._next or contextlib.nullcontext():
            while True:
                try:
                    data = self.reader.recv(1)
                except TimeoutError:
                    yield 0
                    continue
                if not data:
                    return
                if self._next is not None and not data[0] & _REQUESTED:
                    # If the buffer is full, the loop wakes anyway.
                    with contextlib.suppress(OSError):
                        self._next.send(data)
                if data[0] & ~_REQUESTED in _SIGNALS:
                    yield data[0]

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        current = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if current != self._writer.fileno():
            signal.set_wakeup_fd(current)
            with contextlib.suppress(OSError):
                self._writer.send(bytes((number,)))

    def _restore(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()


_before_fork = threading.local()


def _block_signals() -> None:
    """Block signals during a fork; otherwise the child would forward them to its parent."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


# `forget` was registered earlier, so it runs in the child before the release.
at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_unblock_signals)


@contextlib.contextmanager
def on_signals(
    stop: Callable[[], None],
    *,
    announce: Callable[[], object],
    grace_s: float | None = None,
    release: Callable[[], object] = lambda: None,
) -> Generator[Callable[[int], None]]:
    """Call `stop` on the first SIGTERM or SIGINT and end the process at once on the second.

    `announce` logs what the shutdown waits for, even while the event loop is blocked. The block
    gets a thread-safe function that acts like a first signal; later calls do nothing.

    Pass `grace_s` in processes that are only a worker. If the event loop is still blocked after
    that time, `release` gives the work back and the process ends. Signals that arrive after the
    block are ignored, because the process is about to exit.
    """
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: None
        return
    signals = _Signals()

    def listen() -> None:
        first = received = 0
        for number in signals.arrivals():
            # A service manager may signal this process after its supervisor requested a stop.
            received += 0 < number < _REQUESTED
            if not first:
                first = number & ~_REQUESTED
                announce()
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(stop)
                if grace_s is not None:
                    signals.reader.settimeout(grace_s + _MARGIN_S)
            elif received > 1:
                # Running tasks may never end and may block the event loop, so do not wait.
                os._exit(128 + number)
            elif not number and _is_blocked(loop):
                log.critical(
                    "stopping at once: a task still blocks the event loop after the grace period",
                    extra={"action": "worker_blocked"},
                )
                release()
                end_process(128 + first)

    threading.Thread(target=listen, name="ff-signals", daemon=True).start()
    try:
        yield signals.request
    finally:
        signals.remove(ignore=grace_s is not None)


@contextlib.contextmanager
def ends_within(seconds: float, code: int, report: Callable[[], None]) -> Generator[None]:
    """Call `report` and end the process if the block takes longer."""

    def give_up() -> None:
        report()
        end_process(code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_process(code: int) -> NoReturn:
    """Exit at once, from any thread, after flushing output and logs."""
    # On a thread with a time limit: a blocked thread may hold a stream's lock.
    flushing = threading.Thread(target=_flush, name="ff-flush", daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(code)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The pipe may be broken or the stream closed.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


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
        """The result. To stop the call use `interrupt`; cancelling this future does not."""
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
                    # Withdraw a pending exception, so that it cannot hit the thread's next call.
                    _raise_in(self._thread, None)
                    self._thread = None
            except Interrupted as error:
                self._error = error

    def deliver(self) -> None:
        """On the handler thread: resolve the future."""
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
            # A future does not accept StopIteration.
            error = RuntimeError("the handler raised StopIteration")
            error.__cause__ = self._error
        self.future.set_exception(error)
        # Mark it as retrieved: nobody may be awaiting it any longer.
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
            # Count as idle before delivering, so that the next call reuses this thread.
            with self._lock:
                self._idle += 1
            call.deliver()
            del call
