"""The tasks that workers run in the scenarios."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from flowfabric.app.context import Context
from flowfabric.app.fabric import Fabric
from flowfabric.app.tasks import Task
from flowfabric.bench.arena import LANE


class Count:
    """Counts calls up to a goal and notes when the first and the last one came."""

    def __init__(self, goal: int, reached: Callable[[], None]) -> None:
        self.goal = goal
        self.first_ns = 0
        self._calls = 0
        self._reached = reached

    def tick(self) -> None:
        """One more call."""
        self._calls += 1
        if self._calls == 1:
            self.first_ns = time.monotonic_ns()
        if self._calls == self.goal:
            self._reached()


class BenchApp:
    """An application on the scenario's server: `noop`, `stamp`, `hold`, `ask` and `unwanted`."""

    def __init__(
        self, url: str, *, count: Count | None = None, started: Callable[[int], None] | None = None
    ) -> None:
        self.fabric = Fabric(url)
        self.count = count

        async def noop() -> None:
            if self.count is not None:
                self.count.tick()

        async def stamp() -> int:
            # CLOCK_MONOTONIC is one clock for all processes of the machine.
            return time.monotonic_ns()

        async def hold(item: int) -> None:
            if started is not None:
                started(item)
            await asyncio.Event().wait()

        async def ask(ctx: Context) -> int:
            await ctx.wait_for("go")
            return time.monotonic_ns()

        async def unwanted() -> None:
            raise AssertionError("no worker offers what this task requires")

        task = self.fabric.task
        self.noop: Task[[], Any] = task(lane=LANE)(noop)
        self.stamp: Task[[], Any] = task(lane=LANE)(stamp)
        self.hold: Task[[int], Any] = task(lane=LANE)(hold)
        self.ask: Task[[], Any] = task(lane=LANE)(ask)
        self.unwanted: Task[[], Any] = task(lane=LANE, capabilities={"bench-nobody"})(unwanted)
