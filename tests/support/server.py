"""A private Valkey server process for tests: own folder, unix socket or free loopback port."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from flowfabric.valkey.embedded import locate_binary


def free_port() -> int:
    """A loopback port nobody listens on right now.

    Not one of those that systems give to outgoing connections: on a busy machine, one of these took
    the port before the server did.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class TestServer:
    """One valkey-server child process; `stop()` ends it and removes its folder."""

    __test__ = False

    def __init__(self, *extra: str, port: int = 0) -> None:
        # A short path: unix socket names are limited to about 100 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="fft-"))
        self.socket_path = self.folder / "v.sock"
        self.port = port
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start (again) on the same folder, port and socket; returns when it accepts."""
        self._process = subprocess.Popen(
            [
                str(locate_binary()),
                *("--port", str(self.port), "--bind", "127.0.0.1"),
                *("--unixsocket", str(self.socket_path), "--dir", str(self.folder)),
                *("--save", "", "--daemonize", "no", "--logfile", str(self.folder / "log")),
                *self._extra,
            ],
            stdin=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 10
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log").read_text())
            time.sleep(0.005)

    def kill(self) -> None:
        """kill -9, as a crash would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self.socket_path.unlink(missing_ok=True)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        if not os.path.exists(self.socket_path):  # noqa: PTH110
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket_path))
            except OSError:
                return False
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
