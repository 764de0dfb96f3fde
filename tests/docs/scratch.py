"""Running programs as a newcomer would: in an empty folder, with nothing configured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from tests.docs.markdown import ROOT

_failed_handler = re.compile(r"\w+ \d+-[0-9a-f]{8}… failed: ").match


def clean_environment() -> dict[str, str]:
    """The environment without any setting of FlowFabric, and with this checkout to import."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FF_")}
    return {**env, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "dumb"}


def run_python(folder: Path, *arguments: str, seconds: float = 50, **extra: str) -> str:
    """What a Python program prints; it must succeed, and only its handlers may raise."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env={**clean_environment(), **extra},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not tracebacks(done.stderr), done.stderr
    return done.stdout


@contextmanager
def running_worker(folder: Path, application: str) -> Generator[None]:
    """A worker process in the background of the block, serving; it must end well."""
    command = "from flowfabric.cli.main import main; main()"
    worker = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", command, "worker", application],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert any(line.startswith("Ready.") for line in worker.stdout), "the worker ended"
        yield
    finally:
        worker.terminate()
        worker.communicate(timeout=20)
    assert worker.returncode == 0


def tracebacks(text: str) -> list[str]:
    """Tracebacks by the line above them, without those of handlers that fail: workers log them."""
    lines = ["", *text.splitlines()]
    above = [before for before, line in pairwise(lines) if line.startswith("Traceback ")]
    return [line for line in above if not _failed_handler(line)]


def wait_for_server_end(folder: Path) -> None:
    """Return when the embedded Valkey of a data folder has ended, so that the folder is free."""
    deadline = time.monotonic() + 20
    while (folder / "valkey.sock").exists():
        assert time.monotonic() < deadline, "the embedded Valkey did not end with its last user"
        time.sleep(0.01)
