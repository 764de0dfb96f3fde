"""A pytest plugin that lets the monotonic clock start at FF_TEST_MONOTONIC_START seconds."""

from __future__ import annotations

import os
import time

_real = time.monotonic
_offset = float(os.environ["FF_TEST_MONOTONIC_START"]) - _real()


def _moved() -> float:
    return _real() + _offset


time.monotonic = _moved
