"""Processes, waits and raw commands for the embedded Valkey's tests."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from flowfabric.valkey import embedded_guard as guard

USER = Path(__file__).with_name("user.py")


class User:
    """A second process of the project; see `user.py`."""

    def __init__(self, folder: Path, *, uid: int = -1, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(USER), str(folder), str(uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        assert self.hear() == {"starting": True}

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"user ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, command: str) -> dict[str, Any]:
        self.tell(command)
        return self.hear()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def leave(self) -> None:
        self.tell("exit")
        assert self.process.wait(10) == 0

    def signal_group(self, number: signal.Signals) -> None:
        """As a terminal would deliver Ctrl-C, or a shell `kill -9 %1`."""
        os.killpg(self.process.pid, number)
        self.process.wait(10)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def connected(url: str) -> Generator[Callable[..., str]]:
    """Commands on one connection; each gives its reply as text, an array's members joined."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(unquote(url.removeprefix("unix://")))
        with connection.makefile("rb") as reader:

            def call(*words: str) -> str:
                parts = [f"*{len(words)}\r\n", *(f"${len(w.encode())}\r\n{w}\r\n" for w in words)]
                connection.sendall("".join(parts).encode())
                return read_reply(reader)

            yield call


def read_reply(reader: BinaryIO) -> str:
    first = reader.readline().rstrip().decode()
    if first.startswith("*"):
        return " ".join(read_reply(reader) for _ in range(int(first[1:])))
    if first.startswith("$") and first != "$-1":
        return reader.read(int(first[1:]) + 2).decode().removesuffix("\r\n")
    return first


def command(url: str, *words: str) -> str:
    """One command on its own connection."""
    with connected(url) as call:
        return call(*words)


def store(url: str, key: str, value: str) -> None:
    """Write and flush: with `everysec`, a killed server may lose what it has not flushed yet."""
    with connected(url) as call:
        assert call("SET", key, value) == "+OK"
        assert call("WAITAOF", "1", "0", "0") == ":1 :0"


def config(url: str, name: str) -> str:
    """A live server's setting."""
    return command(url, "CONFIG", "GET", name).removeprefix(f"{name} ")


def wait_gone(pid: int, seconds: float = 15) -> None:
    """Until the process has ended; the kernel tells."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([handle], [], [], seconds)
        assert ended, f"process {pid} is still running"
    finally:
        os.close(handle)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie that its parent has not collected does not."""
    try:
        wait_gone(pid, 0)
    except AssertionError:
        return True
    return False


def script(path: Path, body: str = "exit 3") -> Path:
    """An executable file that a shell runs."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path


def wait_until(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.005)


def is_locked(path: Path, mode: int = fcntl.LOCK_EX) -> bool:
    """Whether another process keeps us from locking the file or folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def server_pid(folder: Path) -> int | None:
    """The pid of the folder's server, as the kernel knows it."""
    with (folder / "server.lock").open("a+b") as lock:
        return guard.server_pid(lock.fileno())


def is_in_use(folder: Path) -> bool:
    """Whether a user holds the server; a guard that shuts it down excludes users as well."""
    return is_locked(folder) and not is_locked(folder, fcntl.LOCK_SH)


def wait_settled(folder: Path) -> None:
    """Until neither a server nor its guard is left."""
    wait_until(lambda: server_pid(folder) is None and not is_locked(folder / "guard.lock"))


def guard_of(server_pid: int) -> int:
    """The guard is the server's parent."""
    return int(Path(f"/proc/{server_pid}/stat").read_text().rpartition(")")[2].split()[1])
