"""SIGTERM and SIGINT in a worker process, and how to end one that cannot stop by itself."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import NoReturn

from flowfabric.core.forks import forget_on_fork

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MARGIN_S = 5.0
"""How long a drain may take beyond its grace before the event loop is tested."""
_BLOCKED_S = 3.0
_FLUSH_S = 3.0


def _is_blocked(loop: asyncio.AbstractEventLoop) -> bool:
    turned = threading.Event()
    # A closed loop has nothing left to do.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(turned.set)
        return not turned.wait(_BLOCKED_S)
    return False


class _Signals:
    """Receives SIGTERM and SIGINT even while the main thread is blocked in user code.

    The interpreter writes the number of each signal into a socket, which another thread reads. A
    handler function alone would have to wait for the main thread. It writes only if user code has
    replaced the wakeup descriptor.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.settimeout(0)
        self._old_handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # The event loop must still wake for signals; a copy, because it closes its own.
        self._next = None if self._old_fd == -1 else socket.socket(fileno=os.dup(self._old_fd))
        forget_on_fork(self)

    def remove(self) -> None:
        """Restore handlers and descriptor; `arrivals` ends."""
        if not self._old_handlers:
            return
        now = signal.set_wakeup_fd(self._old_fd)
        if now != self._writer.fileno():
            signal.set_wakeup_fd(now)
        self._restore()
        self._writer.close()

    def forget(self) -> None:
        """In a forked child: signals end it like any process, and do not reach its parent."""
        if self._old_handlers:
            signal.set_wakeup_fd(-1)
            self._restore()

    def wait_at_most(self, seconds: float) -> None:
        """Make `arrivals` yield 0 after so long without a signal."""
        self._reader.settimeout(seconds)

    def arrivals(self) -> Generator[int]:
        """Each signal once, until removed."""
        with self._reader, self._next or contextlib.nullcontext():
            while True:
                try:
                    data = self._reader.recv(1)
                except TimeoutError:
                    yield 0
                    continue
                if not data:
                    return
                if self._next is not None:
                    # If its buffer is full, it wakes anyway.
                    with contextlib.suppress(OSError):
                        self._next.send(data)
                if data[0] in _SIGNALS:
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


class _Forking(threading.local):
    """Blocks signals during a fork: the child would pass them on to its parent."""

    def hold(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


_forking = _Forking()
# `forget` was registered earlier, so it runs in the child before the release.
os.register_at_fork(
    before=_forking.hold, after_in_parent=_forking.release, after_in_child=_forking.release
)


@contextlib.contextmanager
def on_signals(
    stop: Callable[[], None],
    *,
    grace_s: float | None = None,
    release: Callable[[], object] = lambda: None,
) -> Generator[None]:
    """The first SIGTERM or SIGINT calls `stop`, the second ends the process at once.

    With `grace_s`, for processes that are only a worker, an event loop that is still blocked after
    the grace period also ends the process: `release` hands its work to others first.
    """
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = _Signals()

    def listen() -> None:
        first = 0
        for number in signals.arrivals():
            if not first:
                first = number
                log.info("stopping: waiting for running tasks", extra={"action": "worker_draining"})
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(stop)
                if grace_s is not None:
                    signals.wait_at_most(grace_s + _MARGIN_S)
            elif number:
                # What still runs may never end, and may block the event loop.
                os._exit(128 + number)
            elif _is_blocked(loop):
                log.critical(
                    "stopping at once: a task still blocks the event loop after the grace period",
                    extra={"action": "worker_blocked"},
                )
                release()
                end_process(128 + first)

    threading.Thread(target=listen, name="ff-signals", daemon=True).start()
    try:
        yield
    finally:
        signals.remove()


@contextlib.contextmanager
def ends_within(seconds: float, code: int, report: Callable[[], None]) -> Generator[None]:
    """Call `report` and end the process if the block takes longer."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            report()
            end_process(code)

    threading.Thread(target=watch, name="ff-closing", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def end_process(code: int) -> NoReturn:
    """Exit at once, from any thread, after flushing output and logs."""
    # In a thread: a blocked one may hold the lock of the stream it prints to.
    flushing = threading.Thread(target=_flush, name="ff-flush", daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(code)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The reader has gone, or the stream is closed.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
