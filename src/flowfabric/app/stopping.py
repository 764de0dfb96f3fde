"""SIGTERM and SIGINT in a process that serves, and what ends one that cannot stop by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import NoReturn

__all__ = ["Overdue", "end_process", "ends_within", "on_signals"]

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MARGIN_S = 5.0
"""What a drain may take beyond its grace before anyone doubts that it goes on."""
_BLOCKED_S = 3.0


class Overdue:
    """Ends the process when its event loop is still blocked some time after the first signal.

    For processes that are nothing but a worker. An event loop that turns finishes its drain by
    itself, however long that takes.
    """

    def __init__(self, grace_s: float, give_back: Callable[[], int]) -> None:
        self._after_s = grace_s + _MARGIN_S
        self._give_back = give_back
        """Called at the very end: the work others may go on with at once."""

    def watch(
        self, loop: asyncio.AbstractEventLoop, over: queue.SimpleQueue[int | None], number: int
    ) -> None:
        """Return when the drain is over; do not return when the loop is blocked."""
        while True:
            try:
                over.get(timeout=self._after_s)
            except queue.Empty:
                if _answers(loop):
                    continue
                log.critical(
                    "a task blocks the event loop and the grace is over: the process ends",
                    extra={"action": "worker_blocked"},
                )
                self._give_back()
                end_process(128 + number)
            return


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    turned = threading.Event()
    # A closed loop has nothing left to do.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(turned.set)
        return turned.wait(_BLOCKED_S)
    return True


@contextlib.contextmanager
def on_signals(stop: Callable[[], None], overdue: Overdue | None = None) -> Generator[None]:
    """The first SIGTERM or SIGINT asks for a drain, the second ends the process at once."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal may come while the loop is blocked, and inside any line of this thread: it is only
    # noted there, which is safe, and another thread speaks.
    heard: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    asked = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if asked:
            # Whatever still runs may never end, and the event loop may be blocked by it.
            os._exit(128 + number)
        asked = True
        heard.put(number)

    def listen() -> None:
        number = heard.get()
        if number is None:
            return
        log.info("stopping: waiting for running tasks", extra={"action": "worker_draining"})
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop)
        if overdue is not None:
            overdue.watch(loop, heard, number)

    threading.Thread(target=listen, name="ff-signals", daemon=True).start()
    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        heard.put(None)


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
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # A reader that is gone, or a stream that was closed.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
