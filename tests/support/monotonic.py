"""Another origin of the monotonic clock: only its differences mean anything."""

from __future__ import annotations

import os
import time

_real = time.monotonic
_offset = float(os.environ.get("FF_TEST_MONOTONIC_START", "0")) - _real()


def _moved() -> float:
    return _real() + _offset


def move_clock() -> None:
    """Start the clock at FF_TEST_MONOTONIC_START seconds, or 0, as on a machine just booted."""
    time.monotonic = _moved
