"""The guards of work that waits for a worker with its task, as in `mutants.py`."""

from __future__ import annotations

from tests.conformance import test_claim_namespaces as namespaces
from tests.conformance import test_claim_tasks as tasks
from tests.valkey.mutants import CLAIMING, GRANTING, Scenario

WAITING = "lib/75_waiting.lua"
OFFERS = "lib/90_offers.lua"
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
        "required ~= '' and not waiting.task_in(signature)",
        "true",
        lambda e: tasks.test_the_most_signatures_of_a_lane_are_those_that_people_chose(
            e, "default"
        ),
    ),
    (
        "own tasks among very many",
        WAITING,
        "if used == 1 and",
        "if false and",
        lambda e: tasks.test_the_most_signatures_of_a_lane_are_those_that_people_chose(
            e, "default"
        ),
    ),
    (
        "the namespace of what waits",
        WAITING,
        "if not namespace or namespace == 'default' then return required end",
        "if true then return required end",
        lambda e: namespaces.test_a_worker_takes_only_work_of_its_namespaces(e, "acme"),
    ),
    (
        "the namespaces that a worker serves",
        OFFERS,
        "(not namespaces or serves[namespace] or false)\n      and ",
        "",
        lambda e: namespaces.test_a_worker_takes_only_work_of_its_namespaces(e, "acme"),
    ),
    (
        "workers that do not serve the default namespace",
        OFFERS,
        "if not offered or not offered.serves_default or",
        "if not offered or",
        lambda e: namespaces.test_a_worker_takes_only_work_of_its_namespaces(e, "acme"),
    ),
    (
        "whose turn it is",
        CLAIMING,
        "offers.served(c, want, queue.namespace)",
        "",
        namespaces.test_a_noisy_namespace_delays_others_by_one_turn,
    ),
    (
        "turns within one claim",
        CLAIMING,
        "turn = turn + 1",
        "turn = 1",
        namespaces.test_claims_share_as_the_model_does,
    ),
]
