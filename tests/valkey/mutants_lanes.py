"""The guards of lanes and drains: a change that removes each, and a test that must notice."""

from __future__ import annotations

from tests.conformance import test_claim_execution as claim_execution
from tests.conformance import test_flow_handover as handover
from tests.conformance import test_lane_placement as placement
from tests.conformance import test_worker_drain as drain
from tests.scanners import test_worker_drain as lasting
from tests.sdk import test_claim_for_worker as claim_for_worker
from tests.valkey import test_claim_lanes as lanes
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
        "a full registry refuses lanes that it knows",
        "functions/ff_register_places.lua",
        "room <= 0 and server.call('SISMEMBER', K.LANES, lane) == 0",
        "room <= 0",
        copies.test_a_full_registry_refuses_only_lanes_that_it_does_not_know,
    ),
    (
        "other settings push placements out",
        LANES,
        "  if before ~= config.spread_over then\n    earlier",
        "  do\n    earlier",
        copies.test_other_settings_leave_the_placements_alone,
    ),
    (
        "a lane that never moved has a placement",
        LANES,
        "  if not known and before == config.spread_over then return end\n",
        "",
        copies.test_other_settings_leave_the_placements_alone,
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
        "lib/90_offers.lua",
        "  if not drained then return offered end\n",
        "  if true then return offered end\n",
        drain.test_a_draining_worker_gets_nothing_more,
    ),
    (
        "a draining worker gets grants",
        "functions/ff_issue_claim_grant.lua",
        "if workers.is_drained(c, worker, rec) then",
        "if false then",
        drain.test_a_draining_worker_gets_nothing_more,
    ),
    (
        "a draining worker gets grants to reclaim",
        CLAIMING,
        " or workers.is_drained(c, worker, rec) then",
        " then",
        drain.test_no_grant_to_reclaim_either,
    ),
    (
        "a draining worker uses a grant",
        "functions/ff_claim_execution.lua",
        " or workers.is_drained(c, worker, rec) then",
        " then",
        drain.test_a_grant_that_a_draining_worker_holds_is_of_no_use,
    ),
    (
        "a draining worker resumes",
        "functions/ff_claim_resumed.lua",
        " or workers.is_drained(c, worker, rec) then",
        " then",
        drain.test_a_grant_that_a_draining_worker_holds_is_of_no_use,
    ),
    (
        "a drain concerns all namespaces",
        WORKERS,
        "return marks and (marks['*'] or marks[rec.namespace])",
        "return marks",
        drain.test_a_drain_concerns_the_namespaces_that_the_worker_serves,
    ),
    (
        "a draining worker claims what was admitted",
        CLAIMING,
        "offers.undrained(c, want, offers.of(want.capabilities)), {}",
        "offers.of(want.capabilities), {}",
        drain.test_a_draining_worker_gets_nothing_more,
    ),
    (
        "a draining worker gets what it released",
        CLAIMING,
        "K.lane(tag, lane, 'sigs'), K.lane(tag, lane, 'config'), K.index(tag, 'draining'))",
        "K.lane(tag, lane, 'sigs'), K.lane(tag, lane, 'config'))",
        handover.test_a_draining_worker_does_not_get_what_it_released,
    ),
    (
        "a drain of the default namespace",
        "lib/90_offers.lua",
        "offered.serves_default and not drained.default",
        "offered.serves_default",
        drain.test_a_drain_in_the_default_namespace_leaves_the_others,
    ),
    (
        "lost work is granted in its grace period",
        "functions/ff_issue_claim_grant.lua",
        "lost = claiming.mode(c, rec) == 'reclaimed'",
        "",
        claim_for_worker.test_lost_work_in_its_grace_period_or_at_its_cap_is_not_reserved,
    ),
    (
        "anyone returns a grant",
        "functions/ff_release_grant.lua",
        "if token and values.equal(token, args[2]) then",
        "if token then",
        claim_execution.test_a_grant_that_is_returned_is_free_for_others,
    ),
    (
        "a mark lasts for ever",
        WORKERS,
        "if tonumber(until_ms) > c.now then marks",
        "if true then marks",
        lasting.test_marks_expire_after_the_worker_has_left,
    ),
    (
        "a drain starts without a worker",
        "functions/ff_worker_drain.lua",
        "K.worker_record(tag, instance)) == 0 then",
        "K.worker_record(tag, instance)) < 0 then",
        drain.test_the_worker_and_operators_are_told,
    ),
    (
        "a lane that drains does not ring",
        LANES,
        "  waiting.ring_all(c, lane)\n",
        "  if c:lane(lane).state == 'active' then waiting.ring_all(c, lane) end\n",
        lanes.test_a_paused_lane_accepts_and_goes_on_where_it_stood,
    ),
    (
        "the marks of a swept worker stay",
        "functions/ff_worker_sweep.lua",
        "if drained then",
        "if false then",
        lasting.test_a_swept_worker_is_no_longer_drained,
    ),
]
