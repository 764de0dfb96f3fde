"""The event loop of workers and servers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from flowfabric.sdk.service import service_runner

async def main():
    return gc.get_freeze_count()

with service_runner() as runner:
    print(runner.run(main()) > 1000, type(runner.get_loop()).__module__)
"""


def test_what_is_loaded_is_left_out_of_garbage_collections() -> None:
    """In a process of its own: this one would keep its garbage."""
    command = [sys.executable, "-c", PROGRAM]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["True", "uvloop"]
