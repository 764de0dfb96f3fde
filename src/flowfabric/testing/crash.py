"""Crashes on purpose: a worker that stops at a chosen call, as if it had been killed."""

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any, Literal

from flowfabric.core.text import plural
from flowfabric.sdk.runtime import handled, live

When = Literal["before", "after"]


class Crashes:
    """The crashes of one test. A handler that crashed hangs until the end of the test."""

    def __init__(self) -> None:
        self._stuck: set[asyncio.Future[None]] = set()
        self._over = threading.Event()

    @contextlib.contextmanager
    def at(self, owner: object, name: str, number: int, when: When) -> Generator[None]:
        """Replace `owner.name` by a function that crashes the worker; see `TestFabric.crash_at`."""
        crash = _Crash(self, getattr(owner, name), number, when)
        inherited, own = name not in vars(owner), vars(owner).get(name)
        setattr(owner, name, crash.function())
        try:
            yield
        finally:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        if not crash.happened:
            raise AssertionError(f"No worker crashed: {crash.why_not(name)}.")

    async def hold(self) -> None:
        """Suspend an `async def` handler where it crashed."""
        stuck = asyncio.get_running_loop().create_future()
        self._stuck.add(stuck)
        await stuck

    def hold_thread(self) -> None:
        """Block a `def` handler where it crashed."""
        self._over.wait()
        raise asyncio.CancelledError

    async def release(self) -> None:
        """End the handlers that crashed in this event loop or in threads."""
        self._over.set()
        loop = asyncio.get_running_loop()
        here = {future for future in self._stuck if future.get_loop() is loop}
        self._stuck -= here
        for future in here:
            future.cancel()
        # They unwind in the next ticks of the loop.
        for _ in range(3 if here else 0):
            await asyncio.sleep(0)


class _Crash:
    """One function that crashes the worker whose handler calls it."""

    def __init__(
        self, crashes: Crashes, original: Callable[..., Any], number: int, when: When
    ) -> None:
        self._crashes = crashes
        self._original = original
        self._number = number
        self._before = when == "before"
        self._calls = 0
        self._blocking = False
        self.happened = False

    def why_not(self, name: str) -> str:
        if self._blocking:
            return f"{name} is not async. An async def handler crashes only at an await"
        calls = plural(self._calls, "call")
        return f"handlers made {calls} of {name}, and the crash is at call {self._number}"

    def function(self) -> Callable[..., Any]:
        original = self._original

        @functools.wraps(original)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            if not self._is_due():
                return await original(*args, **kwargs)
            if not self._before:
                await original(*args, **kwargs)
            self._kill()
            return await self._crashes.hold()

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._is_due() or self._in_event_loop():
                return original(*args, **kwargs)
            if not self._before:
                original(*args, **kwargs)
            self._kill()
            return self._crashes.hold_thread()

        if inspect.iscoroutinefunction(original):
            return awaited
        return called

    def _is_due(self) -> bool:
        """Whether a handler makes the call that crashes its worker."""
        if handled.get() is None:
            return False
        self._calls += 1
        return self._calls == self._number

    def _in_event_loop(self) -> bool:
        """Whether blocking this thread would also block the test."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            self._blocking = True
        return self._blocking

    def _kill(self) -> None:
        task = handled.get()
        for runtime in list(live):
            if task is not None and runtime.runs(task):
                self.happened = True
                runtime.simulate_kill(task)
