"""Keeps every lease of the process alive, from a thread that user code cannot block."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from flowfabric.core.contracts.leases import Handle, Renewed
from flowfabric.core.errors import EngineError
from flowfabric.engine.backend import Backend

__all__ = ["HeldLease", "LeaseKeeper"]

log = logging.getLogger(__name__)

TERMINAL_CODES = frozenset(
    {
        "stale_lease",
        "lease_expired",
        "lease_revoked",
        "execution_not_active",
        "execution_not_found",
    }
)
_UNHEALTHY_AFTER = 3
_JITTER = 0.1
_STEPS = 10
"""Looks per renewal interval: late enough to batch, early enough to be on time."""


class _LostCallback(Protocol):
    def __call__(self, code: str, reason: str, /) -> None: ...


class HeldLease:
    """One lease the keeper renews. Written by the keeper's thread, read by anyone."""

    __slots__ = ("deadline", "failures", "handle", "lost_code", "next_at", "on_lost")

    def __init__(self, handle: Handle, on_lost: _LostCallback) -> None:
        now = time.monotonic()
        self.handle = handle
        self.on_lost = on_lost
        self.failures = 0
        self.lost_code: str | None = None
        self.deadline = now + handle.lease_ttl_ms / 1000
        self.next_at = now + _spread(handle.lease_ttl_ms / 3000)

    @property
    def healthy(self) -> bool:
        """Whether it is safe to believe that this process still owns the execution."""
        return (
            self.lost_code is None
            and self.failures < _UNHEALTHY_AFTER
            and time.monotonic() < self.deadline
        )


def _spread(seconds: float) -> float:
    return seconds * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311


class LeaseKeeper:
    """Renews all held leases in batches at a third of their time to live.

    It has its own thread, loop and connection, so a handler that blocks the worker's event loop
    loses no lease. A lost lease is reported once, from the keeper's thread.
    """

    def __init__(self, connect: Callable[[], Awaitable[Backend]], lease_ttl_ms: int) -> None:
        self._connect = connect
        self._look_every = lease_ttl_ms / 3000 / _STEPS
        self._held: dict[str, HeldLease] = {}
        self._stopping = False
        self._idle = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._started: threading.Event = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="ff-lease-keeper", daemon=True)
        self.renewed = 0
        self.failed = 0

    def start(self) -> None:
        """Start the thread; returns when it is connected, raises when it cannot connect."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the thread. Leases still held are no longer renewed."""
        self._stopping = True
        self._ring()
        self._thread.join()

    def hold(self, handle: Handle, on_lost: _LostCallback) -> HeldLease:
        """Renew this lease until it is released or lost."""
        held = HeldLease(handle, on_lost)
        self._held[handle.lease] = held
        if self._idle:
            self._idle = False
            self._ring()
        return held

    def release(self, held: HeldLease) -> None:
        """Renew this lease no longer."""
        self._held.pop(held.handle.lease, None)

    def _ring(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            loop.call_soon_threadsafe(wake.set)

    # --- the keeper's own thread ---------------------------------------------------

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                log.critical(
                    "the lease keeper ended, leases will run out",
                    exc_info=error,
                    extra={"action": "lease_keeper_crashed"},
                )
        finally:
            self._started.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        backend = await self._connect()
        self._started.set()
        try:
            while not self._stopping:
                if not self._held:
                    self._idle = True
                    # A lease may have come between the look and the flag.
                    if not self._held:
                        await self._wake.wait()
                    self._idle = False
                self._wake.clear()
                await self._renew_due(backend)
                await asyncio.sleep(self._look_every)
        finally:
            await backend.aclose()

    async def _renew_due(self, backend: Backend) -> None:
        now = time.monotonic()
        due = [held for held in list(self._held.values()) if held.next_at <= now]
        if not due:
            return
        started = time.monotonic()
        try:
            answers = await backend.renew_many([held.handle for held in due])
        except EngineError as error:
            for held in due:
                self._failed(held, error)
            return
        for held, answer in zip(due, answers, strict=True):
            if isinstance(answer, Renewed):
                ttl = held.handle.lease_ttl_ms / 1000
                held.failures = 0
                # Counted from before the call: the engine extended it no earlier.
                held.deadline = started + ttl
                held.next_at = started + _spread(ttl / 3)
                self.renewed += 1
            else:
                self._failed(held, answer)

    def _failed(self, held: HeldLease, error: EngineError) -> None:
        if held.handle.lease not in self._held:
            return
        self.failed += 1
        held.failures += 1
        interval = held.handle.lease_ttl_ms / 3000
        held.next_at = time.monotonic() + _spread(min(interval, 1.0))
        if error.code in TERMINAL_CODES:
            self._lose(held, error.code, str(error))
        elif time.monotonic() >= held.deadline:
            self._lose(held, "lease_expired", f"no renewal succeeded in time: {error}")
        else:
            log.warning(
                "lease not renewed, trying again: %s",
                error,
                extra={
                    "action": "renewal_failed",
                    "execution_id": held.handle.execution_id,
                    "consecutive_failures": held.failures,
                },
            )

    def _lose(self, held: HeldLease, code: str, reason: str) -> None:
        held.lost_code = code
        self.release(held)
        held.on_lost(code, reason)
