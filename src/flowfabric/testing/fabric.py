"""The fixtures' objects: they point applications at the test engine and run their work."""

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any, Self, TypeVar, cast

import msgspec

from flowfabric.app.fabric import Fabric, SyncFabric
from flowfabric.app.run import Run, SyncRun
from flowfabric.app.tasks import TaskFunction
from flowfabric.app.worker import AppWorker
from flowfabric.core.contracts.executions import ExecutionSummary
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import ConfigError
from flowfabric.core.state import PublicState
from flowfabric.engine.api.reads import Filter
from flowfabric.engine.overview import Wait, matching
from flowfabric.sdk.runtime import live
from flowfabric.testing.crash import Crashes, When
from flowfabric.testing.engine import Clock, TestEngine

F = TypeVar("F", bound=Fabric)

_ENDED = frozenset(
    [
        *(PublicState.COMPLETED, PublicState.FAILED, PublicState.CANCELLED),
        *(PublicState.EXPIRED, PublicState.SKIPPED),
    ]
)


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """An execution that ended, and how."""

    task: str
    state: PublicState
    """Compares with text: `ended.state == "completed"`."""
    result: Any = None
    """What the handler returned."""
    reason: str | None = None
    """Why it failed, was cancelled or expired."""
    attempts: int
    run: Run[Any]


