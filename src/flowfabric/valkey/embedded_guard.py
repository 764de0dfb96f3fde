"""The process that starts the embedded server and ends it with its last user.

Run as a script, detached from whoever started it, and on the standard library alone: importing the
package would make it slow to start and heavy to keep. Three files in the data folder carry the
whole protocol; their locks vanish with their holders, so `kill -9` needs no special case.

    users.lock   shared by every user process. The guard waits for it exclusively: it gets it when
                 the last user is gone, and keeps it while it shuts the server down, so that a new
                 user waits for that to finish.
    guard.lock   held by the guard. One guard at a time; whoever finds it free knows that the
                 server, if there is one, is about to end.
    server.lock  inherited by the server, so that it is held exactly as long as a server process
                 of this folder lives, whatever happened to the guard.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
import time

USERS_LOCK = "users.lock"
GUARD_LOCK = "guard.lock"
SERVER_LOCK = "server.lock"
PID_FILE = "valkey.pid"
CONFIG_FILE = "valkey.conf"
SOCKET_RECORD = "socket.path"

STOP_SECONDS = 10.0
PREDECESSOR_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
# The packaged server lives on many short strings; with room for them in the thread's own cache
# it needs 4 to 5 % fewer instructions a call. A setting of the user's wins.
_TUNABLES = "glibc.malloc.tcache_count=1000"
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def read_pid() -> int | None:
    """The pid in the current folder's pid file, which the server itself writes."""
    try:
        with open(PID_FILE, encoding="ascii") as file:  # noqa: PTH123
            return int(file.read())
    except (OSError, ValueError):
        return None


def _signal_recorded_server(number: signal.Signals) -> None:
    pid = read_pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _open_lock(name: str) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT, 0o600)


def _acquired_within(lock: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        else:
            return True


def take_over(name: str) -> int:
    """Lock `name`; a predecessor gets time to finish, then its server is ended.

    The recorded pid is safe to signal: it is removed before each start and the lock is still held,
    so it names the server that holds us up.
    """
    lock = _open_lock(name)
    if _acquired_within(lock, PREDECESSOR_SECONDS):
        return lock
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal_recorded_server(number)
        if _acquired_within(lock, STOP_SECONDS):
            return lock
    raise SystemExit(f"{name} is still held by a process that does not end")


def _remove(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def _remove_leftovers(socket_path: str) -> None:
    """What a crash may leave behind: stale names, and half-written rewrites of the log."""
    _remove(PID_FILE, socket_path)
    for entry in os.listdir("."):  # noqa: PTH208
        if entry.startswith("temp-") and entry.endswith((".aof", ".rdb")):
            _remove(entry)


def _end_with_guard() -> None:
    """Linux: let the kernel end the server when the guard is killed (`killall -9 python`)."""
    if sys.platform != "linux":
        return
    import ctypes  # noqa: PLC0415

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def spawn_server(binary: str, server_lock: int) -> int:
    """Start the server as our child; it keeps `server_lock`, we do not."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        os.close(server_lock)
        return pid
    try:
        _end_with_guard()
        if os.getppid() == guard:
            os.set_inheritable(server_lock, True)  # noqa: FBT003
            for number in _IGNORED:
                signal.signal(number, signal.SIG_DFL)
            environment = {"GLIBC_TUNABLES": _TUNABLES, **os.environ}
            os.execve(binary, [binary, CONFIG_FILE], environment)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot run {binary}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


class Watch:
    """Ends the server when the last user is gone, or notices that it ended by itself."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self.unused = False

    def run(self) -> int:
        """Block until the server is gone; its exit code, negative for a signal."""
        # A thread, because neither wait can be given up safely when the other one ends.
        threading.Thread(target=self._end_when_unused, daemon=True).start()
        _, status = os.waitpid(self._pid, 0)
        self._ended.set()
        return os.waitstatus_to_exitcode(status)

    def _end_when_unused(self) -> None:
        fcntl.flock(_open_lock(USERS_LOCK), fcntl.LOCK_EX)
        self.unused = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._ended.is_set():
                os.kill(self._pid, number)
            self._ended.wait(STOP_SECONDS)


def _clean_up(socket_path: str, *, unused: bool) -> None:
    # A log rewrite outlives a killed server and would hold up the next one.
    os.killpg(0, signal.SIGUSR1)
    _remove(PID_FILE, socket_path)
    # Users that are still there reconnect to the address they know, so it stays valid for them.
    if unused and os.path.exists(SOCKET_RECORD):  # noqa: PTH110
        _remove(SOCKET_RECORD)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(socket_path))  # noqa: PTH106, PTH120


def _detach() -> None:
    os.setsid()
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Our life span is that of the server; whoever wants to end both ends the server.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def _tell(report: int, message: str) -> None:
    # The starter stops listening when the server answers, or may have been killed.
    with contextlib.suppress(BrokenPipeError):
        os.write(report, message.encode())


def main(binary: str, socket_path: str, report: int) -> None:
    """Guard the current folder's server, telling the starter when it is up and how it ended."""
    if os.fork():
        os._exit(0)
    _detach()
    os.set_inheritable(report, False)  # noqa: FBT003
    take_over(GUARD_LOCK)  # until this process ends
    server_lock = take_over(SERVER_LOCK)
    _remove_leftovers(socket_path)
    watch = Watch(spawn_server(binary, server_lock))
    _tell(report, "up\n")
    code = watch.run()
    _clean_up(socket_path, unused=watch.unused)
    _tell(report, f"exit {code}\n")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
