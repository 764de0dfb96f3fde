"""The guards of the Lua library, each with a change that removes it and a test that must notice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.conformance import (
    test_claim_execution,
    test_claim_many,
    test_claim_offers,
    test_claim_repeats,
    test_fencing,
    test_lease_grants,
    test_lease_loss,
    test_lease_races,
    test_lease_reclaim,
)
from tests.support.engine import Engine
from tests.valkey import test_claim_execution as stored_claim_execution
from tests.valkey import test_claim_many as stored_claim_many
from tests.valkey import test_claim_offers as stored_claim_offers
from tests.valkey import test_fencing as stored_fencing
from tests.valkey import test_lease_grants as stored_lease_grants
from tests.valkey import test_lease_loss as stored_lease_loss
from tests.valkey import test_lease_renew as stored_lease_renew
from tests.valkey import test_lease_timers

Scenario = Callable[[Engine], Awaitable[None]]


def matrix(situation: stored_fencing.Situation, verb: str) -> Scenario:
    """One cell of the fencing matrix."""
    ((_, code, repeats),) = [row for row in stored_fencing.MATRIX if row[0] is situation]
    return lambda engine: stored_fencing.test_matrix(engine, situation, code, repeats, verb)


def triple(verb: str = "renew") -> Scenario:
    return lambda engine: test_fencing.test_each_part_of_the_triple_must_match(engine, verb)


async def trims_nothing_early(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    await engine.advance(86_399_000)
    verdicts = await engine.backend.upkeep.trim_retention(
        handle.execution_id.tag, "default", [handle.execution_id]
    )
    assert verdicts == ["not_due"]


async def promotes_nothing_early(engine: Engine) -> None:
    execution_id = await engine.create(delay_until=await engine.now() + 10_000)
    await engine.advance(9_000)
    promote = engine.backend.upkeep.promote_delayed
    assert await promote(execution_id.tag, "default", [execution_id]) == ["not_yet_due"]


async def promotes_only_what_is_delayed(engine: Engine) -> None:
    execution_id = await engine.create()
    promote = engine.backend.upkeep.promote_delayed
    assert await promote(execution_id.tag, "default", [execution_id]) == ["not_delayed_cleaned"]


FENCE = "lib/80_fence.lua"
LEASE = "lib/70_lease.lua"
CLAIMING = "lib/92_claiming.lua"
GRANTING = "lib/94_granting.lua"
CONTEXT = "lib/40_context.lua"
CLAIM = "functions/ff_claim_execution.lua"
RESUME = "functions/ff_claim_resumed.lua"
FUSED = "functions/ff_grant_and_claim.lua"
GRANT = "functions/ff_issue_claim_grant.lua"
RECLAIM_GRANT = "functions/ff_issue_reclaim_grant.lua"
RECLAIM = "functions/ff_reclaim.lua"
MARK = "functions/ff_mark_expired.lua"
REVOKE = "functions/ff_revoke.lua"
EXPIRE = "functions/ff_expire.lua"
TRIM = "functions/ff_trim.lua"
PROMOTE = "functions/ff_promote_delayed.lua"
PROGRESS = "functions/ff_progress.lua"
RETRY = "lib/90_retry.lua"
CANCEL = "functions/ff_cancel.lua"
REGISTER = "functions/ff_worker_register.lua"

NOT_RECLAIMABLE = "reply.err('execution_not_reclaimable') or nil"
UNCHECKED_PROGRESS = (
    PROGRESS,
    "fence.lease_problem(c, id, rec)",
    "(not S.is_active(rec.state) and reply.not_active(rec))",
)

# Name, file, the guard as written, what stands there instead, the scenario that must notice.
MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    # --- the fence ---
    ("lease id", FENCE, "given.lease_id ~= record.lease_id(rec) or ", "", triple()),
    ("epoch", FENCE, "tonumber(given.epoch) ~= record.epoch(rec)\n", "false\n", triple()),
    (
        "attempt id",
        FENCE,
        "or (given.attempt_id ~= '' and given.attempt_id ~= record.attempt_id(rec))",
        "",
        triple(),
    ),
    (
        "attempt index",
        FENCE,
        "or (given.index ~= '' and tonumber(given.index) ~= record.attempt_index(rec))",
        "",
        triple(),
    ),
    (
        "exact proof",
        FENCE,
        "and text == rec.lease .. '/' .. rec.attempt",
        "",
        matrix(test_fencing.reclaimed_by_another, "complete"),
    ),
    (
        "expiry on the short way",
        FENCE,
        "and tonumber(rec.lease_expires_at) > c.now then\n    return nil",
        "then\n    return nil",
        matrix(test_fencing.lapsed_unmarked, "complete"),
    ),
    (
        "expiry",
        FENCE,
        "S.is_lease_expired(rec.state) or tonumber(rec.lease_expires_at) <= c.now",
        "false",
        matrix(test_fencing.lapsed_unmarked, "renew"),
    ),
    (
        "marking by a refused call",
        FENCE,
        "if marks then lease.mark_expired",
        "if false then lease.mark_expired",
        matrix(test_fencing.lapsed_unmarked, "fail"),
    ),
    (
        "verbs that must not mark",
        FENCE,
        "if marks then lease.mark_expired",
        "if true then lease.mark_expired",
        matrix(test_fencing.lapsed_unmarked, "cancel"),
    ),
    (
        "revoked",
        FENCE,
        "if S.is_lease_revoked(rec.state) then return reply.err('lease_revoked') end",
        "",
        matrix(test_fencing.revoked, "complete"),
    ),
    (
        "not active",
        FENCE,
        "if not S.is_active(rec.state) then return reply.not_active(rec) end",
        "",
        matrix(stored_fencing.cancelled_by_operator, "complete"),
    ),
    (
        "fence required",
        FENCE,
        "if not override then return reply.err('fence_required') end",
        "",
        lambda e: test_fencing.test_a_missing_or_partial_triple(e, "complete"),
    ),
    (
        "partial triple",
        FENCE,
        "return reply.err('partial_fence_triple')",
        "local _ = nil",
        lambda e: test_fencing.test_a_missing_or_partial_triple(e, "delay"),
    ),
    (
        "own attempt by epoch",
        FENCE,
        "and held and string.sub(held, 38) == given.epoch",
        "",
        matrix(stored_fencing.resumed_and_completed, "complete"),
    ),
    (
        "own failure",
        RETRY,
        " or own.ended_by ~= 'fail' then",
        " then",
        matrix(stored_fencing.capped, "fail"),
    ),
    (
        "fence of a worker's cancel",
        CANCEL,
        "if not unfenced then",
        "if false then",
        matrix(test_fencing.reclaimed_by_another, "cancel"),
    ),
    (
        "progress identity",
        PROGRESS,
        " or fence.mismatch(rec, fence.parse(args[2]))",
        "",
        matrix(test_fencing.reclaimed_by_another, "progress"),
    ),
    (
        "progress after expiry",
        *UNCHECKED_PROGRESS,
        matrix(test_fencing.lapsed_unmarked, "progress"),
    ),
    (
        "progress after revocation",
        *UNCHECKED_PROGRESS,
        matrix(test_fencing.revoked, "progress"),
    ),
    (
        "epoch rises",
        LEASE,
        "old_epoch + 1",
        "math.max(1, old_epoch)",
        test_fencing.test_epochs_order_all_owners,
    ),
    # --- grants ---
    (
        "grant token",
        GRANTING,
        "or not values.equal(stored[2] or '', token)",
        "",
        stored_lease_grants.test_a_grant_needs_its_worker_and_its_token,
    ),
    (
        "grant worker",
        GRANTING,
        "or stored[1] ~= string.match(worker, '^%S+')",
        "",
        stored_lease_grants.test_a_grant_needs_its_worker_and_its_token,
    ),
    (
        "grant expiry",
        GRANTING,
        "if tonumber(stored[3]) < c.now then",
        "if false then",
        stored_lease_grants.test_a_grant_lapses_one_millisecond_later,
    ),
    (
        "last millisecond of a grant",
        GRANTING,
        "if tonumber(stored[3]) < c.now then",
        "if tonumber(stored[3]) <= c.now then",
        test_lease_grants.test_a_grant_is_valid_through_its_last_millisecond,
    ),
    (
        "one grant slot",
        GRANT,
        " or granting.repeated(c, id, rec, args[6]))",
        ")",
        test_lease_grants.test_one_slot_for_claim_grants,
    ),
    (
        "one reclaim grant slot",
        RECLAIM_GRANT,
        "    or granting.repeated(c, id, rec, args[6])\n",
        "",
        test_lease_grants.test_one_slot_for_reclaim_grants,
    ),
    (
        "grant in the way of the fused claim",
        FUSED,
        "if granting.live(c, rec) then",
        "if false then",
        test_lease_grants.test_one_slot_for_a_paused_execution,
    ),
    (
        "capabilities of a grant",
        GRANTING,
        "if missing then",
        "if false then",
        stored_lease_grants.test_a_mismatch_names_what_is_missing_and_stamps_one_field,
    ),
    (
        "lane of a claim",
        GRANTING,
        "if lane ~= '' and lane ~= rec.lane_id then",
        "if false then",
        test_claim_execution.test_a_wrong_lane_is_refused_and_leaves_the_grant,
    ),
    (
        "closed lane",
        CONTEXT,
        "return state == 'paused' or state == 'disabled'",
        "return false",
        lambda e: test_lease_grants.test_a_lane_that_hands_out_nothing_gives_no_grant(e, "paused"),
    ),
    # --- claims ---
    (
        "resume through the right door",
        CLAIM,
        "if S.has_paused_attempt(rec.state) then",
        "if false then",
        stored_claim_execution.test_a_paused_attempt_is_resumed_with_the_grant_of_the_wrong_claim,
    ),
    (
        "claim of what is runnable",
        CLAIM,
        "if not S.is_runnable(rec.state) then",
        "if false then",
        stored_claim_execution.test_check_order_of_a_fresh_claim,
    ),
    (
        "resume of what is eligible",
        RESUME,
        "if not S.is_eligible(rec.state) or",
        "if",
        stored_claim_execution.test_check_order_of_a_resumed_claim,
    ),
    (
        "answer of a lost claim is the claimer's",
        GRANTING,
        "and record.lease_id(rec) == lease_id",
        "",
        test_claim_repeats.test_a_repeated_fresh_claim_gives_the_same_claim,
    ),
    (
        "answer of a lost claim is current",
        GRANTING,
        "and tonumber(rec.lease_expires_at) > c.now",
        "",
        test_claim_repeats.test_a_repeat_after_the_lease_ran_out_is_refused,
    ),
    (
        "memory of requests",
        CLAIMING,
        "return string.find(want.known, trace_of(want), 1, true) and replayed(c, want)",
        "return nil",
        test_claim_many.test_a_repeated_request_gives_the_same_claims,
    ),
    (
        "repeat of a call that completed",
        CLAIMING,
        "return #rows > 0 and rows or nil",
        "return nil",
        test_claim_many.test_repeating_a_completion_gives_the_same_claims,
    ),
    (
        "live grants are skipped",
        CLAIMING,
        "(rec.grant_expires_at and tonumber(rec.grant_expires_at) >= c.now)\n      or ",
        "",
        test_claim_offers.test_live_grants_are_skipped_and_hide_nothing,
    ),
    (
        "the record's word on capabilities",
        CLAIMING,
        "\n      or not offers.takes(offered, rec)",
        "",
        lambda e: stored_claim_offers.test_an_index_does_not_decide_who_may_claim(e, lost=True),
    ),
    (
        "grace of a lane",
        CLAIMING,
        "tonumber(rec.lease_expires_at) + grace <= c.now",
        "true",
        stored_claim_offers.test_expired_work_is_offered_after_the_lanes_grace,
    ),
    (
        "claims on a closed lane",
        CLAIMING,
        "if c:is_closed(want.lane) then",
        "if false then",
        lambda e: test_claim_offers.test_a_closed_lane_hands_out_nothing(e, "disabled"),
    ),
    (
        "better work of an index that was not seen whole",
        CLAIMING,
        "if crowded[key] == at and",
        "if false and",
        lambda e: (
            stored_claim_many.test_what_is_passed_over_does_not_hide_the_next_best_of_its_index(
                e, "granted"
            )
        ),
    ),
    (
        "no more than asked for",
        CLAIMING,
        "while #rows < want.max and queues[turn] do",
        "while queues[turn] do",
        test_claim_many.test_no_more_than_asked_and_the_rest_is_counted,
    ),
    # --- losing and reclaiming ---
    (
        "marking before the expiry",
        MARK,
        "if tonumber(rec.lease_expires_at) > c.now then return 'not_yet_expired' end",
        "",
        stored_lease_loss.test_marking_keeps_the_lease_and_offers_the_execution,
    ),
    (
        "marking once",
        LEASE,
        "if rec.state ~= S.ACTIVE then return end",
        "",
        matrix(test_fencing.lapsed_and_marked, "complete"),
    ),
    (
        "expected lease of a revocation",
        REVOKE,
        "if expected ~= '' and expected ~= held then",
        "if false then",
        test_lease_loss.test_the_expected_lease_is_compared,
    ),
    (
        "revocation of what is active",
        REVOKE,
        "if not S.is_active(rec.state) then return reply.already('no_active_lease') end",
        "",
        lambda e: test_lease_races.test_complete_and_revoke(e, first=True),
    ),
    (
        "reclaim of a lost lease only",
        RECLAIM,
        "claiming.reclaim_problem(c, rec, worker, own_cap)",
        f"(not S.is_active(rec.state) and {NOT_RECLAIMABLE})",
        test_lease_reclaim.test_what_cannot_be_reclaimed,
    ),
    (
        "reclaim grant for a lost lease only",
        RECLAIM_GRANT,
        "claiming.reclaim_problem(c, rec, args[3])",
        f"(not S.is_active(rec.state) and {NOT_RECLAIMABLE})",
        test_lease_reclaim.test_what_cannot_be_reclaimed,
    ),
    (
        "cap of a reclaim",
        RECLAIM,
        "    or claiming.cap_problem(c, id, rec, own_cap)\n",
        "",
        lambda e: test_lease_reclaim.test_cap_zero_means_never(e, "reclaim"),
    ),
    (
        "cap of a reclaim grant",
        RECLAIM_GRANT,
        "    or claiming.cap_problem(c, id, rec)\n",
        "",
        lambda e: test_lease_reclaim.test_cap_zero_means_never(e, "grant"),
    ),
    (
        "cap of a claim",
        CLAIMING,
        "if end_at_cap(c, id, rec) then return false end",
        "",
        stored_claim_many.test_the_reclaim_cap_ends_an_execution_found_by_a_claim,
    ),
    (
        "lease end is exclusive",
        FENCE,
        "tonumber(rec.lease_expires_at) <= c.now then",
        "tonumber(rec.lease_expires_at) < c.now then",
        stored_lease_renew.test_a_lease_ends_at_its_expiry_not_after,
    ),
    # --- time ---
    (
        "due check of expiry",
        EXPIRE,
        "not due or tonumber(due) > c.now or ",
        "",
        test_lease_races.test_a_timer_scan_that_comes_after_a_new_claim,
    ),
    (
        "rest of a paused attempt's time",
        LEASE,
        "tonumber(rec.attempt_timeout_remaining_ms or timeout)",
        "timeout",
        test_lease_timers.test_two_pauses_share_one_allowance,
    ),
    (
        "terminal check of the trimmer",
        TRIM,
        " or not S.is_terminal(rec.state)",
        "",
        lambda e: test_lease_races.test_purge_and_replay(e, first=False),
    ),
    (
        "due check of the trimmer",
        TRIM,
        "if ending.purge_due(id, rec) > c.now then return 'not_due' end",
        "",
        trims_nothing_early,
    ),
    (
        "due check of the promoter",
        PROMOTE,
        "if tonumber(rec.delay_until or 0) > c.now then return 'not_yet_due' end",
        "",
        promotes_nothing_early,
    ),
    (
        "state check of the promoter",
        PROMOTE,
        "or not S.is_delayed(rec.state) then",
        "then",
        promotes_only_what_is_delayed,
    ),
]
