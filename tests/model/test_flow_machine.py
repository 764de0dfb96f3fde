"""A random life of a flow, step by step against the model.

Run one seed again with `--hypothesis-seed=N`; a failure is shown as found, `FF_MODEL_SHRINK=1`
looks for a shorter one.
"""

from __future__ import annotations

import os

import pytest

from tests.model.flow_lives import FlowLives, Unfinished
from tests.model.running import SHRINK, live
from tests.support.server import TestServer

EXAMPLES = int(os.environ.get("FF_MODEL_EXAMPLES", "25"))
STEPS = int(os.environ.get("FF_MODEL_STEPS", "25"))


@pytest.mark.timeout(180 if EXAMPLES <= 100 and not SHRINK else 0)
@pytest.mark.parametrize("machine", [FlowLives, Unfinished])
def test_a_flow_lives_like_the_model(
    valkey: TestServer, request: pytest.FixtureRequest, machine: type[FlowLives]
) -> None:
    live(machine, valkey.url, request, examples=EXAMPLES, steps=STEPS)


@pytest.mark.chaos
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", [FlowLives, Unfinished])
def test_many_flows_live_like_the_model(
    valkey: TestServer, request: pytest.FixtureRequest, machine: type[FlowLives]
) -> None:
    live(machine, valkey.url, request, examples=400, steps=40)
