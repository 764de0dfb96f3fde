"""Each guard of tokens, signals and suspensions, removed on purpose, must turn a test red."""

from __future__ import annotations

import pytest

from tests.conformance import (
    test_susp_approval,
    test_susp_conditions,
    test_susp_pending,
    test_susp_races,
    test_susp_reads,
    test_susp_refusals,
    test_susp_repeat,
    test_susp_resume,
    test_susp_signal,
    test_susp_suspend,
    test_token_secrets,
)
from tests.support.engine import Engine
from tests.valkey import test_susp_effects, test_susp_endings, test_susp_timeout, test_token_forgery
from tests.valkey import test_susp_pending as stored_susp_pending
from tests.valkey import test_susp_refusals as stored_susp_refusals
from tests.valkey import test_susp_resume as stored_susp_resume
from tests.valkey import test_susp_signal as stored_susp_signal
from tests.valkey import test_token_secrets as stored_token_secrets
from tests.valkey.mutants import Scenario
from tests.valkey.mutation import crashed, failure_of, private_engine, private_server

# The fixtures come with the module that made them.
__all__ = ["private_engine", "private_server"]

TOKENS = "lib/66_tokens.lua"
VALUES = "lib/15_values.lua"
CONDITIONS = "lib/67_conditions.lua"
SUSPENSION = "lib/78_suspension.lua"
SIGNAL = "functions/ff_signal.lua"
SUSPEND = "functions/ff_suspend.lua"
RESUME = "functions/ff_resume.lua"
EXPIRE = "functions/ff_expire_suspension.lua"
EXPIRE_WAITPOINT = "functions/ff_expire_waitpoint.lua"
CREATE = "functions/ff_create_waitpoint.lua"
CLOSE = "functions/ff_close_waitpoint.lua"
TOKEN = "functions/ff_waitpoint_token.lua"
ROTATE = "functions/ff_rotate_secret.lua"
SEED = "functions/ff_seed_secret.lua"
CLAIMING = "lib/92_claiming.lua"
ENDING = "lib/85_ending.lua"

forged = test_token_forgery.test_thousands_of_forgeries
graces = test_token_secrets.test_every_past_kid_verifies_until_its_own_end
late = [
    test_susp_signal.terminal,
    test_susp_signal.active,
    test_susp_signal.suspended_again,
]


def too_late(index: int, code: str) -> Scenario:
    return lambda engine: test_susp_signal.test_too_late(engine, late[index], code)


MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    # --- tokens ---
    ("digest", VALUES, "return difference == 0", "return true", forged),
    (
        "every character of the digest",
        VALUES,
        "for i = 1, #a do\n    difference",
        "for i = 2, #a do\n    difference",
        forged,
    ),
    (
        "last character of the digest",
        VALUES,
        "for i = 1, #a do\n    difference",
        "for i = 1, #a - 1 do\n    difference",
        forged,
    ),
    (
        "kid expiry",
        TOKENS,
        "if found[1] ~= kid and not tokens.in_grace(found[3], c.now) then",
        "if false then",
        forged,
    ),
    ("end of the grace", TOKENS, "and at >= now", "and at > now", graces),
    ("no grace after the end", TOKENS, "and at >= now", "and at >= now - 1", graces),
    (
        "grace is a number",
        TOKENS,
        "expires and string.match(expires, '^%d+$') and tonumber(expires)",
        "expires and tonumber(expires)",
        stored_token_secrets.test_collection_spares_what_still_verifies_and_the_current_kid,
    ),
    (
        "token is bound to the waitpoint",
        TOKENS,
        "digest(secret, waitpoint_id, key or ''",
        "digest(secret, '', key or ''",
        test_token_secrets.test_every_past_kid_verifies_until_its_own_end,
    ),
    (
        "current kid is never collected",
        TOKENS,
        "if kid and kid ~= fields.current_kid then",
        "if kid then",
        stored_token_secrets.test_invariant_of_the_current_kid,
    ),
    # --- who may signal what ---
    (
        "binding to the execution",
        SIGNAL,
        "if point.execution_id ~= id then return reply.err('invalid_waitpoint_for_execution') end",
        "",
        test_susp_signal.test_a_valid_token_of_another_execution,
    ),
    (
        "binding to the current suspension",
        SIGNAL,
        "or not open or open.suspension_id ~= point.suspension_id then",
        "or not open then",
        stored_susp_signal.test_states_that_cannot_be,
    ),
    (
        "state of the waitpoint",
        SIGNAL,
        "if point.state ~= 'active' or ",
        "if ",
        stored_susp_signal.test_states_that_cannot_be,
    ),
    (
        "nothing is checked before the token",
        SIGNAL,
        "  if vouched then",
        (
            "  if point and point.state == 'closed' then\n"
            "    return reply.err('waitpoint_closed')\n  end\n  if vouched then"
        ),
        stored_susp_signal.test_token_errors_do_not_depend_on_the_waitpoint,
    ),
    (
        "stamp of a failed check",
        SIGNAL,
        "server.call('HSET', K.core(c.tag, id), 'last_hmac_validation_failed_at', c.now)",
        "",
        stored_susp_signal.test_a_failed_check_of_the_token_is_stamped_and_nothing_else,
    ),
    (
        "stamps are rare",
        SIGNAL,
        "if math.abs(c.now - last) >= STAMP_EVERY_MS then",
        "if true then",
        stored_susp_signal.test_failed_checks_are_stamped_at_most_once_per_second,
    ),
    (
        "approvals have keys of their own",
        SIGNAL,
        "(vouched and K.approval_dedup or K.signal_dedup)",
        "K.signal_dedup",
        test_susp_approval.test_a_token_holder_cannot_use_up_the_key_of_an_approval,
    ),
    (
        "approvals have room of their own",
        SIGNAL,
        "vouched and RESERVED_SIGNALS or 0",
        "0",
        test_susp_approval.test_a_token_holder_cannot_use_up_the_room_for_an_approval,
    ),
    (
        "dedup by key",
        SIGNAL,
        "local known = dedup and server.call('GET', dedup)",
        "local known",
        test_susp_races.test_a_callers_own_repeat_is_a_duplicate,
    ),
    (
        "dedup by id",
        SIGNAL,
        "if not known and server.call('EXISTS', K.signal(id, signal.id)) == 1 then",
        "if false then",
        test_susp_signal.test_a_signal_id_is_taken_once_per_execution,
    ),
    (
        "dedup comes before the state",
        SIGNAL,
        "  reply.stop_with(earlier(id, signal, dedup))\n",
        ("  destination(c, id, rec, point)\n  reply.stop_with(earlier(id, signal, dedup))\n"),
        test_susp_races.test_a_callers_own_repeat_is_a_duplicate,
    ),
    (
        "terminal executions take no signals",
        SIGNAL,
        "if S.is_terminal(rec.state) then reply.refuse('target_not_signalable') end",
        "",
        stored_susp_signal.test_a_waitpoint_that_was_left_pending_by_an_ended_execution,
    ),
    (
        "only suspended executions are resumed",
        SIGNAL,
        "if not S.is_suspended(rec.state) then reply.refuse('target_not_signalable') end",
        "",
        too_late(1, "target_not_signalable"),
    ),
    (
        "an expired buffer takes nothing",
        SIGNAL,
        "if tonumber(point.expires_at) < c.now then",
        "if false then",
        test_susp_pending.test_a_signal_after_the_end_before_the_scan,
    ),
    (
        "limit of signals",
        SIGNAL,
        "if most > 0 and server.call('ZCARD', K.signals(c.tag, id)) >= most + count then",
        "if false then",
        test_susp_signal.test_the_policy_limits_signals_over_the_whole_life,
    ),
    (
        "limit of the buffer",
        SIGNAL,
        "  if buffering and ",
        "  if false and ",
        stored_susp_pending.test_a_full_buffer_refuses_instead_of_forgetting,
    ),
    (
        "delay of the policy",
        SIGNAL,
        "delay_ms = tonumber(policy.resume_delay_ms) or signal.resume_delay_ms",
        "delay_ms = signal.resume_delay_ms",
        lambda e: stored_susp_resume.test_the_delay_of_the_policy_comes_first(e, 500, 0, 500),
    ),
    (
        "approvals know their execution",
        SIGNAL,
        "if not point or point.execution_id ~= id then return reply.err('waitpoint_not_found') end",
        "if not point then return reply.err('waitpoint_not_found') end",
        test_susp_approval.test_approvals_refused,
    ),
    # --- conditions ---
    (
        "nodes count for themselves",
        CONDITIONS,
        "name = path .. '\\0' .. satisfier }",
        "name = satisfier }",
        test_susp_conditions.test_two_counts_do_not_count_each_other,
    ),
    (
        "marks count once",
        CONDITIONS,
        "if not progress[mark.name] then",
        "if true then",
        test_susp_effects.test_effects_of_composites,
    ),
    (
        "all members",
        CONDITIONS,
        "return leaves > 0 and unmet == 0",
        "return leaves > unmet",
        test_susp_conditions.test_depth_four_resumes,
    ),
    (
        "sources are pairs",
        CONDITIONS,
        "return #signal.source_type .. ':' .. signal.source_type .. signal.source_identity",
        "return signal.source_type .. '\\1' .. signal.source_identity",
        test_susp_effects.test_sources_are_pairs,
    ),
    (
        "only operators are operators",
        CONDITIONS,
        "return signal.source_type == 'operator' and signal.source_identity or nil",
        "return signal.source_identity",
        test_susp_approval.test_one_token_is_not_two_people,
    ),
    (
        "names are compared",
        CONDITIONS,
        "return matcher.ByName == name or ",
        "return true or ",
        test_susp_effects.test_effects_of_single_conditions,
    ),
    # --- suspend ---
    (
        "key of another lease",
        SUSPEND,
        "if known.lease ~= given.lease_id .. '/' .. given.epoch then",
        "if false then",
        test_susp_repeat.test_a_key_of_another_lease_is_refused,
    ),
    (
        "open suspension",
        SUSPEND,
        "if suspension.open(c, id) then reply.refuse('already_suspended') end",
        "",
        stored_susp_refusals.test_an_open_suspension_is_not_replaced,
    ),
    (
        "pending waitpoint's execution",
        SUSPEND,
        "if found.execution_id ~= id\n      or ",
        "if ",
        stored_susp_pending.test_use_of_a_waitpoint_that_cannot_be_used,
    ),
    (
        "pending waitpoint's attempt",
        SUSPEND,
        "\n      or tonumber(found.attempt_index) ~= record.attempt_index(rec)",
        "",
        test_susp_pending.test_a_waitpoint_of_another_attempt,
    ),
    (
        "pending waitpoint's end",
        SUSPEND,
        "if tonumber(found.expires_at or 0) <= c.now then",
        "if false then",
        stored_susp_pending.test_use_of_a_waitpoint_that_cannot_be_used,
    ),
    (
        "fresh waitpoint over a live one",
        SUSPEND,
        "known[1] == 'pending' or known[1] == 'active' or known[2] ~= id",
        "known[2] ~= id",
        test_susp_refusals.test_a_fresh_waitpoint_of_its_own_pending_one,
    ),
    (
        "another execution's closed waitpoint",
        SUSPEND,
        " or known[2] ~= id) then",
        ") then",
        stored_susp_refusals.test_a_closed_waitpoint_may_be_replaced_by_its_own_execution_only,
    ),
    (
        "a time long past",
        SUSPEND,
        "if want.timeout_at and want.timeout_at + PAST_TOLERANCE_MS < c.now then",
        "if false then",
        test_susp_suspend.test_a_time_is_past_by_the_engines_clock,
    ),
    (
        "waitpoint made twice",
        CREATE,
        (
            "  if known[1] == 'pending' or known[1] == 'active' then\n"
            "    return reply.err('waitpoint_already_exists')\n  end"
        ),
        "",
        stored_susp_pending.test_an_id_in_use_is_refused_and_a_repeated_call_answered,
    ),
    # --- closing ---
    (
        "closed once",
        SUSPENSION,
        "if server.call('HGET', K.waitpoint(c.tag, waitpoint_id), 'state') == 'active' then",
        "if true then",
        stored_susp_pending.test_a_waitpoint_closes_once_with_its_own_reason,
    ),
    (
        "owner of a waitpoint to be closed",
        CLOSE,
        "if not state or found[2] ~= id then",
        "if not state then",
        stored_susp_pending.test_closing_what_cannot_be_closed,
    ),
    (
        "due check of waitpoints",
        EXPIRE_WAITPOINT,
        "if tonumber(found[2]) > c.now then return 'not_yet_due' end",
        "",
        stored_susp_pending.test_expiry_at_its_exact_time,
    ),
    (
        "state check of waitpoints",
        EXPIRE_WAITPOINT,
        "if found[1] ~= 'pending' then",
        "if not found[1] then",
        stored_susp_pending.test_expiry_at_its_exact_time,
    ),
    (
        "due check of suspensions",
        EXPIRE,
        "if not open.timeout_at or tonumber(open.timeout_at) > c.now then return 'not_yet_due' end",
        "",
        test_susp_timeout.test_escalate,
    ),
    (
        "state check of resume",
        RESUME,
        "if not open or not rec.current_waitpoint_id then",
        "if not open then",
        lambda e: stored_susp_resume.test_resume_without_its_records(e, "waitpoint"),
    ),
    # --- reads and keys ---
    (
        "owner of a token that is read",
        TOKEN,
        "or point.execution_id ~= id\n",
        "\n",
        test_susp_reads.test_the_token_of_an_open_waitpoint,
    ),
    (
        "closed waitpoints show no token",
        TOKEN,
        "or not (point.state == 'pending' or point.state == 'active')",
        "",
        test_susp_reads.test_the_token_of_an_open_waitpoint,
    ),
    (
        "lease of the cause",
        SUSPENSION,
        "if tonumber(found[1] or 0) ~= record.epoch(rec) then return false end",
        "",
        test_susp_resume.test_nothing_is_told_after_a_later_pause_of_another_kind,
    ),
    (
        "conflict of the current kid",
        ROTATE,
        (
            "if found[2] and string.lower(found[2]) ~= secret then return reply.err("
            "'rotation_conflict', kid) end"
        ),
        "",
        stored_token_secrets.test_a_rotation,
    ),
    (
        "conflict of a verifying kid",
        ROTATE,
        "if verifying and string.lower(found[2]) ~= secret then",
        "if false then",
        stored_token_secrets.test_a_rotation,
    ),
    (
        "expiry of a kid that returns",
        ROTATE,
        "  server.call('HDEL', store, 'expires_at:' .. kid)\n",
        "",
        stored_token_secrets.test_returning_to_a_kid_makes_it_current_for_good,
    ),
    (
        "stored secret wins",
        SEED,
        "  return { 'mismatch', current }",
        (
            "  server.call('HSET', store, 'secret:' .. current, secret)\n"
            "  return { 'mismatch', current }"
        ),
        test_token_secrets.test_a_configured_secret_never_replaces_the_stored_one,
    ),
    (
        "repair needs proof",
        SEED,
        "if not repair or current ~= kid or secret == '' then",
        "if secret == '' then",
        stored_token_secrets.test_all_torn_is_no_proof,
    ),
    (
        "unused waitpoints end with their execution",
        SUSPENSION,
        "if not rec.waitpointed then return end",
        "if true then return end",
        lambda e: stored_susp_pending.test_unused_waitpoints_close_with_their_execution(
            e, "complete", "never_committed"
        ),
    ),
    (
        "abandoned suspensions close",
        ENDING,
        "if open then suspension.close(c, id, open, { reason = how.close_reason }) end",
        "",
        test_susp_endings.test_cancel_closes_everything,
    ),
    (
        "claims note the lease",
        CLAIMING,
        "if suspended then\n",
        "if false then\n",
        test_susp_resume.test_the_same_attempt_goes_on_with_the_next_epoch,
    ),
]


@pytest.mark.parametrize(
    ("path", "guard", "replacement", "scenario"),
    [row[1:] for row in MUTANTS],
    ids=[row[0] for row in MUTANTS],
)
async def test_a_removed_guard_is_noticed(
    private_engine: Engine, path: str, guard: str, replacement: str, scenario: Scenario
) -> None:
    failure = await failure_of(private_engine, path, guard, replacement, scenario)
    # A mutant that merely crashes shows nothing about the guard.
    assert not crashed(failure), failure
