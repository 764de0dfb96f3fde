"""The guards of work that waits for a worker with its task, as in `mutants.py`."""

from __future__ import annotations

from tests.conformance import test_claim_tasks as tasks
from tests.valkey.mutants import CLAIMING, GRANTING, Scenario

WAITING = "lib/75_waiting.lua"
RELEASE = "functions/ff_release_unknown.lua"

MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    (
        "tasks that the worker does not know",
        CLAIMING,
        "if offered.no_other_tasks and",
        "if false and",
        lambda e: tasks.test_an_unknown_task_waits_for_a_worker_that_knows_it(e, None),
    ),
    (
        "workers that take every task",
        CLAIMING,
        "if offered.no_other_tasks and",
        "if",
        tasks.test_a_worker_without_the_mark_takes_every_task,
    ),
    (
        "the task is required from then on",
        WAITING,
        "if not rec.offered_to then return required end",
        "if true then return required end",
        tasks.test_retries_delays_and_replays_keep_it,
    ),
    (
        "tasks that a grant offers",
        GRANTING,
        "(args[11] or '')",
        "''",
        tasks.test_grants_cover_the_task_as_claims_do,
    ),
    (
        "the task of a released execution",
        RELEASE,
        "if args[4] ~= rec.execution_kind then",
        "if false then",
        tasks.test_only_its_own_task_can_be_released,
    ),
    (
        "signatures that nobody chose",
        WAITING,
        "if not waiting.task_in(signature) then chosen",
        "if true then chosen",
        tasks.test_the_most_signatures_of_a_lane_are_those_that_people_chose,
    ),
    (
        "own tasks among very many",
        WAITING,
        "if used == 1 and",
        "if false and",
        tasks.test_the_most_signatures_of_a_lane_are_those_that_people_chose,
    ),
]
