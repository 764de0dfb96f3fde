"""Only differences of the monotonic clock mean anything: it may start anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOCK_DEPENDENT = (
    "tests/scanners/test_hints.py",
    "tests/scanners/test_leader.py",
    "tests/scanners/test_lease_expiry.py",
    "tests/scanners/test_supervisor.py",
    "tests/scanners/test_watch.py",
    "tests/sdk/test_doorbell.py",
    "tests/sdk/test_endings.py",
    "tests/sdk/test_lease_keeper.py",
    "tests/sdk/test_worker.py",
    "tests/conformance/test_stream_follow.py",
    "tests/valkey/test_stream_follow.py",
    "tests/valkey/test_stream_pool.py",
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("start", ["0", "4e9"], ids=["just-booted", "up-for-a-century"])
def test_whatever_the_uptime_of_the_machine(start: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.monotonic", *CLOCK_DEPENDENT],
        cwd=ROOT,
        env=os.environ | {"FF_TEST_MONOTONIC_START": start},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
