"""Runs handlers: claims in batches, joins results per loop tick, drains cleanly."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from flowfabric.core.contracts.executions import RetryScheduled
from flowfabric.core.errors import (
    AuthError,
    EngineError,
    FlowFabricError,
    LeaseLost,
    TransportError,
)
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import ExpireReason
from flowfabric.engine.executions import Completion
from flowfabric.scanners.supervisor import ScannerSupervisor
from flowfabric.sdk.doorbell import Doorbell
from flowfabric.sdk.task import ClaimedTask, failure_category, failure_reason
from flowfabric.sdk.worker import Worker

__all__ = ["Handler", "RunSummary", "WorkerRuntime"]

log = logging.getLogger(__name__)

Encoded = tuple[bytes, str]
"""Result bytes and their encoding label."""

Handler = Callable[[ClaimedTask], Awaitable[bytes | Encoded | None]]
"""Handles one task; what it returns becomes the result."""

_BATCH = 64
"""Tasks per claim: large enough to share a round trip, small enough to overlap with the next."""
_MAX_STICKY = 16
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 5.0
_COMPLETE_PAUSES_S = (0.1, 0.2, 0.4, 1.0)


class RunSummary(msgspec.Struct):
    """What a run of the worker did."""

    completed: int = 0
    failed: int = 0
    retried: int = 0
    released: int = 0
    abandoned: int = 0


class WorkerRuntime:
    """Handler registry and claim loop over a worker.

    >>> runtime = WorkerRuntime(worker)
    >>> runtime.on("resize", resize)
    >>> summary = await runtime.run()
    """

    def __init__(
        self, worker: Worker, *, on_unknown_kind: Literal["fail", "release"] = "fail"
    ) -> None:
        self.worker = worker
        self.summary = RunSummary()
        self._handlers: dict[str, Handler] = {}
        self._on_unknown = on_unknown_kind
        self._running: dict[ClaimedTask, asyncio.Task[None]] = {}
        self._done: dict[tuple[str, str], list[tuple[ClaimedTask, Completion]]] = {}
        self._flush_planned = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self._rings_wanted = asyncio.Event()
        self._stopping = asyncio.Event()
        self._sticky = 0
        self._doorbell = Doorbell(
            worker.backend, worker.lanes, worker.config.claim_poll_interval_ms / 1000
        )
        self._scanners = ScannerSupervisor(worker.backend) if worker.config.scanners else None
        worker.on_release = self._wake.set

    def on(self, kind: str, handler: Handler) -> None:
        """Register the handler of an execution kind; a second one replaces the first."""
        self._handlers[kind] = handler

    @property
    def shutting_down(self) -> bool:
        """Whether the run is ending: long handlers should come to a good stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """End the run: no new claims, running handlers may finish."""
        self._stopping.set()
        self._wake.set()

    # --- the loop -----------------------------------------------------------------------

    async def run(
        self, *, grace_s: float = 30.0, on_shutdown: Literal["release", "fail"] = "release"
    ) -> RunSummary:
        """Serve until `stop()`; then drain: wait up to `grace_s`, give back what is left."""
        bell = asyncio.create_task(self._listen())
        if self._scanners is not None:
            self._scanners.start()
        try:
            for lane in self.worker.lanes:
                lane.add(lane.home)
            await self._serve()
            await self._drain(grace_s, on_shutdown)
        finally:
            bell.cancel()
            await asyncio.wait([bell])
            await self._doorbell.aclose()
            if self._scanners is not None:
                await self._scanners.stop()
        return self.summary

    async def _serve(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            if not self.worker.free or not self.worker.lanes.hinted():
                self._wake.clear()
                if self.worker.free:
                    self._rings_wanted.set()
                await self._wake.wait()
                continue
            try:
                await self._claim_round()
                pause = _FIRST_PAUSE_S
            except EngineError as error:
                if isinstance(error, AuthError) or (
                    isinstance(error, TransportError) and error.kind == "auth"
                ):
                    raise
                log.warning(
                    "claim failed, trying again: %s", error, extra={"action": "claim_failed"}
                )
                await self._pause(pause * random.uniform(0.5, 1.0))  # noqa: S311
                pause = min(pause * 2, _LAST_PAUSE_S)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _claim_round(self) -> None:
        lane = self.worker.lanes.next()
        tag = None if lane is None else lane.oldest()
        if lane is None or tag is None:
            return
        tasks, remaining = await self.worker.claim_at(lane.lane_id, tag, _BATCH)
        if remaining:
            lane.rotate(tag)
        for task in tasks:
            self._start(task)

    async def _listen(self) -> None:
        """Turns doorbell rings into hints while there is room for more work."""
        while True:
            await self._rings_wanted.wait()
            self._rings_wanted.clear()
            for lane_id, tag in await self._doorbell.wait():
                if self.worker.free and not self._stopping.is_set():
                    self.worker.lanes[lane_id].add(tag)
                else:
                    await self._doorbell.ring_back(lane_id, tag)
            self._wake.set()

    # --- running one task ---------------------------------------------------------------

    def _start(self, task: ClaimedTask) -> None:
        running = asyncio.create_task(self._handle(task))
        self._running[task] = running
        loop = running.get_loop()

        def lost(_: LeaseLost) -> None:
            loop.call_soon_threadsafe(running.cancel)

        task.on_lease_lost = lost

    async def _handle(self, task: ClaimedTask) -> None:
        handler = self._handlers.get(task.execution_kind)
        try:
            if handler is None:
                await self._unknown(task)
                return
            timeout = task.claim.attempt_timeout_ms
            if timeout is None:
                result = await handler(task)
            else:
                result = await self._within(task, handler, timeout / 1000)
            if task.finished_by is None:
                self._complete(task, result)
        except asyncio.CancelledError:
            await self._cancelled(task)
        except FlowFabricError as error:
            await self._fail(task, error)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            await self._fail(task, error)
        finally:
            self._running.pop(task, None)

    async def _within(
        self, task: ClaimedTask, handler: Handler, seconds: float
    ) -> bytes | Encoded | None:
        """Run under the attempt timeout. The engine keeps the time; this only stops the handler."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await handler(task)
        except TimeoutError:
            if not limit.expired():
                raise
        ids = [str(task.execution_id)]
        tag = task.execution_id.tag
        (answer,) = await self.worker.backend.expire_execution(
            tag, ExpireReason.ATTEMPT_TIMEOUT, ids
        )
        while answer == "not_yet_due":
            await asyncio.sleep(0.01)
            (answer,) = await self.worker.backend.expire_execution(
                tag, ExpireReason.ATTEMPT_TIMEOUT, ids
            )
        self.summary.failed += 1
        task.finish("attempt_timeout")
        return None

    async def _unknown(self, task: ClaimedTask) -> None:
        if self._on_unknown == "release":
            await task.delay_execution(1)
            self.summary.released += 1
            return
        reason = f"no handler is registered for kind {task.execution_kind!r}"
        await self._report_failure(task, reason, "runtime_no_handler")

    async def _fail(self, task: ClaimedTask, error: BaseException) -> None:
        if task.finished_by is not None or isinstance(error, LeaseLost):
            self._let_go(task, error)
            return
        reason = failure_reason(error)
        if not isinstance(error, Exception):
            reason = f"handler crashed: {reason}"
        await self._report_failure(task, reason, failure_category(error))

    async def _report_failure(self, task: ClaimedTask, reason: str, category: str) -> None:
        try:
            outcome = await task.fail(reason, category)
        except FlowFabricError as error:
            self._let_go(task, error)
            return
        if isinstance(outcome, RetryScheduled):
            self.summary.retried += 1
            if self._scanners is not None:
                self._scanners.hints.hint(
                    task.lane_id, task.execution_id.tag, task.execution_id, outcome.delay_until
                )
        else:
            self.summary.failed += 1

    def _let_go(self, task: ClaimedTask, error: BaseException) -> None:
        """The engine refused us: the execution is somebody else's now, or already over."""
        log.error(
            "%s of %s was not accepted: %s",
            task.execution_kind,
            task.execution_id,
            error,
            extra={"action": "task_abandoned", "execution_id": task.execution_id},
        )
        self.summary.abandoned += 1
        task.finish("abandoned")

    async def _cancelled(self, task: ClaimedTask) -> None:
        if task.lease_lost is not None:
            self._let_go(task, task.lease_lost)
        elif task.finished_by is None:
            try:
                await task.delay_execution(1)
                self.summary.released += 1
            except FlowFabricError as error:
                self._let_go(task, error)

    # --- results, joined per loop tick ------------------------------------------------------

    def _complete(self, task: ClaimedTask, result: bytes | Encoded | None) -> None:
        handle = task.handle
        if type(result) is tuple:
            completion = Completion(handle, result[0], result[1])
        else:
            completion = Completion(handle, result)  # pyright: ignore[reportArgumentType]
        self._done.setdefault((handle.lane_id, handle.execution_id.tag), []).append(
            (task, completion)
        )
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        done, self._done = self._done, {}
        for (lane_id, tag), finished in done.items():
            for start in range(0, len(finished), _BATCH):
                call = asyncio.create_task(
                    self._send(lane_id, tag, finished[start : start + _BATCH])
                )
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def _send(
        self, lane_id: str, tag: str, finished: list[tuple[ClaimedTask, Completion]]
    ) -> None:
        """Complete, and take as many of the same lane and partition, in one trip."""
        worker, lane = self.worker, self.worker.lanes[lane_id]
        sticky = tag in lane and not self._stopping.is_set() and self._may_stick(lane_id, tag)
        # The permits of what is being completed are as good as free.
        room = len(finished) if sticky else 0
        items = [completion for _, completion in finished]
        try:
            outcomes, claimed = await self._complete_call(tag, items, lane_id, room)
        except FlowFabricError as error:
            await self._one_by_one(finished, error)
            return
        for (task, _), outcome in zip(finished, outcomes, strict=True):
            if outcome is None:
                self.summary.completed += 1
                task.finish("complete")
            else:
                self._let_go(task, outcome)
        if room:
            worker.reserve(len(claimed.claims))
            for claim in claimed.claims:
                self._start(worker.adopt(claim))
            if not claimed.remaining:
                lane.drop(tag)
        self._wake.set()

    async def _complete_call(
        self, tag: str, items: list[Completion], lane_id: str, room: int
    ) -> tuple[list[EngineError | None], Any]:
        """Repeats the very same request after a transport fault, so nothing is claimed twice."""
        request_id, want = new_uuid(), self.worker.want(lane_id)
        for pause in (*_COMPLETE_PAUSES_S, None):
            try:
                return await self.worker.backend.complete_and_claim(
                    tag, items, want, room, request_id=request_id
                )
            except TransportError as error:
                if pause is None or not error.retryable:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _may_stick(self, lane_id: str, tag: str) -> bool:
        """Stay on a partition for a while only, and not while others wait longer."""
        if all(len(lane) <= (lane.lane_id == lane_id) for lane in self.worker.lanes):
            return True
        self._sticky += 1
        if self._sticky < _MAX_STICKY:
            return self.worker.lanes[lane_id].oldest() == tag
        self._sticky = 0
        return False

    async def _one_by_one(
        self, finished: list[tuple[ClaimedTask, Completion]], error: FlowFabricError
    ) -> None:
        """The batch as a whole failed: let each task try, and give up, for itself."""
        log.warning("batch not completed: %s", error, extra={"action": "complete_failed"})
        for task, completion in finished:
            try:
                await task.complete(completion.result_payload, completion.result_encoding)
                self.summary.completed += 1
            except FlowFabricError as problem:
                if task.finished_by is None and not isinstance(problem, TransportError):
                    await self._fail(task, problem)
                else:
                    self._let_go(task, problem)

    # --- ending -----------------------------------------------------------------------------

    async def _drain(self, grace_s: float, on_shutdown: Literal["release", "fail"]) -> None:
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=grace_s)
        for task, running in list(self._running.items()):
            if on_shutdown == "fail" and task.finished_by is None:
                await self._report_failure(task, "the worker is shutting down", "worker_shutdown")
            running.cancel()
        if self._running:
            await asyncio.wait(list(self._running.values()))
        while self._done or self._calls or self._flush_planned:
            self._flush()
            if self._calls:
                await asyncio.wait(list(self._calls))
