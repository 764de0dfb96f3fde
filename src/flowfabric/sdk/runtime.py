"""Runs the handlers of claimed tasks, and notices one that blocks the event loop."""

import asyncio
import contextlib
import gc
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context, ContextVar
from copy import copy
from functools import partial
from typing import Any

import msgspec

from flowfabric.core.errors import LeaseLost
from flowfabric.core.forks import end_child, generation
from flowfabric.core.text import duration, plural
from flowfabric.engine.layers.tracing import AttemptTrace
from flowfabric.sdk.endings import Encoded, Endings, FailOrRelease, RunSummary
from flowfabric.sdk.lease_keeper import HeldLease
from flowfabric.sdk.logs import count_by_kind, log_always, log_normally, log_task
from flowfabric.sdk.task import ClaimedTask, Parked
from flowfabric.sdk.worker import Worker

log = logging.getLogger(__name__)

Handler = Callable[[ClaimedTask], Awaitable[bytes | Encoded | None]]
"""Handles one task; what it returns becomes the result."""

_CANCEL_WAIT_S = 2.0
"""How long a cancelled handler may take to stop before its lease is released anyway."""

handled: ContextVar[ClaimedTask | None] = ContextVar("handled", default=None)
"""The task whose handler is running; asyncio tasks that the handler starts inherit it."""
live: "weakref.WeakSet[WorkerRuntime]" = weakref.WeakSet()
"""The runtimes that are serving in this process."""
_POLL_S = 0.02
_STOP_REPORT_S = 10.0
"""How often a stopping worker logs what it is waiting for."""
_WARN_S = 3.0
_FRAMES = 12
_CLAIMS_NOTHING = "This worker claims nothing until the loop runs again."
_ADVICE = (
    "no other task of this worker can run. "
    "Declare the task with `def`, or call blocking code with asyncio.to_thread()."
)


