"""SIGTERM and SIGINT in a process that serves, and what ends one that cannot stop by itself."""

from __future__ import annotations

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
_HANDLED = 0x80
"""Marks a signal's number as written by our handler."""
_MARGIN_S = 5.0
"""What a drain may take beyond its grace before anyone doubts that it goes on."""
_BLOCKED_S = 3.0
_FLUSH_S = 3.0


class Overdue:
    """Ends the process when its event loop is still blocked some time after the first signal.

    For processes that are nothing but a worker. An event loop that turns finishes its drain by
    itself, however long that takes.
    """

    def __init__(self, grace_s: float, give_back: Callable[[], int]) -> None:
        self.after_s = grace_s + _MARGIN_S
        self._give_back = give_back
        """Called at the very end: the work others may go on with at once."""

    def end_if_blocked(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Return when the loop turns; do not return when it is blocked."""
        if _answers(loop):
            return
        log.critical(
            "a task blocks the event loop and the grace is over: the process ends",
            extra={"action": "worker_blocked"},
        )
        self._give_back()
        end_process(128 + number)


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    turned = threading.Event()
    # A closed loop has nothing left to do.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(turned.set)
        return turned.wait(_BLOCKED_S)
    return True


class _Signals:
    """Hears SIGTERM and SIGINT while the main thread runs user code, which may never end.

    The interpreter writes each signal's number into a socket as it arrives, and another thread
    reads there: a handler function would run in the main thread only, and not while that is
    blocked in C. The handler writes, too, should user code have taken the notices for itself.
    """

    def __init__(self) -> None:
        self._ear, self._mouth = socket.socketpair()
        self._mouth.settimeout(0)
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._former = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        # An event loop that must wake for other signals; a copy, since it closes its own.
        self._next = None if self._former == -1 else socket.socket(fileno=os.dup(self._former))
        forget_on_fork(self)

    def remove(self) -> None:
        """Put everything back; whoever listens is told that it is over."""
        if not self._before:
            return
        now = signal.set_wakeup_fd(self._former)
        if now != self._mouth.fileno():
            signal.set_wakeup_fd(now)
        self._restore()
        self._mouth.close()

    def forget(self) -> None:
        """Signals end a forked child as they end any process; its parent hears none of them."""
        if self._before:
            signal.set_wakeup_fd(-1)
            self._restore()

    def wait_at_most(self, seconds: float) -> None:
        """Have `arrivals` give a sign of life when nothing arrives for so long."""
        self._ear.settimeout(seconds)

    def arrivals(self) -> Generator[int]:
        """Each signal once, and 0 for a time without any, until removed."""
        noted = handled = told = 0
        with self._ear, self._next or contextlib.nullcontext():
            while True:
                try:
                    heard = self._ear.recv(1)
                except TimeoutError:
                    yield 0
                    continue
                if not heard:
                    return
                number = heard[0] & ~_HANDLED
                if heard[0] & _HANDLED:
                    handled += 1
                else:
                    self._pass_on(heard)
                    noted += number in _SIGNALS
                if max(noted, handled) > told:
                    told += 1
                    yield number

    def _pass_on(self, heard: bytes) -> None:
        if self._next is not None:
            # Its buffer may be full: then it wakes anyway.
            with contextlib.suppress(OSError):
                self._next.send(heard)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            self._mouth.send(bytes((number | _HANDLED,)))

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


class _Forking(threading.local):
    """Keeps signals from a child that would still pass them on to its parent."""

    def hold(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


_forking = _Forking()
# What forgets in the child was registered before, so it runs before the release.
os.register_at_fork(
    before=_forking.hold, after_in_parent=_forking.release, after_in_child=_forking.release
)


@contextlib.contextmanager
def on_signals(stop: Callable[[], None], overdue: Overdue | None = None) -> Generator[None]:
    """The first SIGTERM or SIGINT asks for a drain, the second ends the process at once."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = _Signals()

    def listen() -> None:
        asked = 0
        for number in signals.arrivals():
            if not asked:
                asked = number
                log.info("stopping: waiting for running tasks", extra={"action": "worker_draining"})
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(stop)
                if overdue is not None:
                    signals.wait_at_most(overdue.after_s)
            elif number:
                # Whatever still runs may never end, and the event loop may be blocked by it.
                os._exit(128 + number)
            elif overdue is not None:
                overdue.end_if_blocked(loop, asked)

    threading.Thread(target=listen, name="ff-signals", daemon=True).start()
    try:
        yield
    finally:
        signals.remove()


@contextlib.contextmanager
def ends_within(seconds: float, code: int, last_words: Callable[[], None]) -> Generator[None]:
    """End the process when the block takes longer: nobody can stop what it waits for."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            last_words()
            end_process(code)

    threading.Thread(target=watch, name="ff-closing", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def end_process(code: int) -> NoReturn:
    """End at once, from any thread; what was printed and logged is kept."""
    # The thread that prints may be blocked, and hold the lock of its stream.
    flushing = threading.Thread(target=_flush, name="ff-flush", daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(code)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # A reader that is gone, or a stream that was closed.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