class TestFabric(Fabric):
    """An application on the test engine. Point your own at it with `use`.

    >>> async def test_a_greeting(fabric: TestFabric) -> None:
    ...     fabric.use(app)
    ...     run = await greet.submit("Ada")
    ...     await fabric.drain()
    ...     assert await run.result() == "Hello, Ada!"
    """

    __test__ = False

    def __init__(self, engine: TestEngine) -> None:
        super().__init__()
        self._engine = engine
        self._crashes = Crashes()
        self._redirections = contextlib.ExitStack()
        self._apps: list[Fabric] = []
        self._seen: set[tuple[str, str | None]] = set()
        self.clock = Clock(engine)
        """The engine's clock: `fabric.clock.advance("1h")`."""

    def use(self, app: F) -> F:
        """Run an application on the test engine until the test ends; returns the application."""
        self._redirections.enter_context(self._redirected(app))
        self._apps.append(app)
        return app

    @contextlib.contextmanager
    def _redirected(self, app: Fabric) -> Generator[None]:
        # Set the application's connected clients aside until the end of the test.
        openings, app._openings = app._openings, {}  # noqa: SLF001
        try:
            with app.location.redirected(self._engine.address):
                yield
        finally:
            app._openings = openings  # noqa: SLF001

    async def drain(self, timeout: Duration = 30) -> list[Ended]:
        """Run everything that can run now, until nothing is left; returns what ended.

        The list also includes what ended between the last call and this one, in the order in which
        it ended. To run delayed work and retries, call `fabric.clock.advance()` first. After
        `timeout` of real time it raises `TimeoutError`.
        """
        await self._run_all(timeout)
        return await self._newly_ended()

    async def _run_all(self, timeout: Duration) -> None:
        limit_s = to_ms(timeout, "timeout") / 1000
        work = self._worker_of_all().run(signals=False, until_idle=self._run_timers)
        draining = asyncio.create_task(work)
        try:
            await asyncio.wait([draining], timeout=limit_s)
            if not draining.done():
                kinds = {row.execution_kind for row in await self._rows("active")}
                what = ", ".join(sorted(kinds)) or "The worker"
                raise TimeoutError(f"{what} did not finish within {limit_s:g} s.")
            await draining
        finally:
            draining.cancel()
            await asyncio.wait([draining])

    def _all_tasks(self) -> dict[str, TaskFunction[..., Any, ..., Any]]:
        return {name: task for app in (self, *self._apps) for name, task in app.tasks.items()}

    def _worker_of_all(self) -> AppWorker:
        """A worker for the tasks of all applications in use, with every capability they need."""
        if not (tasks := self._all_tasks()):
            problem = "There is nothing to run. Point the fixture at your app: fabric.use(app)."
            raise ConfigError("drain", problem)
        everything = Fabric()
        everything.location, everything.tasks = self.location, tasks
        policies = [task.shared.policy for task in tasks.values()]
        needed = [
            capability
            for policy in policies
            if policy is not None
            for capability in policy.routing_requirements.required_capabilities
        ]
        return everything.worker(capabilities=needed, namespaces=["*"], scanners=False)

    async def _run_timers(self) -> int:
        return await asyncio.to_thread(self._engine.run_timers)

    async def _rows(self, *states: str) -> list[ExecutionSummary]:
        pages = matching((await self.client()).backend, Filter())
        return [
            row async for page in pages for row in page.executions if row.public_state in states
        ]

    async def _newly_ended(self) -> list[Ended]:
        rows = {(row.execution_id, row.completed_at): row for row in await self._rows(*_ENDED)}
        new = [row for key, row in rows.items() if key not in self._seen]
        self._seen |= rows.keys()
        new.sort(key=lambda row: int(row.completed_at or 0))
        return list(await asyncio.gather(*map(self._ended, new)))

    async def _ended(self, row: ExecutionSummary) -> Ended:
        kind = row.execution_kind
        run: Run[Any] = self.get_run(row.execution_id, self._all_tasks().get(kind, kind))
        info = await run.info()
        completed = info.public_state is PublicState.COMPLETED
        return Ended(
            task=kind,
            state=info.public_state,
            result=await run.result() if completed else None,
            reason=info.failure_reason or info.cancellation_reason,
            attempts=info.total_attempt_count,
            run=run,
        )

    async def wait_until_suspended(
        self, run: Run[Any] | SyncRun[Any], timeout: Duration = 10
    ) -> Wait:
        """Wait until the handler of a run waits for an answer; returns its question.

        Unless a worker runs in the background of the test, this runs what can run now.
        """
        if not live:
            await self._run_all(timeout)
        return await self.get_run(run.id).wait_until_suspended(timeout)

    @contextlib.contextmanager
    def crash_at(
        self, owner: object, name: str, *, call: int = 1, when: When = "before"
    ) -> Generator[None]:
        """Kill the worker when one of its handlers awaits the function `owner.name`.

        `owner` is a module or a class. The worker stops as if its process had been killed: the
        handler never continues, nothing more is stored, and its leases expire when you advance the
        clock. `when="after"` lets the call finish first. Raises `AssertionError` if the block ends
        without a crash.

        >>> with fabric.crash_at(shop, "charge_card", when="after"):
        ...     await fabric.drain()
        >>> fabric.clock.advance("1m")
        >>> await fabric.drain()
        """
        with self._crashes.at(owner, name, call, when):
            yield

    async def disconnect(self) -> None:
        """Close the connections of all applications in use, and end handlers that crashed."""
        await self._crashes.release()
        for app in self._apps:
            await app.disconnect()
        await super().disconnect()

    def __enter__(self) -> Self:
        self._engine.empty()
        self._redirections.enter_context(self._redirected(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._redirections.close()


class SyncTestFabric(SyncFabric):
    """`TestFabric` without `await`.

    >>> def test_a_greeting(sync_fabric: SyncTestFabric) -> None:
    ...     shop = sync_fabric.use(app)
    ...     run = shop.submit(greet, "Ada")
    ...     sync_fabric.drain()
    ...     assert run.result() == "Hello, Ada!"
    """

    def __init__(self, fabric: TestFabric) -> None:
        super().__init__(fabric)
        self._fabric = fabric
        self._twin = cast("TestFabric", self._target)
        self.clock = fabric.clock
        """The engine's clock: `sync_fabric.clock.advance("1h")`."""
        self._used = contextlib.ExitStack()

    def use(self, app: Fabric) -> SyncFabric:
        """Run an application on the test engine until the test ends; returns its sync form."""
        return self._used.enter_context(SyncFabric(self._fabric.use(app)))

    def drain(self, timeout: Duration = 30) -> list[Ended]:
        """Run everything that can run now, until nothing is left; returns what ended."""
        return self._portal.call(lambda: self._twin.drain(timeout))

    def wait_until_suspended(self, run: Run[Any] | SyncRun[Any], timeout: Duration = 10) -> Wait:
        """Wait until the handler of a run waits for an answer; returns what it asks."""
        return self._portal.call(lambda: self._twin.wait_until_suspended(run, timeout))

    def crash_at(
        self, owner: object, name: str, *, call: int = 1, when: When = "before"
    ) -> contextlib.AbstractContextManager[None]:
        """Kill the worker when one of its handlers calls `owner.name`; see `TestFabric`."""
        return self._fabric.crash_at(owner, name, call=call, when=when)

    def close(self) -> None:
        """Close the connections of all applications in use, and end handlers that crashed."""
        with self._used:
            super().close()
