"""The guards of admission, each with a change that removes it and a test that must notice."""

from __future__ import annotations

from tests.conformance import test_blocking, test_flow_blocking
from tests.sdk import test_admission, test_grant_admission
from tests.valkey import test_admission_crashes as crashes
from tests.valkey import test_admission_notes as notes
from tests.valkey import test_blocking as stored
from tests.valkey import test_exec_doorbell as doorbell
from tests.valkey import test_slot_runs as runs
from tests.valkey.mutants import Scenario

ADMISSION = "lib/93_admission.lua"
CLAIMING = "lib/92_claiming.lua"
LEASE = "lib/70_lease.lua"
ENDING = "lib/85_ending.lua"

# Name, file, the guard as written, what stands there instead, the scenario that must notice.
MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    (
        "blocks what has ended",
        ADMISSION,
        "if S.is_terminal(rec.state) then return reply.not_active(rec) end",
        "",
        test_blocking.test_the_checks_in_order,
    ),
    (
        "blocks what runs",
        ADMISSION,
        "if not S.is_runnable(rec.state) then return reply.err('execution_not_eligible') end",
        "",
        test_blocking.test_the_checks_in_order,
    ),
    (
        "blocks what is delayed",
        ADMISSION,
        "if not S.is_eligible(rec.state) or granting",
        "if granting",
        lambda e: test_blocking.test_only_claimable_work_can_be_blocked(
            e, "delayed", "execution_not_eligible"
        ),
    ),
    (
        "blocks what is granted",
        ADMISSION,
        " or granting.live(c, rec) then",
        " then",
        test_blocking.test_a_live_grant_protects_from_a_block,
    ),
    (
        "unblocks what is not blocked",
        ADMISSION,
        "if not S.is_blocked(rec.state)\n      or ",
        "if ",
        test_blocking.test_unblock_checks_in_order,
    ),
    (
        "lifts a newer block",
        ADMISSION,
        "(expected ~= '' and reason ~= string.sub(CAUSES[expected] or '', 2))",
        "false",
        test_blocking.test_unblock_checks_in_order,
    ),
    (
        "lets members go that the flow holds",
        ADMISSION,
        "\n      or (reason == OPERATOR and rec.flow_id and flow.holds(c, id, rec))",
        "",
        test_flow_blocking.test_only_the_flow_lets_held_members_go,
    ),
    (
        "unblocks members of cancelled flows",
        ADMISSION,
        "local f = flow.ending_member(c, rec, flow.resumes(c, rec))\n",
        "local f\n",
        stored.test_a_blocked_member_ends_with_its_flow,
    ),
    (
        "rings for what it lets go",
        ADMISSION,
        "  waiting.enter(c, id, rec)\n  waiting.ring(c, rec)\n",
        "  waiting.enter(c, id, rec)\n",
        doorbell.test_unblocking,
    ),
    (
        "claims what needs admission",
        ADMISSION,
        "if want.admitted or not admission.is_needed(rec) then return false end",
        "if true then return false end",
        test_admission.test_no_claim_hands_out_what_needs_admission,
    ),
    (
        "a candidate takes the place of a claim",
        ADMISSION,
        "want.noted[id], want.max = true, want.max - 1",
        "want.noted[id] = true",
        test_admission.test_a_claim_takes_no_more_than_it_may,
    ),
    (
        "names a candidate once",
        ADMISSION,
        "if not want.noted[id] then",
        "if true then",
        test_admission.test_candidates_are_named_once,
    ),
    (
        "hands members over",
        CLAIMING,
        " or admission.is_needed(rec)",
        "",
        test_admission.test_a_member_that_needs_admission_is_not_handed_over,
    ),
    (
        "grants what needs admission",
        "functions/ff_issue_claim_grant.lua",
        "tonumber(args[12]) ~= admission.run(rec) + 1 then",
        "false then",
        test_grant_admission.test_only_admission_grants_limited_work,
    ),
    (
        "gives slots back",
        LEASE,
        "if rec.quota_policy_id or rec.held_budgets then admission",
        "if false then admission",
        lambda e: test_admission.test_a_slot_follows_the_run(e, "complete"),
    ),
    (
        "a reclaim keeps the slot",
        ADMISSION,
        "if rec.quota_policy_id and not stays then",
        "if rec.quota_policy_id then",
        runs.test_a_reclaim_gives_no_slot_back,
    ),
    (
        "what was held is given back once",
        ADMISSION,
        "    record.clear(c, id, rec, 'held_budgets')\n",
        "",
        crashes.test_what_was_held_is_given_back_once,
    ),
    (
        "replays count as runs",
        ADMISSION,
        " + tonumber(rec.replay_count or 0) end",
        " end",
        runs.test_a_grant_that_was_cancelled_and_replayed,
    ),
    (
        "an admission serves only its run",
        CLAIMING,
        "rec.lane_id == want.lane and admission.run(rec) + 1 == run then",
        "rec.lane_id == want.lane then",
        runs.test_an_admission_serves_only_its_own_run,
    ),
    (
        "a renewal tells the slot",
        "functions/ff_renew.lua",
        "if not rec.quota_policy_id then return expires end",
        "if true then return expires end",
        runs.test_a_renewal_confirms_the_slot,
    ),
    (
        "who ends while it waits is forgotten",
        ENDING,
        "    admission.forget_waiting(c, id, rec)\n",
        "",
        lambda e: notes.test_who_ends_while_it_waits_is_forgotten(e, "cancel"),
    ),
    (
        "a cancelled grantee frees its slot",
        ENDING,
        "if rec.grant_expires_at and rec.quota_policy_id then",
        "if false then",
        test_grant_admission.test_cancelling_what_is_granted_frees_its_slot_at_once,
    ),
    (
        "only its own reason is lifted",
        "functions/ff_unblock.lua",
        "admission.unblock(c, id, rec, expected)",
        "admission.unblock(c, id, rec, '')",
        test_blocking.test_unblock_checks_in_order,
    ),
]
