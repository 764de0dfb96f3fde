"""The guards of lanes and drains: a change that removes each, and a test that must notice."""

from __future__ import annotations

from tests.conformance import test_lane_placement as placement
from tests.conformance import test_worker_drain as drain
from tests.scanners import test_worker_drain as lasting
from tests.valkey import test_lane_copies as copies
from tests.valkey.mutants import Scenario

LANES = "lib/76_lanes.lua"
CLAIMING = "lib/92_claiming.lua"
WORKERS = "lib/95_workers.lua"

# Name, file, the guard as written, what stands there instead, the scenario that must notice.
MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    (
        "an older copy of lane settings wins",
        LANES,
        "  if is_newer(placed, version) then return false end\n",
        "",
        copies.test_an_older_copy_replaces_nothing,
    ),
    (
        "a changed weight marks nothing",
        LANES,
        "if c:lane(lane).weight ~= weight then score_again(c, lane) end",
        "",
        copies.test_another_weight_changes_the_order_of_what_waits,
    ),
    (
        "any setting marks the lane",
        LANES,
        "if c:lane(lane).weight ~= weight then score_again(c, lane) end",
        "score_again(c, lane)",
        copies.test_only_a_new_weight_marks_the_lane,
    ),
    (
        "a partition takes keys of any placement",
        "lib/91_creating.lua",
        "    if opts.view then check_placement(c, lane, opts.view) end\n",
        "",
        placement.test_an_outdated_submitter_is_corrected,
    ),
    (
        "the old partition goes on taking keys",
        "functions/ff_find_keys.lua",
        "  lanes.place(c, args[1], args[2], args[3])\n",
        "",
        copies.test_a_search_seals_the_old_partition,
    ),
    (
        "a draining worker claims",
        CLAIMING,
        "    if want.refused then return NONE, REFUSED end\n",
        "",
        drain.test_a_draining_worker_gets_nothing_more,
    ),
    (
        "a draining worker gets grants",
        "functions/ff_issue_claim_grant.lua",
        " or workers.is_draining(c, record.instance_of(args[3])) then",
        " then",
        drain.test_a_draining_worker_gets_nothing_more,
    ),
    (
        "a draining worker gets grants to reclaim",
        "functions/ff_issue_reclaim_grant.lua",
        "workers.is_draining(c, record.instance_of(args[3]))",
        "false",
        drain.test_no_grant_to_reclaim_either,
    ),
    (
        "a mark lasts for ever",
        WORKERS,
        "return until_ms and tonumber(until_ms) > c.now",
        "return until_ms",
        lasting.test_marks_lapse_when_the_worker_is_gone,
    ),
    (
        "a drain starts without a worker",
        "functions/ff_worker_drain.lua",
        "K.worker_record(tag, instance)) == 0 then",
        "K.worker_record(tag, instance)) < 0 then",
        drain.test_the_worker_and_operators_are_told,
    ),
]
