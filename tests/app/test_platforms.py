"""Platforms without an embedded Valkey: everything works against FF_URL, and errors say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.scratch import clean_environment
from tests.support.server import TestServer, free_port
from tests.support.suspension import SECRET

ADVICE = "Start a Valkey server and set FF_URL to it, as in valkey://127.0.0.1:6379"


def run_elsewhere(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.app.other_platform", *arguments],
        cwd=folder,
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_an_application_runs_against_a_server(tmp_path: Path) -> None:
    port = free_port()
    server, url = TestServer(port=port), f"valkey://127.0.0.1:{port}"
    try:
        prepare = ("doctor", "--prepare")
        done = run_elsewhere(tmp_path, *prepare, FF_URL=url, FF_WAITPOINT_HMAC_SECRET=SECRET)
        assert done.returncode == 0, done.stdout + done.stderr
        done = run_elsewhere(tmp_path, FF_URL=url)
        assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
        assert "completed" in run_elsewhere(tmp_path, "ps", FF_URL=url).stdout
    finally:
        server.stop()


@pytest.mark.parametrize("command", [(), ("ps",), ("doctor",), ("doctor", "--prepare")])
def test_without_a_server_the_error_says_what_to_do(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = run_elsewhere(tmp_path, *command)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert f"FlowFabric has no embedded Valkey for this platform. {ADVICE}" in said, said
    if command:
        assert "Traceback" not in said
