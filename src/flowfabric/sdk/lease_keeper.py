"""Keeps every lease of the process alive, from a thread that user code cannot block."""

import asyncio
import logging
import math
import random
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from flowfabric.core.contracts.leases import Handle, Renewed
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.state import ExpireReason, TerminalOutcome
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.outage import Outage
from flowfabric.scheduler.giving_back import give_back
from flowfabric.sdk.loop_thread import Connect, LoopThread, opened

log = logging.getLogger(__name__)

TERMINAL_CODES = frozenset(
    ["stale_lease", "lease_expired", "lease_revoked", "execution_not_active", "execution_not_found"]
)
"""Errors of a renewal after which the lease is gone for good."""
CANCELLED = "the execution was cancelled"
ENDINGS: dict[str, str] = {
    TerminalOutcome.SUCCESS: "the execution completed",
    TerminalOutcome.FAILED: "the execution failed",
    TerminalOutcome.CANCELLED: CANCELLED,
    TerminalOutcome.EXPIRED: "the execution expired",
    TerminalOutcome.SKIPPED: "the execution was skipped",
}
RELEASED = "the event loop was blocked, so the worker released the execution"
_TIMED_OUT = "the attempt timed out while the event loop was blocked"
_UNHEALTHY_AFTER = 3
_JITTER = 0.1
_BATCH = 256
_RELEASE_S = 2.0
_CHECKS_PER_RENEWAL = 10
"""Checks per renewal interval: rare enough to batch renewals, often enough to be on time."""
_MAX_CHECK_S = 1.0


def how_it_ended(error: EngineError) -> str | None:
    """How the execution ended, if a call was refused for that."""
    if error.code != "execution_not_active" or not error.details:
        return None
    return ENDINGS.get(error.details[0])


