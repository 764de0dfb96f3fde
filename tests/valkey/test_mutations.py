"""Each guard of the Lua library, removed on purpose, must turn a named test red.

A mutant is one textual change of one file. It is loaded on a private server, and the scenario that
probes the guard, a test of this folder, must fail there. A replacement that no longer applies fails
too: then the guard has moved and the mutant must follow it.
"""

from __future__ import annotations

import pytest

from tests.support.engine import Engine
from tests.valkey.flow_scenarios import (
    counts_an_edge_once,
    finishes_once,
    goes_on_after_completing_and_claiming,
    staged_edges_count_nothing,
)
from tests.valkey.mutants import (
    MUTANTS,
    Scenario,
    promotes_nothing_early,
    promotes_only_what_is_delayed,
    trims_nothing_early,
)
from tests.valkey.mutants_admission import MUTANTS as ADMISSION
from tests.valkey.mutants_budgets import MUTANTS as BUDGETS
from tests.valkey.mutants_flows import MUTANTS as FLOWS
from tests.valkey.mutants_lanes import MUTANTS as LANES
from tests.valkey.mutants_quotas import MUTANTS as QUOTAS
from tests.valkey.mutants_quotas import counts_a_retry_once_in_a_batch
from tests.valkey.mutants_repeats import MUTANTS as REPEATS
from tests.valkey.mutants_repeats import repeats_a_revocation, repeats_an_override
from tests.valkey.mutants_replays import MUTANTS as REPLAYS
from tests.valkey.mutants_routing import MUTANTS as ROUTING
from tests.valkey.mutants_routing import takes_the_best_of_all_it_covers
from tests.valkey.mutants_tasks import MUTANTS as TASKS
from tests.valkey.mutation import crashed, failure_of, private_engine, private_server

__all__ = ["private_engine", "private_server"]

ALL = MUTANTS + REPEATS + TASKS + ROUTING + FLOWS + REPLAYS + ADMISSION + QUOTAS + LANES + BUDGETS
OWN_SCENARIOS: list[Scenario] = [
    trims_nothing_early,
    promotes_nothing_early,
    promotes_only_what_is_delayed,
    repeats_a_revocation,
    repeats_an_override,
    counts_a_retry_once_in_a_batch,
    takes_the_best_of_all_it_covers,
    finishes_once,
    staged_edges_count_nothing,
    counts_an_edge_once,
    goes_on_after_completing_and_claiming,
]


@pytest.mark.parametrize("scenario", OWN_SCENARIOS)
async def test_the_scenarios_of_this_file_hold(engine: Engine, scenario: Scenario) -> None:
    await scenario(engine)


@pytest.mark.parametrize(
    ("path", "guard", "replacement", "scenario"),
    [row[1:] for row in ALL],
    ids=[row[0] for row in ALL],
)
async def test_a_removed_guard_is_noticed(
    private_engine: Engine, path: str, guard: str, replacement: str, scenario: Scenario
) -> None:
    failure = await failure_of(private_engine, path, guard, replacement, scenario)
    # A mutant that merely crashes shows nothing about the guard.
    assert not crashed(failure), failure
