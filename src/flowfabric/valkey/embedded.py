"""The embedded Valkey: one server per project folder, shared by the project's processes.

Nobody has to start or stop it. The first process starts it, others join it, and it ends when the
last of them is gone, however that happened. `embedded_guard` describes the locks behind this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

from flowfabric.core.errors import ConfigError
from flowfabric.valkey import embedded_guard as guard
from flowfabric.valkey.binary import locate_binary
from flowfabric.valkey.embedded_failure import start_error
from flowfabric.valkey.embedded_folder import Aof, DataFolder, explained, folder_error

__all__ = ["EmbeddedServer", "locate_binary"]

_START_LOCK = "start.lock"
_START_SECONDS = 30.0
_ANSWER_SECONDS = 10.0


class EmbeddedServer:
    """One process's hold on the embedded server: the server lives while any process has one.

    >>> import tempfile
    >>> with EmbeddedServer.acquire(Path(tempfile.mkdtemp())) as server:
    ...     server.url.startswith("unix:///")
    True

    A forked child shares its parent's hold: the server stays until both have released it or ended.
    """

    def __init__(self, folder: DataFolder, users_lock: int, aof: Aof, binary: str | None) -> None:
        self._folder = folder
        self._users_lock: int | None = users_lock
        self._aof: Aof = aof
        self._binary = binary
        self._owner = False

    @classmethod
    def acquire(
        cls, data_dir: Path | None = None, *, aof: Aof = "everysec", binary: str | None = None
    ) -> EmbeddedServer:
        """Join the folder's server, or start it. Returns when it answers.

        `data_dir` defaults to `FF_DATA_DIR`, then `./.flowfabric`. `aof` tells how often a server
        started here flushes its log to disk; `"no"` keeps no log, so nothing survives the server.
        `binary` overrides the search of `locate_binary`. Both are ignored when joining.
        Blocks while a large log is loaded: call it from a thread in async code.
        """
        folder = DataFolder.prepare(data_dir)
        with explained(folder.path):
            users_lock = _locked(folder.path / guard.USERS_LOCK, fcntl.LOCK_SH)
        server = cls(folder, users_lock, aof, binary)
        try:
            server.ensure_running()
        except BaseException:
            # Unlocked, not only closed: another thread may have forked a copy of it meanwhile.
            fcntl.flock(users_lock, fcntl.LOCK_UN)
            server.release()
            raise
        return server

    @property
    def url(self) -> str:
        """The server's address, `unix:///…`; it stays the same while it has users."""
        return "unix://" + quote(str(self._folder.socket()), errors="surrogateescape")

    @property
    def pid(self) -> int | None:
        """The server's pid; None while it is down."""
        return self._folder.pid

    @property
    def owner(self) -> bool:
        """Whether it was this handle that started the server."""
        return self._owner

    @property
    def data_dir(self) -> Path:
        """The folder, as an absolute path."""
        return self._folder.path

    def ensure_running(self) -> bool:
        """Start the server again on its data should it have died; True when that was needed."""
        if self._users_lock is None:
            raise ConfigError("embedded", "this hold on the server was released; acquire a new one")
        with explained(self._folder.path):
            if self._serving():
                return False
            with _held(self._folder.path / _START_LOCK):
                if self._serving():
                    return False
                self._check_hold(self._users_lock)
                self._start()
        self._owner = True
        return True

    def release(self) -> None:
        """Give up this hold. The server ends soon after its last user did so."""
        if self._users_lock is not None:
            # Never unlocked: that would take the hold away from a forked process too.
            os.close(self._users_lock)
            self._users_lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _serving(self) -> bool:
        while self._guarded():
            state = _probe(self._folder)
            if state != "loading":
                return state == "ready"
            time.sleep(0.01)
        return False

    def _guarded(self) -> bool:
        # A server without its guard is ending, even if it still answers.
        try:
            lock = _locked(self._folder.path / guard.GUARD_LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        _unlock(lock)
        return False

    def _check_hold(self, users_lock: int) -> None:
        # Our lock is on a deleted file: a new server would not know of us and end at once.
        current = (self._folder.path / guard.USERS_LOCK).stat()
        if not os.path.samestat(current, os.fstat(users_lock)):
            raise folder_error(
                f"{self._folder.path} was deleted and made anew under this process; restart it"
            )

    def _start(self) -> None:
        folder = self._folder
        binary = locate_binary(self._binary)
        socket_path = folder.place_socket()
        folder.write_config(socket_path, self._aof)
        log_offset = folder.prepare_log()
        ours, theirs = os.pipe()
        try:
            try:
                _spawn_guard(folder, str(binary), folder.listen_name(socket_path), theirs)
            finally:
                os.close(theirs)
            told = _await_ready(folder, ours)
        finally:
            os.close(ours)
        if told is not None:
            raise start_error(folder, binary, told, log_offset)


def _locked(path: Path, mode: int) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, mode)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _unlock(lock: int) -> None:
    # Closing alone would leave it locked if another thread has forked in the meantime.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


@contextlib.contextmanager
def _held(path: Path) -> Generator[None]:
    lock = _locked(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        _unlock(lock)


def _probe(folder: DataFolder) -> Literal["ready", "loading", "down"]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(os.fsencode(folder.socket()))
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
        except (FileNotFoundError, ConnectionError):
            return "down"
        except TimeoutError:
            raise ConfigError(
                "embedded",
                f"the server (pid {folder.pid}) does not answer; wait for it to finish what keeps "
                f"it busy, or end that process to have it restarted on its data; see {folder.log}",
                "server",
            ) from None
    if not answer:
        return "down"
    return "loading" if answer.startswith(b"-LOADING") else "ready"


def _spawn_guard(folder: DataFolder, binary: str, socket_path: str, report: int) -> None:
    # Isolated and without site: a quarter of the start-up time, and nothing of the user's.
    command = [sys.executable, "-I", "-S", guard.__file__, binary, socket_path, str(report)]
    with folder.log.open("ab") as log:
        try:
            # What we wait for is the detaching parent; the guard itself is not our child.
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder.path,
                pass_fds=(report,),
                check=False,
            )
        except OSError as error:
            raise ConfigError(
                "embedded",
                f"cannot run {sys.executable or 'Python'} ({error.strerror}) to guard the server; "
                "set FF_URL to use a Valkey that is started by other means",
                "server",
            ) from error


def _await_ready(folder: DataFolder, report: int) -> str | None:
    """Wait until the server answers; else what became of it."""
    poller = select.poll()
    poller.register(report, select.POLLIN)
    deadline = time.monotonic() + _START_SECONDS
    told = b""
    while time.monotonic() < deadline:
        up = told.startswith(b"up\n")
        # Only what answers after `up` is the new server, not a dying predecessor.
        if poller.poll(2 if up else 1000):
            chunk = os.read(report, 256)
            told += chunk
            if not chunk or b"exit" in told:
                return told.decode().removeprefix("up\n").strip() or "its guard was killed"
            continue
        if up:
            state = _probe(folder)
            if state == "ready":
                return None
            if state == "loading":
                deadline = time.monotonic() + _START_SECONDS
    return "no answer in time"
