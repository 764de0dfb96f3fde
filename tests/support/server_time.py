"""How long the server is busy with a call."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Self

import pytest

from tests.support.engine import Engine

LONGEST_US = 20_000
ONCE_US = 60_000
"""For a call that a test makes once: no second try shows that the machine was busy."""
_TRIES = 8


async def cpu_us(engine: Engine) -> int:
    return (await _computed(engine))[0]


async def _computed(engine: Engine) -> tuple[int, int]:
    """The computing time of the server in microseconds, and how many functions it has called."""
    told: Any = await engine.backend.transport.call("INFO", "cpu", "commandstats")
    used = re.findall(rb"used_cpu_(?:user|sys)_main_thread:([\d.]+)", told)
    called = re.findall(rb"cmdstat_fcall:calls=(\d+)", told)
    return int(sum(map(float, used)) * 1_000_000), sum(map(int, called))


async def times(engine: Engine, function: str, call: Callable[[], Awaitable[Any]]) -> list[int]:
    """Microseconds the server spent in each call of a function, in order, by its slow log.

    The slow log also counts the time in which the machine ran something else; what the server
    computed is known, too, and no call took more.
    """
    ask = engine.backend.transport.call
    await ask("CONFIG", "SET", "slowlog-log-slower-than", 0, "slowlog-max-len", 100_000)
    await ask("SLOWLOG", "RESET")
    before = await cpu_us(engine)
    try:
        async with _CallMeter(engine, function) as meter:
            await call()
        computed = await cpu_us(engine) - before
        entries: Any = await ask("SLOWLOG", "GET", -1)
    finally:
        await ask("CONFIG", "SET", "slowlog-log-slower-than", 10_000, "slowlog-max-len", 128)
    called = [b"FCALL", function.encode()]
    took = [entry[2] for entry in entries[::-1] if entry[3][:2] == called]
    # Readers of streams have connections of their own, which the meter does not see.
    most = meter.took if len(meter.took) == len(took) else [computed] * len(took)
    return [min(pair) for pair in zip(took, most, strict=True)]


class _CallMeter:
    """Makes the calls of functions one at a time, and keeps what the server computed for each."""

    def __init__(self, engine: Engine, function: str) -> None:
        self._engine, self._function = engine, function
        self._calls: Any = engine.backend.calls
        self._fcall = self._calls.fcall
        self._one_at_a_time = asyncio.Lock()
        self.took: list[int] = []

    async def __aenter__(self) -> Self:
        self._calls.fcall = self._timed
        return self

    async def __aexit__(self, *_: object) -> None:
        self._calls.fcall = self._fcall

    async def _timed(self, function: str, *args: Any, **options: Any) -> Any:
        if function != self._function:
            return await self._fcall(function, *args, **options)
        async with self._one_at_a_time:
            # Sent together: the server writes its log to disk only after all three.
            first = asyncio.create_task(_computed(self._engine))
            called: asyncio.Task[Any] = asyncio.create_task(self._fcall(function, *args, **options))
            last = asyncio.create_task(_computed(self._engine))
            await asyncio.wait((first, called, last))
            (before, earlier), (after, later) = first.result(), last.result()
            # The second look overtook the call.
            if later == earlier:
                after = await cpu_us(self._engine)
            self.took.append(after - before)
            return called.result()


async def assert_short(
    engine: Engine,
    function: str,
    call: Callable[[], Awaitable[Any]],
    prepare: Callable[[], Awaitable[Any]] | None = None,
) -> None:
    """Of a few tries the best counts, call by call: the machine may have other work."""
    best: list[int] = []
    for _ in range(_TRIES):
        if prepare is not None:
            await prepare()
        took = await times(engine, function, call)
        best = [min(pair) for pair in zip(best, took, strict=False)] if best else took
        assert best, f"{function} was not called"
        if max(best) <= LONGEST_US:
            return
    pytest.fail(f"{function} took {best} µs")


async def command(engine: Engine, *args: Any) -> Any:
    return await engine.backend.transport.call(*args)


async def copy(engine: Engine, stored: str, names: Iterable[str]) -> None:
    """Store the same under many names."""
    for name in names:
        await command(engine, "COPY", stored, name)


def uuids(count: int) -> list[str]:
    return [f"00000000-0000-4000-8000-{n:012d}" for n in range(count)]


async def commands_run(engine: Engine) -> int:
    """How many commands the server has run, those inside of functions included."""
    told: Any = await command(engine, "INFO", "commandstats")
    return sum(map(int, re.findall(rb"calls=(\d+)", told)))


class ServerMeter:
    """How many commands the server runs inside of function calls, however busy the machine is.

    >>> async with ServerMeter(engine) as meter:
    ...     await engine.backend.flows.submit_flow(graph)
    >>> meter.most["ff_submit_flow"]
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: Any = engine.backend.calls
        self._fcall = self._calls.fcall
        self._one_at_a_time = asyncio.Lock()
        self.most: dict[str, int] = {}
        """The most in one call, by function."""

    async def __aenter__(self) -> Self:
        self._calls.fcall = self._counted
        return self

    async def __aexit__(self, *_: object) -> None:
        self._calls.fcall = self._fcall

    async def _counted(self, function: str, *args: Any, **options: Any) -> Any:
        async with self._one_at_a_time:
            before = await commands_run(self._engine)
            try:
                return await self._fcall(function, *args, **options)
            finally:
                ran = await commands_run(self._engine) - before
                self.most[function] = max(self.most.get(function, 0), ran)
