"""Run a state machine against its model, with a seed that can be given again."""

from __future__ import annotations

import os
import secrets

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.model.harness import Harness

SHRINK = os.environ.get("FF_MODEL_SHRINK") == "1"


def live(
    machine: type[RuleBasedStateMachine],
    url: str,
    request: pytest.FixtureRequest,
    *,
    examples: int,
    steps: int,
) -> None:
    """Many random lives of the machine on one server."""
    chosen = request.config.getoption("--hypothesis-seed")
    number = int(chosen) if chosen else secrets.randbits(32)
    print(f"run this again with --hypothesis-seed={number}")  # noqa: T201
    harness = Harness(url)
    try:
        run_state_machine_as_test(
            seed(number)(type("Bound", (machine,), {"harness": harness})),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                derandomize=False,
                phases=[Phase.generate, Phase.shrink] if SHRINK else [Phase.generate],
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    finally:
        harness.close()
