"""A random life of a few executions, step by step against the model.

Run one seed again with `--hypothesis-seed=N`; run long with `FF_MODEL_EXAMPLES=2000`. A failure is
shown as found; `FF_MODEL_SHRINK=1` spends minutes on a shorter one.
"""

from __future__ import annotations

import os

import pytest

from tests.model.lives import Lives
from tests.model.running import SHRINK, live
from tests.support.server import TestServer

EXAMPLES = int(os.environ.get("FF_MODEL_EXAMPLES", "100"))
STEPS = int(os.environ.get("FF_MODEL_STEPS", "50"))
SUITE_SECONDS = 180


@pytest.mark.timeout(SUITE_SECONDS if EXAMPLES <= 100 and not SHRINK else 0)
def test_the_engine_lives_like_the_model(
    valkey: TestServer, request: pytest.FixtureRequest
) -> None:
    live(Lives, valkey.url, request, examples=EXAMPLES, steps=STEPS)
