"""Only differences of the monotonic clock mean anything: it may start anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOCK_DEPENDENT = (
    "tests/scanners/test_hints.py",
    "tests/scanners/test_watch.py",
    "tests/sdk/test_lease_keeper.py",
    "tests/valkey/test_stream_follow.py",
)


def test_the_tests_run_as_on_a_machine_that_just_booted() -> None:
    assert time.monotonic() < 3600


@pytest.mark.timeout(180)
def test_a_machine_that_was_up_for_a_century() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *CLOCK_DEPENDENT],
        cwd=ROOT,
        env=os.environ | {"FF_TEST_MONOTONIC_START": "4e9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
