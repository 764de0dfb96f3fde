"""The scanners of a worker process, on a thread that handlers cannot block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable

from flowfabric.core.errors import TransportError
from flowfabric.core.forks import forget_on_fork, leave_behind
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scanners.supervisor import ScannerSupervisor
from flowfabric.sdk.lease_keeper import opened

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 5.0
_MAX_WAITING = 10_000


class ScannerThread:
    """Runs a `ScannerSupervisor` with a loop and a connection of its own.

    It shares what the worker's backend knows of lanes and partitions: where the worker claims,
    the scanners look at once.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[ValkeyBackend]],
        settings: ScannerSettings,
        worker: ValkeyBackend,
    ) -> None:
        self._connect = connect
        self._settings = settings
        self._worker = worker
        self._hints: deque[tuple[str, str, str, int]] = deque(maxlen=_MAX_WAITING)
        self._gate = threading.Lock()
        self._started = threading.Event()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._connecting: asyncio.Future[ValkeyBackend] | None = None
        self.supervisor: ScannerSupervisor | None = None
        """Only while it runs; belongs to the thread's loop."""
        forget_on_fork(self)

    def start(self) -> None:
        """Begin, once per object. Returns when the scanners run or the server is unreachable.

        An unreachable server is dialled again; what no repetition can heal is raised.
        """
        with self._gate:
            if self._stopping or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._main, name="ff-scanners", daemon=True)
            self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Give the leader lease up, close the connection, end the thread."""
        with self._gate:
            self._stopping = True
            thread = self._thread
        if thread is not None:
            self._call(self._halt)
            thread.join()

    def hint(self, lane: str, tag: str, execution_id: str, due_ms: int) -> None:
        """From any thread: an execution may be promoted at this server time, see `DueHints`."""
        self._hints.append((lane, tag, execution_id, due_ms))
        self._call(self._pass_on)

    def forget(self) -> None:
        """In a forked child: the thread is gone and the loop is the parent's."""
        leave_behind(self._loop, self._thread, self._stop, self._connecting, self.supervisor)
        self._gate = threading.Lock()
        self._started = threading.Event()
        self._thread = self._loop = self._stop = self._connecting = self.supervisor = None

    def _call(self, function: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None:
            # The loop is closed when the scanners have ended already.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function)

    # --- the thread's own loop ---------------------------------------------------------

    def _halt(self) -> None:
        if self._stop is not None:
            self._stop.set()
        if self._connecting is not None:
            self._connecting.cancel()

    def _pass_on(self) -> None:
        while self.supervisor is not None and self._hints:
            self.supervisor.hints.hint(*self._hints.popleft())

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                log.critical(
                    "the scanners of this process ended",
                    exc_info=error,
                    extra={"action": "scanners_crashed"},
                )
        finally:
            self._started.set()

    async def _run(self) -> None:
        self._stop = stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # Asked before there was a loop to tell.
        if self._stopping:
            stop.set()
        backend = await self._open(stop)
        if backend is None:
            return
        try:
            await self._scan(backend, stop)
        finally:
            await backend.aclose()

    async def _open(self, stop: asyncio.Event) -> ValkeyBackend | None:
        """A backend, however long the server stays away; None when told to stop."""
        pause = _FIRST_PAUSE_S
        while not stop.is_set():
            self._connecting = asyncio.ensure_future(opened(self._connect))
            try:
                return await self._connecting
            except asyncio.CancelledError:
                break
            except TransportError as error:
                if not error.retryable:
                    raise
                if not self._started.is_set():
                    log.warning(
                        "scanners not connected, trying again: %s",
                        error,
                        extra={"action": "scanners_not_connected", "error": str(error)},
                    )
                    self._started.set()
            finally:
                self._connecting = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stop.wait()
            pause = min(pause * 2, _LAST_PAUSE_S)
        return None

    async def _scan(self, backend: ValkeyBackend, stop: asyncio.Event) -> None:
        # The very object: one thread's copy or addition is a single step for the other.
        backend.places.known_places = self._worker.places.known_places
        self.supervisor = supervisor = ScannerSupervisor(backend, self._settings)
        supervisor.start()
        self._pass_on()
        self._started.set()
        try:
            await stop.wait()
        finally:
            self.supervisor = None
            backend.transport.hurry()
            await supervisor.stop()
