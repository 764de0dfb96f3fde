"""Run one queue: submit n with no worker, then process them with one worker process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.environment import HERE, ROOT, interpreter
from benchmarks.peers.server import private_server

OURS = "flowfabric"
# The environment of each peer. arq needs an older redis client and has one of its own.
PEERS = {
    "dramatiq": "requirements",
    "huey": "requirements",
    "celery": "requirements",
    "rq": "requirements",
    "arq": "requirements-arq",
    "taskiq": "requirements",
    "saq": "requirements",
    "bullmq": "requirements",
}
# Starting an interpreter and importing a queue is not measured; it may take this long.
START_S = 20.0


@dataclass(frozen=True)
class Row:
    """One line of the table; rates are None where `note` says what went wrong."""

    name: str
    version: str = ""
    n: int = 0
    submit_per_s: float | None = None
    process_per_s: float | None = None
    lifecycle_per_s: float | None = None
    note: str = ""


def run_peer(name: str, n: int, timeout: float, say: Callable[[str], None]) -> Row:
    """Measure one peer on a server of its own; a failure is a row, not an exception."""
    try:
        python = interpreter(PEERS[name], say)
        with private_server() as url, tempfile.TemporaryDirectory(prefix="peers-") as folder:
            base = [str(python), str(HERE / "queues" / f"{name}_peer.py")]
            out = Path(folder)
            say("submitting")
            submitted = _phase([*base, "submit"], url, n, timeout / 3, out / "submit.json")
            say("processing")
            work_s = timeout * 2 / 3
            worked = _phase([*base, "work"], url, submitted["n"], work_s, out / "work.json")
    except (OSError, RuntimeError, ValueError) as error:
        return Row(name, note=f"failed: {error}")
    if worked["n"] < 2:
        return Row(name, submitted["version"], note="failed: the worker ran no task in time")
    submit_per_s = submitted["n"] / submitted["seconds"]
    process_per_s = worked["n"] / worked["seconds"]
    return Row(
        name,
        submitted["version"],
        worked["n"],
        submit_per_s,
        process_per_s,
        # n / (submit time + processing time), also when the time limit made the two n differ.
        1 / (1 / submit_per_s + 1 / process_per_s),
        _note(n, submitted, worked),
    )


def run_ours(n: int, timeout: float) -> Row:
    """FlowFabric's own bench command, as a user runs it."""
    command = [str(Path(sys.executable).parent / "flowfabric"), "bench", "lifecycle"]
    try:
        status, stdout, stderr = _run([*command, "--n", str(n), "--json"], timeout + START_S)
        if status:
            return Row(OURS, note=f"failed: {_last_line(stderr)}")
        found = json.loads(stdout)
        return Row(
            OURS,
            version(OURS),
            found["n"],
            found["submit_per_s"],
            found["process_per_s"],
            found["lifecycle_per_s"],
            found.get("note", "flowfabric bench lifecycle"),
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        return Row(OURS, note=f"failed: {type(error).__name__}: {error}")


def _note(n: int, submitted: dict, worked: dict) -> str:
    notes = [submitted["note"]]
    if submitted["n"] < n or not worked["complete"]:
        notes.append("stopped by --timeout")
    elif worked["n"] < n:
        notes.append(f"{n - worked['n']} tasks never ran")
    return "; ".join(notes)


def _phase(command: list[str], url: str, n: int, budget: float, out: Path) -> dict:
    options = ["--url", url, "--n", str(n), "--budget", str(budget), "--out", str(out)]
    _, _, stderr = _run([*command, *options], budget + START_S)
    if not out.is_file():
        raise RuntimeError(_last_line(stderr))
    return json.loads(out.read_text())


def _run(command: list[str], limit: float) -> tuple[int, str, str]:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A group of its own, so that what it started ends with it.
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer in {limit:.0f} s") from None
    finally:
        if process.poll() is None:
            _end_group(process)
    return process.returncode, stdout, stderr


def _end_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" │╰─╯")]
    return lines[-1][:200] if lines else "no message"