class LeaseWatcher(Protocol):
    """Is notified once, on the keeper's thread, that a lease is lost."""

    def lease_is_lost(self, code: str, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class HeldLease:
    """One lease that the keeper renews. Only the keeper's thread writes it; any thread may read."""

    handle: Handle
    watcher: weakref.ref[LeaseWatcher]
    """Weak, so that a task that user code drops is garbage collected."""
    deadline: float
    next_at: float
    times_out_at: float
    failures: int = 0
    lost_code: str | None = None
    renewing: bool = False
    leaving: bool = False
    budgets: frozenset[str] = frozenset()
    """The budgets on which the execution has a hold; holds last as long as the lease."""

    @property
    def alive(self) -> bool:
        """Whether the lease is neither known to be lost nor past its deadline."""
        return self.lost_code is None and time.monotonic() < self.deadline

    @property
    def healthy(self) -> bool:
        """Whether this process can safely assume that it still owns the execution."""
        return self.failures < _UNHEALTHY_AFTER and self.alive


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311


class LeaseKeeper(LoopThread):
    """Renews all held leases in batches at a third of their time to live.

    It has its own thread, loop and connection, so a handler that blocks the worker's event loop
    loses no lease. A lost lease is reported once, from the keeper's thread.
    """

    crashed = "the lease keeper stopped; leases will expire", "lease_keeper_crashed"

    def __init__(
        self,
        connect: Connect,
        lease_ttl_ms: int,
        outage: Outage | None = None,
        *,
        by_partition: bool = True,
    ) -> None:
        super().__init__("ff-lease-keeper")
        self._by_partition = by_partition
        self._connect = connect
        self._outage = outage or Outage()
        self.check_every_s = min(lease_ttl_ms / 3000 / _CHECKS_PER_RENEWAL, _MAX_CHECK_S)
        self.find_stuck: Callable[[list[HeldLease]], list[HeldLease]] | None = None
        """Returns the leases to give up because the worker's loop is blocked. Called per check."""
        self._held: dict[str, HeldLease] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._idle = False
        self._wake = asyncio.Event()
        self._backend: Backend | None = None
        self.renewed = 0

    def hold(
        self, handle: Handle, watcher: LeaseWatcher, since: float, timeout_ms: int | None = None
    ) -> HeldLease:
        """Renew this lease, requested at `since`, until it is released or lost."""
        ttl = handle.lease_ttl_ms / 1000
        times_out_at = math.inf if timeout_ms is None else since + timeout_ms / 1000
        next_at = since + _jittered(ttl / 3)
        held = HeldLease(handle, weakref.ref(watcher), since + ttl, next_at, times_out_at)
        self._held[handle.lease] = held
        if self._idle:
            self._idle = False
            self.post(self._wake.set)
        return held

    def release(self, held: HeldLease) -> None:
        """Stop renewing this lease."""
        self._held.pop(held.handle.lease, None)

    def renew_all(self) -> None:
        """Renew every lease now, to find out which are lost. Thread-safe."""
        for held in list(self._held.values()):
            held.next_at = 0
        if (backend := self._backend) is not None:
            self.post(lambda: self._check_leases(backend))

    def release_all(self) -> int:
        """Release all leases before a forced exit; returns how many. Thread-safe."""
        loop, backend = self._loop, self._backend
        handles = [held.handle for held in list(self._held.values())]
        self._held.clear()
        if loop is None or backend is None:
            return 0
        giving = give_back(backend, handles)
        try:
            return asyncio.run_coroutine_threadsafe(giving, loop).result(_RELEASE_S)
        except (TimeoutError, RuntimeError):
            # The loop was closed in the meantime, or the server does not answer.
            giving.close()
            return 0

    def __len__(self) -> int:
        return len(self._held)

    # --- on the keeper's thread ---------------------------------------------------------

    async def _main(self) -> None:
        self._backend = backend = await opened(self._connect)
        self._ready.set()
        try:
            while True:
                self._check_leases(backend)
                await self._wait_for_check()
        finally:
            for call in self._calls:
                call.cancel()
            if self._calls:
                await asyncio.wait(self._calls)
            await backend.aclose()

    async def _wait_for_check(self) -> None:
        self._wake.clear()
        if self._held:
            await asyncio.sleep(self.check_every_s)
            return
        self._idle = True
        # A lease may have been added between the check and setting the flag.
        if not self._held:
            await self._wake.wait()
        self._idle = False

    def _check_leases(self, backend: Backend) -> None:
        """Give up leases that expired or are stuck, and renew those that are due, by partition."""
        now = time.monotonic()
        due: dict[str, list[HeldLease]] = {}
        for held in list(self._held.values()):
            if now >= held.deadline:
                self._lose(held, "lease_expired", "no renewal succeeded in time")
            elif held.next_at <= now and not held.renewing:
                place = held.handle.execution_id.tag if self._by_partition else ""
                due.setdefault(place, []).append(held)
        for leases in due.values():
            for start in range(0, len(leases), _BATCH):
                batch = leases[start : start + _BATCH]
                for held in batch:
                    held.renewing = True
                self._in_background(self._renew(backend, batch))
        if self.find_stuck is not None:
            for held in self.find_stuck(list(self._held.values())):
                held.leaving = True
                self._in_background(self._give_up(backend, held))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        call = asyncio.get_running_loop().create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _give_up(self, backend: Backend, held: HeldLease) -> None:
        """End the attempt if it timed out; otherwise release it to the next worker."""
        while held.handle.lease in self._held:
            reason, gone = RELEASED, True
            try:
                if time.monotonic() < held.times_out_at:
                    await backend.executions.delay(held.handle, 1)
                else:
                    reason, ids = _TIMED_OUT, [held.handle.execution_id]
                    answers = await backend.upkeep.expire_execution(
                        ids[0].tag, ExpireReason.ATTEMPT_TIMEOUT, ids
                    )
                    gone = answers != ["not_yet_due"]
            except EngineError as error:
                gone = error.code in TERMINAL_CODES
            if not gone:
                await asyncio.sleep(self.check_every_s)
            elif held.handle.lease in self._held:
                self._lose(held, "lease_revoked", reason)

    async def _renew(self, backend: Backend, batch: list[HeldLease]) -> None:
        started = time.monotonic()
        answers: list[Renewed | EngineError]
        try:
            # A late reply is useful as long as the leases are valid.
            async with asyncio.timeout(min(held.deadline for held in batch) - started):
                answers = await backend.leases.renew_many([held.handle for held in batch])
        except EngineError as error:
            answers = [error] * len(batch)
        except TimeoutError:
            answers = [TransportError("timeout", "no reply before the lease expired")] * len(batch)
        except Exception as error:
            # A bug here must not stop the renewal of other leases.
            log.exception("cannot renew leases", extra={"action": "renewal_broke"})
            answers = [TransportError("other", str(error))] * len(batch)
        if any(held.budgets for held in batch):
            self._in_background(self._extend_holds(backend, batch, answers))
        for held, answer in zip(batch, answers, strict=True):
            held.renewing = False
            if held.handle.lease not in self._held:
                continue
            if isinstance(answer, Renewed):
                self._outage.ended()
                ttl = held.handle.lease_ttl_ms / 1000
                held.failures = 0
                # Counted from before the call: the engine extended the lease after that.
                held.deadline = started + ttl
                held.next_at = started + _jittered(ttl / 3)
                self.renewed += 1
            else:
                self._failed(held, answer)

    async def _extend_holds(
        self, backend: Backend, batch: list[HeldLease], answers: list[Renewed | EngineError]
    ) -> None:
        """Extend the executions' budget holds to match their leases."""
        calls = [
            backend.budgets.extend_holds(
                budget_id, held.handle.execution_id, answer.lease_epoch, answer.expires_at
            )
            for held, answer in zip(batch, answers, strict=True)
            if isinstance(answer, Renewed)
            for budget_id in held.budgets
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                # The next renewal tries again; a hold outlasts its lease by 30 s.
                log.debug("cannot extend the budget holds of a task: %s", outcome)

    def _failed(self, held: HeldLease, error: EngineError) -> None:
        held.failures += 1
        now = time.monotonic()
        held.next_at = now + _jittered(min(held.handle.lease_ttl_ms / 3000, 1.0))
        if error.code in TERMINAL_CODES:
            self._lose(held, error.code, how_it_ended(error) or str(error))
        elif now >= held.deadline:
            # Leave out the error's hint, which is about single calls.
            problem = error.message if isinstance(error, TransportError) else error.explanation
            why = f": {problem}" if problem else ""
            self._lose(held, "lease_expired", f"no renewal succeeded in time{why}")
        elif not self._outage.noticed(error, "cannot renew a lease"):
            extra: dict[str, object] = {"action": "renewal_failed", "error": str(error)}
            extra["execution_id"] = held.handle.execution_id
            extra["consecutive_failures"] = held.failures
            short = held.handle.execution_id.short
            log.warning("cannot renew the lease of %s, trying again: %s", short, error, extra=extra)

    def _lose(self, held: HeldLease, code: str, reason: str) -> None:
        held.lost_code = code
        self.release(held)
        try:
            if (watcher := held.watcher()) is not None:
                watcher.lease_is_lost(code, reason)
        except Exception:
            log.exception("cannot report a lost lease", extra={"action": "lease_loss_undelivered"})
