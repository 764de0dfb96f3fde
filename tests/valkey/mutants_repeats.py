"""More guards: repeats of lost replies, unreadable records, the registry."""

from __future__ import annotations

from flowfabric.core.ids import new_uuid
from flowfabric.engine.valkey.calls import text
from tests.conformance import (
    test_exec_fail,
    test_exec_purge,
    test_lease_cap,
    test_lease_grants,
    test_lease_reclaim,
    test_registry,
)
from tests.support.engine import Engine
from tests.valkey import test_exec_fail as stored_exec_fail
from tests.valkey import test_groups, test_operator_repeats, test_unreadable_records
from tests.valkey import test_lease_cap as stored_lease_cap
from tests.valkey.mutants import (
    CLAIMING,
    FENCE,
    GRANTING,
    LEASE,
    NOT_RECLAIMABLE,
    RECLAIM,
    RECLAIM_GRANT,
    REGISTER,
    REVOKE,
    Scenario,
)

RECORD = "lib/50_record.lua"
REPLY = "lib/55_reply.lua"
OPERATOR = "lib/82_operator.lua"
ENDING = "lib/85_ending.lua"
REPLAYING = "lib/95_replaying.lua"


async def repeats_a_revocation(engine: Engine) -> None:
    handle = await engine.running()
    execution_id, request = handle.execution_id, new_uuid()
    args = (execution_id, "", "x", "me", request)
    first = await engine.backend.calls.fcall("ff_revoke", execution_id.tag, args, op="revoke")
    await engine.claim()
    again = await engine.backend.calls.fcall("ff_revoke", execution_id.tag, args, op="revoke")
    assert [text(part) for part in again] == [text(part) for part in first]
    assert (await engine.vector(execution_id)).ownership_state == "leased"


async def repeats_an_override(engine: Engine) -> None:
    execution_id = (await engine.running()).execution_id
    args = (execution_id, "///", f"operator_override {new_uuid()}", 1)
    for _ in range(2):
        reply = await engine.backend.calls.fcall("ff_delay", execution_id.tag, args, op="delay")
        assert text(reply[2]) == "waiting"
        # Taken again after the first call; after the repeat there is nothing to take.
        await engine.claim_all()
    assert (await engine.backend.reads.read_attempts(execution_id))[0].lease_epoch == 2


async def ended_between_attempts(engine: Engine) -> None:
    await test_exec_fail.test_an_execution_that_ends_between_attempts_has_no_current_one(
        engine, test_exec_fail.ended_by_cancel, replayed=False
    )


GROUP_JOIN = "functions/ff_group_join.lua"
GROUP_LEASE = "functions/ff_group_lease.lua"

MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    (
        "own attempt without its index",
        FENCE,
        "if reached and reached <= epoch then",
        "if true then",
        stored_exec_fail.test_a_repeat_without_the_index_after_pauses,
    ),
    (
        "answer of a lost revocation",
        REVOKE,
        "if before then return",
        "if false then return",
        repeats_a_revocation,
    ),
    (
        "answer of a lost override",
        OPERATOR,
        "return at and string.match",
        "return nil and string.match",
        repeats_an_override,
    ),
    (
        "requests are told apart",
        OPERATOR,
        "string.find(rec.operator_requests, request .. ' ', 1, true)",
        "1, 37",
        test_operator_repeats.test_only_the_last_requests_are_remembered,
    ),
    (
        "cap of a reclaim told again",
        RECLAIM,
        "claiming.reclaim_problem(c, rec, worker, own_cap)",
        f"(not S.is_lease_lost(rec.state) and {NOT_RECLAIMABLE})",
        lambda e: stored_lease_cap.test_a_cap_told_again(e, 1),
    ),
    (
        "cap of a reclaim grant told again",
        RECLAIM_GRANT,
        "claiming.reclaim_problem(c, rec, args[3])",
        f"(not S.is_lease_lost(rec.state) and {NOT_RECLAIMABLE})",
        lambda e: stored_lease_cap.test_a_cap_told_again(e, 1),
    ),
    (
        "the cap that was enforced",
        CLAIMING,
        "math.min(claiming.reclaim_cap(rec, fallback), tonumber(rec.lease_reclaim_count or 0))",
        "claiming.reclaim_cap(rec, fallback)",
        lambda e: stored_lease_cap.test_a_cap_told_again(e, 1),
    ),
    (
        "only the cap is told again",
        CLAIMING,
        "if S.is_terminal(rec.state) and rec.ended_by == 'reclaim_cap' then",
        "if S.is_terminal(rec.state) then",
        test_lease_cap.test_only_the_cap_is_told_again,
    ),
    (
        "category of an earlier failure",
        CLAIMING,
        "  record.clear(c, id, rec, 'failure_category')\n",
        "",
        lambda e: test_lease_cap.test_the_cap_has_no_category_of_an_earlier_failure(e, "grant"),
    ),
    (
        "no current attempt between two",
        ENDING,
        "if rec.attempt and S.between_attempts(rec.state) then",
        "if false then",
        ended_between_attempts,
    ),
    (
        "no current attempt in the refusal",
        REPLY,
        "rec.between_attempts or ",
        "",
        ended_between_attempts,
    ),
    (
        "a new run forgets that",
        REPLAYING,
        "    'between_attempts', 'cascaded'",
        "    'cascaded'",
        ended_between_attempts,
    ),
    (
        "the worker's own list",
        GRANTING,
        "if args[10] ~= '' then",
        "if false then",
        lambda e: test_lease_grants.test_the_workers_own_list_is_looked_at_last(
            e, ["a,b"], "comma_in_token"
        ),
    ),
    (
        "policy before the caller's cap",
        CLAIMING,
        "rec.max_reclaim_count or fallback",
        "fallback or rec.max_reclaim_count",
        lambda e: test_lease_reclaim.test_cap_zero_means_never(e, "reclaim"),
    ),
    (
        "reclaims are counted",
        LEASE,
        "tonumber(rec.lease_reclaim_count or 0) + 1",
        "tonumber(rec.lease_reclaim_count or 0)",
        test_lease_reclaim.test_each_reclaim_counts_once_and_takes_its_own_index,
    ),
    # --- unreadable records ---
    (
        "state that is read",
        RECORD,
        "  if not S.is_code(rec.state) then record.check(id, rec) end\n",
        "",
        lambda e: test_unreadable_records.test_an_unknown_state(e, "renew", "qqqqqq"),
    ),
    (
        "fields of a transition",
        RECORD,
        "  if rec then record.check(id, rec) end\n",
        "",
        lambda e: test_unreadable_records.test_nothing_is_half_done(e, "revoke", "priority"),
    ),
    (
        "shape of a lease",
        RECORD,
        "if value and not (#value > 37 and string.find(value, '^[%x-]+/%d+$')) then",
        "if false then",
        lambda e: test_unreadable_records.test_nothing_is_half_done(e, "cancel", "lease"),
    ),
    (
        "lease of an active execution",
        RECORD,
        "  if rec then record.check_lease(id, rec) end\n",
        "",
        lambda e: test_unreadable_records.test_an_unreadable_lease(e, "lease", "progress"),
    ),
    (
        "time limit of a new execution",
        CLAIMING,
        "if rec and (rec.state ~= S.NEW or rec.attempt_timeout_ms) then",
        "if false then",
        test_unreadable_records.test_a_claim_passes_by_what_it_cannot_read,
    ),
    (
        "instance of another worker",
        REGISTER,
        "if known[1] and known[1] ~= worker_id then",
        "if false then",
        test_registry.test_an_instance_belongs_to_one_worker,
    ),
    (
        "one reader per feed",
        GROUP_LEASE,
        "not holder or holder == member or tonumber(stored[3]) <= now",
        "true",
        test_groups.test_a_feed_has_one_reader_until_its_lease_ends,
    ),
    (
        "end of a reader's lease",
        GROUP_LEASE,
        " or tonumber(stored[3]) <= now",
        "",
        test_groups.test_a_feed_has_one_reader_until_its_lease_ends,
    ),
    (
        "position of a group",
        GROUP_LEASE,
        "ms > old_ms or (ms == old_ms and seq > old_seq)",
        "true",
        test_groups.test_a_position_never_moves_back,
    ),
    (
        "start of a group",
        GROUP_JOIN,
        "args[4], 'NX')",
        "args[4])",
        test_groups.test_members_that_stay_away_leave_the_group,
    ),
    (
        "absent members",
        GROUP_JOIN,
        "server.call('ZREMRANGEBYSCORE', members, '-inf', now)",
        "",
        test_groups.test_members_that_stay_away_leave_the_group,
    ),
    (
        "purge of what runs",
        "functions/ff_purge_execution.lua",
        "if rec and not S.is_terminal(rec.state) then",
        "if false then",
        lambda e: test_exec_purge.test_an_unfinished_execution_is_refused(e, "active"),
    ),
]
