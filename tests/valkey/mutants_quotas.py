"""The guards of quota policies, as in `mutants.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.conformance import test_quota_admission as admission
from tests.conformance import test_quota_policies as policies
from tests.scanners import test_quota_reconciler as reconciler
from tests.sdk import test_admission_order as order
from tests.support.engine import Engine
from tests.valkey import test_quota_storage as storage
from tests.valkey import test_slot_runs as runs
from tests.valkey.mutants import Scenario

QUOTA = "lib/72_quota.lua"
CREATE = "functions/ff_quota_create.lua"
UPDATE = "functions/ff_quota_update.lua"
RECONCILE = "functions/ff_quota_reconcile.lua"


def frozen(test: Callable[[Engine, int], Awaitable[None]]) -> Scenario:
    """A test whose clock stands still."""

    async def run(engine: Engine) -> None:
        now = await engine.now()
        await engine.freeze(now)
        await test(engine, now)

    return run


async def counts_a_retry_once_in_a_batch(engine: Engine) -> None:
    await engine.freeze(await engine.now())
    quotas, again = engine.backend.quotas, engine.new_id()
    name = await admission.policy(engine, max_requests_per_window=2)
    await quotas.admit_many(name, [again])
    await quotas.release_many(name, [again])
    answers = await quotas.admit_many(name, [again, engine.new_id()])
    assert [admission.word(each) for each in answers] == ["admitted", "admitted"]


MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    (
        "a full window",
        QUOTA,
        "if not counted and q.rate > 0 and q.count >= q.rate then",
        "if false then",
        frozen(admission.test_the_window_slides),
    ),
    (
        "a full window counts the executions in it",
        QUOTA,
        "if not counted and q.rate > 0 and q.count >= q.rate",
        "if not counted and q.rate > 0 and q.count - (before and 1 or 0) >= q.rate",
        frozen(admission.test_a_retry_waits_for_a_place_as_others_do),
    ),
    (
        "an execution in the window counts once",
        QUOTA,
        "if not before then q.count = q.count + 1 end",
        "q.count = q.count + 1",
        counts_a_retry_once_in_a_batch,
    ),
    (
        "the edge of the window",
        QUOTA,
        "local counted = time > q.edge",
        "local counted = time > 0",
        storage.test_what_expired_does_not_count_although_it_is_still_stored,
    ),
    (
        "a full cap",
        QUOTA,
        "if not admitted and q.cap > 0 and q.held - (slot and 1 or 0) >= q.cap then",
        "if false then",
        frozen(admission.test_a_cap_and_a_release),
    ),
    (
        "its own slot does not fill the cap",
        QUOTA,
        "q.held - (slot and 1 or 0) >= q.cap",
        "q.held >= q.cap",
        frozen(admission.test_only_other_executions_fill_the_cap),
    ),
    (
        "the guard of an admission without a cap",
        QUOTA,
        "guard and (slot or q.cap == 0)",
        "guard and slot",
        frozen(admission.test_an_execution_counts_once_in_a_window),
    ),
    (
        "a guard without its slot",
        QUOTA,
        "guard and (slot or q.cap == 0)",
        "guard",
        frozen(admission.test_a_slot_that_ended_is_taken_again_without_a_second_entry),
    ),
    (
        "unconfirmed slots are extended",
        QUOTA,
        "    entry.slot, entry.new_slot = ends, ends\n",
        "    if not slot then entry.slot, entry.new_slot = ends, ends end\n",
        frozen(admission.test_admitting_again_extends_an_unconfirmed_slot),
    ),
    (
        "an admission that two calls rely on",
        QUOTA,
        "    guard.request, entry.new_guard = SHARED, true\n",
        "",
        frozen(admission.test_a_rollback_undoes_only_what_its_call_recorded),
    ),
    (
        "a rollback of its own request",
        QUOTA,
        "if guard and guard.request == request then",
        "if guard then",
        frozen(admission.test_a_rollback_undoes_only_what_its_call_recorded),
    ),
    (
        "a rollback frees the place in the window",
        QUOTA,
        "  values.call('ZREM', q.window, left)\n",
        "",
        frozen(admission.test_a_rollback_frees_both),
    ),
    (
        "a rollback removes its guard",
        QUOTA,
        "  values.call('HDEL', q.guards, own)\n",
        "",
        runs.test_a_rollback_keeps_a_start_that_happened,
    ),
    (
        "a rollback leaves a start that happened",
        QUOTA,
        "if guard.before and guard.before > q.edge then",
        "if false then",
        runs.test_a_rollback_keeps_a_start_that_happened,
    ),
    (
        "a rollback restores no start that left the window",
        QUOTA,
        "if guard.before and guard.before > q.edge then",
        "if guard.before then",
        runs.test_a_rollback_restores_no_start_that_left_the_window,
    ),
    (
        "a rollback leaves the slot of a run",
        QUOTA,
        "if ends[i] and tonumber(ends[i]) < quota.CLAIMED + guard.run then",
        "if ends[i] then",
        order.test_a_rollback_leaves_the_slot_of_a_run,
    ),
    (
        "an admission leaves the slot of a run",
        QUOTA,
        "if slot and slot >= quota.CLAIMED + run then return 'already' end",
        "",
        order.test_a_late_caller_does_not_take_the_slot_of_a_run,
    ),
    (
        "an admission takes over the slot of the run before",
        QUOTA,
        "if slot and slot >= quota.CLAIMED + run then",
        "if slot and slot >= quota.CLAIMED then",
        runs.test_a_return_between_admission_and_claim,
    ),
    (
        "the guard of an earlier run",
        QUOTA,
        "if guard and guard.run < run then guard = nil end",
        "",
        runs.test_the_next_run_counts_whether_or_not_the_last_was_given_back,
    ),
    (
        "a release deletes the guard",
        QUOTA,
        "  values.call('HDEL', q.guards, over)\n",
        "",
        frozen(admission.test_a_retry_waits_for_a_place_as_others_do),
    ),
    (
        "a release leaves the guard of a later run",
        QUOTA,
        "if guard and guard.run <= runs[i] then over",
        "if guard then over",
        runs.test_a_late_return_leaves_the_next_admission_to_its_rollback,
    ),
    (
        "a release leaves the slot of a later run",
        QUOTA,
        "if slot and run <= runs[i] then free",
        "if slot then free",
        runs.test_a_deliverer_that_dies_before_it_removes_the_entry,
    ),
    (
        "a late confirm leaves the admission of a later run",
        QUOTA,
        "local over = guards[i] and guards[i].run > runs[i]",
        "local over = false",
        runs.test_a_late_confirm_leaves_the_admission_of_the_next_run,
    ),
    (
        "a guard outlasts its window entry while there is a slot",
        QUOTA,
        "remove(q, q.window, past, q.slots)",
        "remove(q, q.window, past, q.window)",
        runs.test_a_late_confirm_leaves_the_admission_of_the_next_run,
    ),
    (
        "a guard ends with its slot",
        QUOTA,
        "remove(q, q.slots, free, q.window)",
        "values.call('ZREM', q.slots, free)",
        runs.test_a_guard_without_a_window_entry_ends_with_its_slot,
    ),
    (
        "slots that ended",
        QUOTA,
        "local held = slot > q.now",
        "local held = slot > 0",
        storage.test_a_slot_that_ended_is_no_own_slot_although_it_is_still_stored,
    ),
    (
        "an admission whose slot lasts longer than its place in the window",
        QUOTA,
        "guard = (counted or held) and guards[i]",
        "guard = counted and guards[i]",
        frozen(admission.test_an_admission_lasts_as_long_as_its_slot),
    ),
    (
        "an admission that left the window counts again",
        QUOTA,
        "local counted, admitted = guard and before,",
        "local counted, admitted = guard,",
        frozen(admission.test_an_admission_lasts_as_long_as_its_slot),
    ),
    (
        "the later end of a slot",
        QUOTA,
        "ends = math.max(slot, ends)",
        "ends = ends",
        frozen(admission.test_admitting_again_never_shortens_a_slot),
    ),
    (
        "a slot that no claim has confirmed is the first to end",
        QUOTA,
        "return ends and ends < quota.CLAIMED and ends or nil",
        "return ends",
        frozen(admission.test_a_confirmed_slot_does_not),
    ),
    (
        "the window of 0",
        QUOTA,
        "seconds > 0 and math.min(seconds * 1000, clock.END) or DEFAULT_WINDOW_MS",
        "math.min(seconds * 1000, clock.END)",
        frozen(admission.test_a_window_of_0_is_a_minute),
    ),
    (
        "a window that began before 1970",
        QUOTA,
        "q.edge = math.max(0, q.now - q.window_ms)",
        "q.edge = q.now - q.window_ms",
        policies.test_the_longest_window,
    ),
    (
        "limits that cannot be read",
        QUOTA,
        "if not string.find(text, '^%d+$') or tonumber(text) > clock.END then",
        "if not tonumber(text) then",
        lambda e: storage.test_an_unparsable_limit_is_corruption(e, "jitter_ms", "-1"),
    ),
    (
        "openings are told only to those who wait",
        QUOTA,
        "if server.call('EXISTS', K.quota_blocked(q.tag, q.id)) == 0 then return 0, 0 end",
        "",
        frozen(admission.test_an_opening_is_told_if_executions_wait),
    ),
    (
        "an existing policy",
        CREATE,
        "if not q then",
        "if true then",
        policies.test_an_existing_policy_keeps_its_limits,
    ),
    (
        "an update without a change",
        UPDATE,
        "if tonumber(q.stored[args[i]] or 0) ~= tonumber(args[i + 1]) then",
        "if true then",
        policies.test_administration_is_told_to_operators,
    ),
    (
        "slots of a policy without a cap",
        QUOTA,
        "if q.cap == 0 then return end",
        "",
        frozen(admission.test_a_policy_without_a_cap_keeps_no_slots),
    ),
    (
        "slots that changed since they were read",
        RECONCILE,
        "if tonumber(server.call('ZSCORE', q.slots, member)) == tonumber(args[i + 1]) then",
        "if true then",
        reconciler.test_only_slots_that_are_as_they_were_read_change,
    ),
    (
        "a new priority changes no place",
        "functions/ff_change_priority.lua",
        "if rec.quota_policy_id and S.is_blocked_by_quota(rec.state) then",
        "if false then",
        order.test_a_new_priority_counts_for_what_waits_for_a_quota,
    ),
]
