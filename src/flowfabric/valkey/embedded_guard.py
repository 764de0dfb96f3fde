"""The process that starts the embedded Valkey and stops it after its last user.

It runs as a script, detached from the process that started it. It imports only the standard
library, so that it starts quickly and stays small. Processes coordinate through locks, which the
kernel drops when their holder dies, so `kill -9` needs no special case.

    the folder   Every process that uses the server holds a shared lock. The guard waits for the
                 exclusive lock: it gets it after the last user, and keeps it while it stops the
                 server, so that a new user waits until that is done.
    guard.lock   The guard holds it. While it is free, a server that still answers is stopping.
    server.lock  A POSIX lock that the server's process takes before it starts. The kernel reports
                 its holder's pid, so no file can name the wrong process to signal.
"""

import contextlib
import fcntl
import os
import signal
import struct
import sys
import threading
import time

GUARD_LOCK = "guard.lock"
SERVER_LOCK = "server.lock"
SOCKET = "valkey.sock"

STOP_SECONDS = 10.0
PREDECESSOR_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
# The server allocates many short strings; a larger thread cache saves 4 to 5 % of its instructions
# per call. A value set by the user takes precedence.
_TUNABLES = "glibc.malloc.tcache_count=1000"
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def server_pid(lock: int) -> int | None:
    """The pid of the process that holds `server.lock`; 0 if it cannot be seen from here."""
    # struct flock: type, whence, start, length, pid; the BSDs begin with start.
    if sys.platform == "linux":
        asked = fcntl.fcntl(lock, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        kind, _, _, _, pid = struct.unpack("hhqqi4x", asked)
    else:
        asked = fcntl.fcntl(lock, fcntl.F_GETLK, struct.pack("qqihh", 0, 0, 0, fcntl.F_WRLCK, 0))
        _, _, pid, kind, _ = struct.unpack("qqihh", asked)
    return None if kind == fcntl.F_UNLCK else pid


def signal_server(lock: int, number: signal.Signals) -> None:
    """Signal the process that holds `server.lock`, if there is one."""
    pid = server_pid(lock)
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            os.kill(pid, number)
            return
        process = os.pidfd_open(pid)
        # If it still holds the lock, the handle is not that of a later process with its pid.
        if server_pid(lock) == pid:
            signal.pidfd_send_signal(process, number)
        os.close(process)


def open_lock(name: str) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _is_free(guard_lock: int, server_lock: int) -> bool:
    try:
        fcntl.flock(guard_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return server_pid(server_lock) is None


def take_over(server_lock: int) -> None:
    """Become the folder's guard. A predecessor gets time to finish, then its server is killed."""
    guard_lock = open_lock(GUARD_LOCK)  # until this process ends
    seconds = PREDECESSOR_SECONDS
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if _is_free(guard_lock, server_lock):
                return
            time.sleep(0.002)
        if number is not None:
            signal_server(server_lock, number)
        seconds = STOP_SECONDS
    raise SystemExit("the previous server of this folder, or its guard, did not stop")


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108


def spawn_server(binary: str, server_lock: int) -> None:
    """Start the server as our child. It holds `server_lock` when this returns."""
    guard = os.getpid()
    started, starting = os.pipe()
    if os.fork():
        os.close(starting)
        os.read(started, 1)  # returns when the server's program replaces ours
        os.close(started)
        return
    try:
        if sys.platform == "linux":
            import ctypes  # noqa: PLC0415

            # Have the kernel stop the server when the guard is killed (`killall -9 python`).
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == guard:
            fcntl.lockf(server_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.set_inheritable(server_lock, True)  # noqa: FBT003
            for number in _IGNORED:
                signal.signal(number, signal.SIG_DFL)
            environment = {"GLIBC_TUNABLES": _TUNABLES, **os.environ}
            # The configuration is on standard input: a file could be replaced.
            os.execve(binary, [binary, "-"], environment)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot run {binary}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def watch_server(server_lock: int) -> int:
    """Stop the server after its last user; returns its exit code, negative for a signal."""
    exited = threading.Event()

    def stop_when_unused() -> None:
        fcntl.flock(os.open(".", os.O_RDONLY), fcntl.LOCK_EX)
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal_server(server_lock, number)
            exited.wait(STOP_SECONDS)

    # In a thread, because neither wait can be interrupted safely when the other one ends.
    threading.Thread(target=stop_when_unused, daemon=True).start()
    _, status = os.wait()
    exited.set()
    return os.waitstatus_to_exitcode(status)


def _tell(report: int, message: str) -> None:
    # The starting process stops reading when the server answers, and may have been killed.
    with contextlib.suppress(BrokenPipeError):
        os.write(report, message.encode())


def main(binary: str, folder: int, report: int) -> None:
    """Guard the folder's server; report when it is up and how it ended."""
    # The descriptor shares the starting process's lock on the folder: do not keep it open.
    os.fchdir(folder)
    os.close(folder)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The guard lives as long as the server; stopping the server stops both.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(report, False)  # noqa: FBT003
    server_lock = open_lock(SERVER_LOCK)
    take_over(server_lock)
    # A crash may leave the socket, and half-written rewrites of the log.
    _remove(SOCKET)
    for entry in os.listdir("."):  # noqa: PTH208
        if entry.startswith("temp-") and entry.endswith((".aof", ".rdb")):
            _remove(entry)
    spawn_server(binary, server_lock)
    _tell(report, "up\n")
    code = watch_server(server_lock)
    # A log rewrite outlives a killed server.
    os.killpg(0, signal.SIGUSR1)
    _remove(SOCKET)
    _tell(report, f"exit {code}\n")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
