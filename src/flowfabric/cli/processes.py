"""A supervisor of worker processes: starts them, restarts those that die, and stops them."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import msgspec

from flowfabric.core.backoff import Backoff
from flowfabric.core.text import duration, plural
from flowfabric.sdk.logs import log_always

log = logging.getLogger(__name__)

Facts = dict[str, Any]
"""What a worker reports when it is ready: its tasks, lanes and deployment."""
_VARIABLE = "_FLOWFABRIC_MEMBER"
"""Tells a member its number, how many members there are, and the descriptor of its link."""
_PAUSES_S = (0.5, 30.0)
_STABLE_S = 60.0
"""A process that ran this long restarts without a growing pause."""


class Member(msgspec.Struct, frozen=True):
    """This process, if it is one of several workers under a supervisor.

    The link is a socket. The member sends its facts once, when it is ready; the supervisor sends
    the signal it received. The link ends when the supervisor dies, however that happens.
    """

    number: int
    count: int
    link: socket.socket

    @classmethod
    def current(cls) -> Self | None:
        """This process as a member; None if no supervisor started it."""
        place = os.environ.pop(_VARIABLE, "")
        if not place:
            return None
        number, count, descriptor = map(int, place.split(","))
        # Programs that handlers start must not inherit it.
        os.set_inheritable(descriptor, False)  # noqa: FBT003
        return cls(number, count, socket.socket(fileno=descriptor))

    def serve(self, facts: Facts, stop: Callable[[int], None]) -> None:
        """Report that this process is ready, and call `stop` when the supervisor says so."""
        with contextlib.suppress(OSError):
            self.link.sendall(msgspec.json.encode(facts) + b"\n")
        threading.Thread(target=self._follow, args=(stop,), name="ff-member", daemon=True).start()

    def _follow(self, stop: Callable[[int], None]) -> None:
        received = b""
        with contextlib.suppress(OSError):
            received = self.link.recv(1)
        if not received:
            text = "stopping: the supervisor process has exited"
            log_always(logging.WARNING, text, action="supervisor_gone")
        stop(received[0] if received else signal.SIGTERM)


class _Running(msgspec.Struct):
    process: asyncio.subprocess.Process
    link: socket.socket
    ready: bool = False


class Supervisor:
    """Keeps `count` worker processes running until it is stopped.

    `command` is what follows `flowfabric`. `first_ready` gets the facts of the first process that
    is ready, `all_ready` is called when all of them are.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        first_ready: Callable[[Facts], object],
        all_ready: Callable[[], object] = lambda: None,
        variables: Mapping[str, str] = {},
    ) -> None:
        self._command = (sys.executable, "-m", "flowfabric", *command)
        self._count = count
        self._on_first_ready = first_ready
        self._on_all_ready = all_ready
        self._variables = variables
        self._running: dict[int, _Running] = {}
        self._were_ready: set[int] = set()
        self._first_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._killed_by = 0

    async def run(self) -> int:
        """Serve until stopped; the worst exit status of all processes.

        The first process starts alone: what is wrong with the application is then said once.
        """
        first = asyncio.create_task(self._keep(1))
        up = asyncio.create_task(self._first_ready.wait())
        await asyncio.wait((first, up), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        others = range(2, self._count + 1) if self._first_ready.is_set() else ()
        codes = await asyncio.gather(first, *(self._keep(number) for number in others))
        return max(codes) if not self._killed_by else 128 + self._killed_by

    def on_signal(self, number: int) -> None:
        """Stop after the first signal; after the second, kill the processes."""
        if self._stopping.is_set():
            self.kill(number)
            return
        count = len(self._running)
        text = f"stopping: waiting for {plural(count, 'worker')}"
        log_always(logging.INFO, text, action="workers_draining", processes=count)
        self.stop(number)

    def kill(self, number: int) -> None:
        """End every process at once, as a second signal does."""
        self._stopping.set()
        self._killed_by = number
        for each in self._running.values():
            each.process.kill()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Let every process finish what it runs, as after this signal."""
        self._stopping.set()
        for each in self._running.values():
            # Through the link, because a service manager may have signalled all processes, and a
            # second signal would end them at once.
            if each.ready:
                with contextlib.suppress(OSError):
                    each.link.send(bytes((number,)))
            else:
                each.process.send_signal(number)

    async def _keep(self, number: int) -> int:
        """Run one process, again whenever it dies; its last exit status."""
        backoff = Backoff(*_PAUSES_S)
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                code = await self._run(number)
                how = _ending(code)
            except OSError as error:
                # The machine may be short of processes or memory for a while.
                code, how = 1, f"could not start: {error}"
            if self._stopping.is_set() or not self._first_ready.is_set():
                return 128 - code if code < 0 else code
            if time.monotonic() - started >= _STABLE_S:
                backoff.reset()
            pause_s = backoff.next_s()
            pause_ms = round(pause_s * 1000)
            extra = {"action": "worker_died", "worker_process": number, "status": code}
            extra |= {"restart_in_ms": pause_ms}
            text = "worker %d %s, restarting in %s"
            log.warning(text, number, how, duration(pause_ms), extra=extra)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
        return 0

    async def _run(self, number: int) -> int:
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        place = f"{number},{self._count},{theirs.fileno()}"
        with ours:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env={**os.environ, **self._variables, _VARIABLE: place},
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C reaches only the supervisor, which passes it on.
                    process_group=0,
                )
            self._running[number] = running = _Running(process, ours)
            if self._stopping.is_set():
                # The signal came while the process started.
                process.terminate()
            greeting = asyncio.create_task(self._greet(number, running))
            try:
                return await process.wait()
            finally:
                del self._running[number]
                greeting.cancel()

    async def _greet(self, number: int, running: _Running) -> None:
        """Note that a process is ready."""
        loop, said = asyncio.get_running_loop(), b""
        while not said.endswith(b"\n"):
            part = await loop.sock_recv(running.link, 65_536)
            if not part:
                return
            said += part
        running.ready = True
        if not self._first_ready.is_set():
            self._first_ready.set()
            self._on_first_ready(msgspec.json.decode(said))
        if len(self._were_ready) < self._count:
            self._were_ready.add(number)
            if len(self._were_ready) == self._count and not self._stopping.is_set():
                self._on_all_ready()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    names = (known.name for known in signal.Signals if known == -code)
    return f"was killed by {next(names, f'signal {-code}')}"
