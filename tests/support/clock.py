"""The movable clock of the tests."""

from __future__ import annotations

import os
from pathlib import Path

from flowfabric.engine.valkey.library import include, include_test_clock

__all__ = ["include_test_functions"]

_HERE = Path(__file__).parent


def include_test_functions() -> None:
    """Add the movable clock, `ff_test_key` and the like to the library of this process.

    Processes that it starts add them, too.

    A process without them refuses the library of the tests, as one in production must.
    """
    include_test_clock()
    include((_HERE / "ff_test.lua").read_text(encoding="utf-8"))
    # Python imports `sitecustomize` from there when it starts.
    os.environ["PYTHONPATH"] = str(_HERE / "startup")
