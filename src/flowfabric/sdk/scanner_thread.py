"""The scanners of a worker process, on a thread that handlers cannot block."""

import asyncio
import logging
from collections import deque

from flowfabric.core.backoff import Backoff
from flowfabric.core.errors import TransportError
from flowfabric.core.forks import leave_behind
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.outage import Outage
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scanners.supervisor import ScannerSupervisor
from flowfabric.sdk.loop_thread import Connect, LoopThread, opened

log = logging.getLogger(__name__)

_PAUSES_S = (0.5, 5.0)
_MAX_WAITING = 10_000


class ScannerThread(LoopThread):
    """Runs a `ScannerSupervisor` with its own loop and connection.

    `start` returns when the scanners run, or when the server is unreachable; the thread then keeps
    trying. It raises permanent errors. The thread shares the worker's known lanes and partitions,
    so that the scanners cover at once whatever the worker claims from.
    """

    crashed = "the scanners of this process stopped", "scanners_crashed"

    def __init__(
        self,
        connect: Connect,
        settings: ScannerSettings,
        worker: Backend,
        outage: Outage | None = None,
    ) -> None:
        super().__init__("ff-scanners")
        self._connect = connect
        self._settings = settings
        self._worker = worker
        self._outage = outage or Outage()
        self._hints: deque[tuple[str, str, str, int]] = deque(maxlen=_MAX_WAITING)
        self.supervisor: ScannerSupervisor | None = None
        """Set while it runs; use it only in the thread's loop."""

    def hint(self, lane: str, tag: str, execution_id: str, due_ms: int) -> None:
        """Note when an execution becomes due, in server time; see `DueHints`. Thread-safe."""
        self._hints.append((lane, tag, execution_id, due_ms))
        self.post(self._forward_hints)

    def forget(self) -> None:
        """In a forked child: the supervisor belongs to the parent's loop."""
        super().forget()
        leave_behind(self.supervisor)
        self.supervisor = None

    def _forward_hints(self) -> None:
        while self.supervisor is not None and self._hints:
            self.supervisor.hints.hint(*self._hints.popleft())

    async def _main(self) -> None:
        backend = await self._connect_when_reachable()
        # Share the dict between threads: copying it and adding to it are atomic.
        backend.places.known_places = self._worker.places.known_places
        self.supervisor = supervisor = ScannerSupervisor(backend, self._settings, self._outage)
        try:
            supervisor.start()
            self._forward_hints()
            self._ready.set()
            await asyncio.Event().wait()
        finally:
            self.supervisor = None
            backend.meta.fail_fast()
            try:
                await supervisor.stop()
            finally:
                await backend.aclose()

    async def _connect_when_reachable(self) -> Backend:
        """Open a backend, waiting as long as the server is unreachable."""
        backoff = Backoff(*_PAUSES_S)
        while True:
            try:
                return await opened(self._connect)
            except TransportError as error:
                if not error.retryable:
                    raise
                if not self._outage.noticed(error, "scanners cannot connect"):
                    extra = {"action": "scanners_not_connected", "error": str(error)}
                    log.warning("scanners cannot connect, trying again: %s", error, extra=extra)
                self._ready.set()
            await asyncio.sleep(backoff.jittered_s())