class WorkerRuntime:
    """Runs registered handlers for the tasks that a worker claims.

    >>> runtime = WorkerRuntime(worker)
    >>> runtime.on("resize", resize)
    >>> summary = await runtime.run()
    """

    def __init__(self, worker: Worker, *, on_unknown_kind: FailOrRelease = "fail") -> None:
        self.worker = worker
        self._handlers: dict[str, Handler] = {}
        self._running: dict[ClaimedTask, asyncio.Task[None]] = {}
        self._cancels_handlers = self._serves = False
        self._born = generation()
        # The task that called `run`, and how often it had been cancelled by then.
        self._runner: tuple[asyncio.Task[Any] | None, int] = None, 0
        self._stopping = asyncio.Event()
        self._stop_line = log_normally
        self._stop_logged = False
        self._scanners = worker.new_scanners()
        self._endings = Endings(worker, self._scanners, on_unknown_kind, self._cancels, self._start)
        self.summary = self._endings.summary
        # Scanners repeat lost doorbells, so a process with scanners can poll half as often.
        listen_s = worker.claims.poll_s * (2 if worker.config.scanners else 1)
        self._claiming = worker.source.new_loop(
            self._start, batch=worker.config.batch, listen_s=listen_s
        )

    def on(self, kind: str, handler: Handler) -> None:
        """Register the handler of an execution kind; a second one replaces the first."""
        self._handlers[kind] = handler
        if self._serves:
            self._offer_tasks()

    def _offer_tasks(self) -> None:
        leaves_others = self._endings.on_unknown_kind == "release"
        self.worker.offer_tasks(sorted(self._handlers), no_others=leaves_others)

    def runs(self, task: ClaimedTask) -> bool:
        """Whether the handler of this task runs here."""
        return task in self._running

    @property
    def shutting_down(self) -> bool:
        """Whether the worker is stopping; long handlers should finish soon."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Claim nothing more; running handlers may finish."""
        self._stopping.set()
        self._claiming.stop()

    def simulate_kill(self, last: ClaimedTask) -> None:
        """Stop as if the process were killed, from any thread. Only tests call it.

        Nothing more is stored and no lease is released. Cancels every handler except that of
        `last`.
        """
        self._running[last].get_loop().call_soon_threadsafe(self._kill, last)

    def _kill(self, last: ClaimedTask) -> None:
        self.worker.killed = True
        stopped, self._running = self._running, {}
        for task, running in stopped.items():
            task.finish("killed")
            if task is not last:
                running.cancel("the worker was killed")
        self.stop()

    def announce_stop(self, grace_s: float) -> None:
        """Log what the shutdown waits for, whatever the log level. Thread-safe."""
        self._stop_line = log_always
        self._log_stopping(grace_s)

    def _log_stopping(self, grace_s: float) -> None:
        if self._stop_logged:
            return
        self._stop_logged = True
        grace_ms, running = round(grace_s * 1000), list(self._running)
        text = "stopping: no task is running"
        if running:
            text = f"stopping: waiting up to {duration(grace_ms)} for {count_by_kind(running)}"
        about = {"action": "worker_draining", "tasks": len(running), "grace_ms": grace_ms}
        self._stop_line(logging.INFO, text, **about)

    async def run(
        self,
        *,
        grace_s: float = 30.0,
        on_shutdown: FailOrRelease = "release",
        until_idle: Callable[[], Awaitable[int]] | None = None,
    ) -> RunSummary:
        """Serve until `stop()`, then wait up to `grace_s` and release what is still running.

        `until_idle` runs due timers and returns how many it ran; with it, serve only until nothing
        more can run now. Permanent errors, such as a wrong password, are raised.
        """
        self._endings.on_shutdown = on_shutdown
        live.add(self)
        current = asyncio.current_task()
        self._runner = current, 0 if current is None else current.cancelling()
        # An earlier run may have made calls fail fast while it stopped.
        self.worker.backend.meta.fail_fast(enabled=False)
        self._serves = True
        self._offer_tasks()
        keeper = self.worker.keeper
        watch = LoopWatch(self.worker.config.longest_block_s, 2 * keeper.check_every_s)
        keeper.find_stuck = watch.stuck
        claim = self._claiming.run if until_idle is None else partial(self._until_idle, until_idle)
        scanning, claiming, reporting = (
            asyncio.create_task(part()) for part in (self._scan, claim, self._endings.log_progress)
        )
        try:
            done, _ = await asyncio.wait((scanning, claiming), return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        except asyncio.CancelledError:
            grace_s = 0.0
            raise
        finally:
            self.stop()
            if not self._running and not self._endings.pending:
                self.worker.backend.meta.fail_fast()
            # A claim in flight may return leases that must be released.
            await asyncio.wait((claiming,), timeout=_CANCEL_WAIT_S)
            await self._drain(grace_s)
            keeper.find_stuck = None
            self.worker.backend.meta.fail_fast()
            for part in (scanning, claiming, reporting):
                part.cancel()
            await asyncio.wait((scanning, claiming, reporting))
            if self._scanners is not None:
                await asyncio.to_thread(self._scanners.stop)
            live.discard(self)
        return self.summary

    async def _until_idle(self, run_timers: Callable[[], Awaitable[int]]) -> None:
        """Claim until nothing can run now and no running handler could submit more."""
        while not self.shutting_down:
            progress = await run_timers() > 0
            for task in await self.worker.claim_many():
                self._start(task)
                progress = True
            if self._running:
                running = list(self._running.values())
                # A running handler may wait for what it submitted, so claim again before it ends.
                await asyncio.wait(running, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            elif self._endings.pending:
                await self._endings.drain()
            elif not progress:
                return

    async def _scan(self) -> None:
        if self._scanners is not None:
            await asyncio.to_thread(self._scanners.start)
        await self._stopping.wait()

    def _start(self, task: ClaimedTask) -> None:
        if self.worker.killed:
            task.finish("killed")
            return
        if not task.held.alive:
            # The reply was processed too late, for example because code blocked the loop.
            reason = "the lease expired before the task started"
            self._endings.abandon(task, LeaseLost("lease_expired", reason))
            return
        handling = self._handle(task) if task.trace is None else self._trace(task, task.trace)
        running = asyncio.create_task(handling)
        self._running[task] = running
        loop = running.get_loop()

        def lost(error: LeaseLost) -> None:
            loop.call_soon_threadsafe(running.cancel, str(error))

        task.on_lease_lost = lost

    async def _trace(self, task: ClaimedTask, trace: AttemptTrace) -> None:
        with trace.running():
            await self._handle(task)
            if task.finished_by is None:
                trace.queued()

    async def _handle(self, task: ClaimedTask) -> None:
        queued = False
        handled.set(task)
        try:
            handler = self._handlers.get(task.execution_kind)
            if handler is None:
                await self._endings.unknown(task)
                return
            try:
                if task.claim.attempt_timeout_ms is None:
                    result = await handler(task)
                else:
                    result = await self._within_timeout(task, handler)
            finally:
                if generation() != self._born:
                    _leave_fork()
            if task.finished_by is None:
                if task.wrote_output:
                    await task.flush_output()
                self._endings.add(task, result)
                queued = True
            else:
                self._endings.count(task)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            await self._handler_raised(task, error)
        finally:
            # Break the reference cycle with the asyncio task, whose context refers to this task.
            # One cycle per execution costs a quarter of the worker's CPU time in collections.
            task.on_lease_lost = None
            self._running.pop(task, None)
            if not queued and task.finished_by is None:
                self._endings.abandon(task, RuntimeError("the worker was stopped"))

    async def _within_timeout(self, task: ClaimedTask, handler: Handler) -> bytes | Encoded | None:
        """Stop the handler at the attempt timeout; the engine decides whether it has passed."""
        limit = asyncio.timeout((task.claim.attempt_timeout_ms or 0) / 1000)
        try:
            async with limit:
                return await handler(task)
        except TimeoutError:
            if not limit.expired():
                raise
        await self._endings.timed_out(task)
        return None

    async def _handler_raised(self, task: ClaimedTask, error: BaseException) -> None:
        # Not isinstance(): it reads `__class__`, which may be user code that raises.
        kind = type(error)
        if issubclass(kind, Parked):
            self._endings.count(task)
        elif kind is GeneratorExit and not _is_current(self._running.get(task)):
            # Python closes the coroutine because its loop no longer exists.
            raise error
        elif not issubclass(kind, asyncio.CancelledError):
            await self._endings.fail(task, error)
        elif task.lease_lost is not None:
            self._endings.lost(task, task.lease_lost)
        elif task.finished_by is not None:
            # A handler that was too slow to stop was count_by_kind by `_drain`.
            if task in self._running:
                self._endings.count(task)
        elif self._cancels():
            await self._endings.hand_over(task)
        else:
            # The handler cancelled its own task, or awaited something that was cancelled.
            await self._endings.fail(task, error)

    def _cancels(self) -> bool:
        """Whether handlers are cancelled by this run, or together with it by its loop."""
        run, before = self._runner
        return self._cancels_handlers or (run is not None and run.cancelling() > before)

    async def _drain(self, grace_s: float) -> None:
        """Wait for running handlers, then release what is still running; log the progress."""
        began, before, waited = time.monotonic(), copy(self.summary), bool(self._running)
        self._log_stopping(grace_s)
        # Let claims that just returned start their handlers.
        await asyncio.sleep(0)
        while self._running and (left := began + grace_s - time.monotonic()) > 0:
            await asyncio.wait(list(self._running.values()), timeout=min(left, _STOP_REPORT_S))
            left_ms = round((began + grace_s - time.monotonic()) * 1000)
            if self._running and left_ms > 0:
                about = {"tasks": len(self._running), "grace_left_ms": left_ms}
                text = f"stopping: still waiting for {count_by_kind(self._running)}"
                text = f"{text}, {duration(left_ms)} left"
                self._stop_line(logging.INFO, text, action="worker_draining", **about)
        self._cancels_handlers = True
        if self._running:
            text = f"stopping: the grace period is over, cancelling {count_by_kind(self._running)}"
            about = {"tasks": len(self._running)}
            self._stop_line(logging.WARNING, text, action="worker_grace_over", **about)
        for running in list(self._running.values()):
            running.cancel("the worker is shutting down")
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=_CANCEL_WAIT_S)
        stubborn, self._running = self._running, {}
        for task in stubborn:
            text = "ignored its cancellation; the worker abandons it and releases the execution"
            log_task(logging.ERROR, "task_left_behind", task, text)
        await asyncio.gather(
            *(self._endings.hand_over(task) for task in stubborn if task.finished_by is None)
        )
        for running in stubborn.values():
            running.cancel("the worker is shutting down")
        await self._endings.drain()
        if waited:
            ms, done = round((time.monotonic() - began) * 1000), self.summary.since(before)
            text = f"stopping: no task is running after {duration(ms)} ({done})"
            about = {"duration_ms": ms, **msgspec.structs.asdict(done)}
            self._stop_line(logging.INFO, text, action="worker_drained", **about)


def _leave_fork() -> None:
    """End a process that was forked inside a handler: only the parent may run on."""
    error = sys.exception()
    # A GeneratorExit is only the cleanup of the coroutine's copy.
    if type(error) is not GeneratorExit:
        end_child(error)


def _is_current(task: asyncio.Task[None] | None) -> bool:
    """Whether this task is running now, as opposed to its coroutine being closed."""
    try:
        return task is not None and asyncio.current_task() is task
    except RuntimeError:
        return False


class LoopWatch:
    """Detects that the current event loop is blocked; the lease keeper's thread checks it."""

    def __init__(self, limit_s: float, longest_step_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._limit_s = limit_s
        self._warn_s = min(_WARN_S, limit_s / 3)
        self._longest_step_s = longest_step_s
        self._turned = True
        self._checked_at = 0.0
        self._blocked_s = 0.0
        self._warned = False
        self._writer: threading.Thread | None = None

    def stuck(self, leases: Iterable[HeldLease]) -> list[HeldLease]:
        """The leases to give up while the loop is blocked.

        Those are attempts that timed out and, after the limit, all except that of the blocking
        task.
        """
        if not self._still_blocked():
            return []
        now = time.monotonic()
        over = self._blocked_s >= self._limit_s
        due = [held for held in leases if not held.leaving and (over or now >= held.times_out_at)]
        current = asyncio.current_task(self._loop)
        blocker = None if current is None else _context_of(current).get(handled)
        stuck = [held for held in due if blocker is None or held is not blocker.held]
        if stuck:
            others = plural(len(stuck), "other execution")
            consequence = f"releasing {others}. {_CLAIMS_NOTHING}"
            self._log_blocked(logging.CRITICAL, blocker, consequence)
        elif self._blocked_s < self._warn_s:
            return []
        elif not self._warned:
            self._log_blocked(logging.WARNING, blocker, _ADVICE)
        self._warned = True
        return stuck

    def _still_blocked(self) -> bool:
        now = time.monotonic()
        if self._turned:
            if self._warned:
                self._log(
                    logging.WARNING, f"The event loop runs again after {self._blocked_s:.0f} s."
                )
            self._turned = self._warned = False
            self._blocked_s = 0.0
            # The loop is closed if the worker was dropped.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_turn)
        else:
            # Capped, so that a suspended process (SIGSTOP, laptop lid) does not count as blocked.
            self._blocked_s += min(now - self._checked_at, self._longest_step_s)
        self._checked_at = now
        return self._blocked_s > 0

    def _on_turn(self) -> None:
        self._turned = True

    def _log_blocked(self, level: int, blocker: ClaimedTask | None, consequence: str) -> None:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - it is documented
        stack = "".join(traceback.format_stack(frame, _FRAMES)).rstrip()
        who, extra = "Code outside any task", {"action": "loop_blocked"}
        if blocker is not None:
            who = f"{blocker.execution_kind} {blocker.execution_id.short}"
            extra |= blocker.log_fields
        text = f"{who} has blocked the event loop for {self._blocked_s:.0f} s: {consequence}"
        self._log(level, text, stack=stack, extra=extra)

    def _log(self, level: int, text: str, stack: str | None = None, **more: Any) -> None:
        if not log.isEnabledFor(level):
            return
        record = log.makeRecord(log.name, level, __file__, 0, text, (), None, sinfo=stack, **more)
        before = self._writer

        def write() -> None:
            if before is not None:
                before.join()
            log.handle(record)

        # On its own thread: a log handler that holds its lock may be what blocks the loop.
        self._writer = threading.Thread(target=write, name="ff-loop-watch", daemon=True)
        self._writer.start()


def _context_of(task: asyncio.Task[Any]) -> Context:
    if sys.version_info >= (3, 12):
        return task.get_context()
    # Python 3.11 has no accessor for it.
    return next((one for one in gc.get_referents(task) if isinstance(one, Context)), Context())
