"""Starts commands by forking a process that has imported them: ten times as fast as a new Python.

The parent's side is `Zygote`. Run as a program, this module is the process that forks. It ends when
its standard input does.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import io
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path

_MOST = 1 << 20
SUPPORTED = hasattr(os, "pidfd_open") and hasattr(socket, "send_fds")


class Zygote:
    """The forking process of this test process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ffz-"))
        self._path = str(self._folder / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote", self._path],
            cwd=Path(__file__).parents[2],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self._end)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the forking process did not start"

    def _end(self) -> None:
        self._process.communicate()
        shutil.rmtree(self._folder)

    async def run(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> tuple[int, bytes, bytes]:
        """Run one command to its end: its exit status, output and error output."""
        out, err = os.pipe(), os.pipe()
        request = {"arguments": arguments, "folder": str(folder), "environment": dict(environment)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            try:
                link.connect(self._path)
                # Paths of other encodings are kept as surrogates, and JSON keeps those.
                socket.send_fds(link, [json.dumps(request).encode()], [out[1], err[1]])
            finally:
                os.close(out[1])
                os.close(err[1])
            link.setblocking(False)
            streams = await asyncio.gather(_read_all(out[0]), _read_all(err[0]))
            status = await asyncio.get_running_loop().sock_recv(link, 100)
        return os.waitstatus_to_exitcode(int(status)), *streams


async def _read_all(end: int) -> bytes:
    reader = asyncio.StreamReader()
    with os.fdopen(end, "rb") as pipe:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            return await reader.read()
        finally:
            transport.close()


def _become(request: bytes, streams: list[int]) -> None:
    """Turn this new process into the command."""
    asked = json.loads(request)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate([nothing, *streams]):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[0] = ""
    sys.argv = ["flowfabric", *asked["arguments"]]
    signal.set_wakeup_fd(-1)


def _serve(path: str) -> bool:
    """Fork for every request; true in a new process, false at the end."""
    selector, running = selectors.DefaultSelector(), dict[int, tuple[int, socket.socket]]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)  # noqa: T201 - the parent waits for it
        while True:
            # One at a time: each may end what the next one is about.
            key, _ = selector.select()[0]
            if key.fileobj is sys.stdin:
                return False
            if key.data is not None:
                # The test gave the command up; its end follows.
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
                continue
            if key.fileobj is not listener:
                pid, link = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                with suppress(KeyError):
                    selector.unregister(link)
                with suppress(BrokenPipeError):
                    link.send(str(status).encode())
                link.close()
                continue
            link, _ = listener.accept()
            request, streams, _, _ = socket.recv_fds(link, _MOST, 2)
            if (pid := os.fork()) == 0:
                selector.close()
                link.close()
                for _, other in running.values():
                    other.close()
                _become(request, streams)
                return True
            for stream in streams:
                os.close(stream)
            ended = os.pidfd_open(pid)
            running[ended] = pid, link
            selector.register(ended, selectors.EVENT_READ)
            selector.register(link, selectors.EVENT_READ, pid)


if __name__ == "__main__":
    from flowfabric.__main__ import main
    from flowfabric.cli.main import COMMANDS
    from flowfabric.cli.main import main as run

    for module, _ in COMMANDS.values():
        import_module(f"flowfabric.cli.commands.{module}")
    # Typer imports Pydantic when it first reads an option: 0.1 s that every fork would spend.
    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        run(["version"])
    # Collecting garbage would copy every page that a fork shares with this process.
    gc.freeze()
    if _serve(sys.argv[1]):
        main()
