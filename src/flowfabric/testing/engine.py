"""The engine of a test process: an embedded Valkey in a private folder, and its clock."""

import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from flowfabric.core.closing import Closing
from flowfabric.core.durations import Duration, to_ms
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.connect import start_embedded
from flowfabric.engine.valkey.testing import EngineClock, empty, open_trial
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scanners.supervisor import ScannerSupervisor
from flowfabric.sdk.loop_thread import Portal
from flowfabric.sdk.runtime import live

_END_S = 10.0
# Timeouts and deadlines end an attempt, so they come before the loss of its lease.
_TIMERS = (
    *("execution_deadline", "attempt_timeout", "suspension_timeout", "pending_wp_expiry"),
    *("lease_expiry", "delayed_promoter", "cascade_drain", "cancel_reconciler"),
    *("edge_cancel_dispatcher",),
)


class TestEngine(Closing):
    """A real engine, controlled from its own thread: it works with and without an event loop."""

    __test__ = False

    def __init__(self) -> None:
        # A short path: unix socket names are limited to about 100 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="ff-test-", ignore_cleanup_errors=True)
        self._server = start_embedded(Path(self._folder.name))
        self.address, self.url = self._server.address, self._server.url
        self._portal = Portal("ff-test-engine")
        self._backend = self._portal.call(self._open)

    async def _open(self) -> Backend:
        backend = await open_trial(self.address)
        self._clock = EngineClock(backend)
        self._scanners = ScannerSupervisor(backend, ScannerSettings())
        return backend

    def empty(self) -> None:
        """Delete everything, and set the clock to the server's time."""
        self._portal.call(self._empty)

    async def _empty(self) -> None:
        await empty(self._backend)
        await self._clock.reset()

    def now_ms(self) -> int:
        """The engine's time."""
        return self._portal.call(self._backend.meta.server_time_ms)

    def advance(self, ms: int) -> None:
        """Move the clock and run the timers that are due then."""
        workers = [runtime.worker for runtime in list(live) if not runtime.worker.killed]
        instances = [worker.config.worker_instance_id for worker in workers]
        self._portal.call(lambda: self._advance(ms, instances))
        for worker in workers:
            # A handler whose attempt timed out stops now.
            worker.keeper.renew_all()

    async def _advance(self, ms: int, instances: list[str]) -> None:
        await self._clock.advance(ms, instances)
        await self._run_timers()

    def run_timers(self) -> int:
        """Run the timers that are due now; returns how many executions they changed."""
        return self._portal.call(self._run_timers)

    async def _run_timers(self) -> int:
        results = [await self._scanners.scan_once(name) for name in _TIMERS]
        return sum(result.processed for result in results)

    def close(self) -> None:
        """Stop the server and delete its folder."""
        pid = self._server.pid
        self._portal.close(self._backend.aclose)
        self._server.release()
        deadline = time.monotonic() + _END_S
        # Remove the folder only after the server has stopped writing to it.
        while _exists(pid) and time.monotonic() < deadline:
            time.sleep(0.005)
        self._folder.cleanup()


def _exists(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return pid is not None


class Clock:
    """The engine's clock. It follows the real time, and you can advance it.

    >>> def test_a_reminder_is_sent(fabric: TestFabric) -> None:
    ...     fabric.clock.advance("25h")
    """

    def __init__(self, engine: TestEngine) -> None:
        self._engine = engine

    def now(self) -> datetime:
        """The engine's time, in UTC."""
        return datetime.fromtimestamp(self._engine.now_ms() / 1000, UTC)

    def advance(self, duration: Duration) -> None:
        """Let time pass: delays, retries, timeouts and deadlines that become due happen at once.

        Running workers keep their leases; those of a crashed worker expire.
        """
        self._engine.advance(to_ms(duration, "duration"))
