"""A random life of a few executions, step by step against the model.

Run one seed again with `--hypothesis-seed=N`; run long with `FF_MODEL_EXAMPLES=2000`. A failure is
shown as found; `FF_MODEL_SHRINK=1` spends minutes on a shorter one.
"""

from __future__ import annotations

import os
import secrets

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.harness import Harness
from tests.model.lives import Lives
from tests.support.server import TestServer

EXAMPLES = int(os.environ.get("FF_MODEL_EXAMPLES", "100"))
STEPS = int(os.environ.get("FF_MODEL_STEPS", "50"))
SHRINK = os.environ.get("FF_MODEL_SHRINK") == "1"
PHASES = [Phase.generate, Phase.shrink] if SHRINK else [Phase.generate]
SUITE_SECONDS = 180


@pytest.mark.timeout(SUITE_SECONDS if EXAMPLES <= 100 and not SHRINK else 0)
def test_the_engine_lives_like_the_model(
    valkey: TestServer, request: pytest.FixtureRequest
) -> None:
    chosen = request.config.getoption("--hypothesis-seed")
    number = int(chosen) if chosen else secrets.randbits(32)
    print(f"run this again with --hypothesis-seed={number}")  # noqa: T201
    harness = Harness(valkey.url)
    try:
        run_state_machine_as_test(
            seed(number)(type("BoundLives", (Lives,), {"harness": harness})),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                derandomize=False,
                phases=PHASES,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    finally:
        harness.close()
