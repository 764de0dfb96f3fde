"""The guards of quota policies, as in `mutants.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.conformance import test_quota_admission as admission
from tests.conformance import test_quota_policies as policies
from tests.scanners import test_quota_reconciler as reconciler
from tests.sdk import test_admission_order as order
from tests.support.engine import Engine
from tests.valkey import test_quota_storage as storage
from tests.valkey.mutants import Scenario

QUOTA = "lib/72_quota.lua"
CREATE = "functions/ff_quota_create.lua"
UPDATE = "functions/ff_quota_update.lua"
CONFIRM = "functions/ff_quota_confirm.lua"
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
        "if not entry.guard and q.rate > 0 and q.count >= q.rate then",
        "if false then",
        frozen(admission.test_the_window_slides),
    ),
    (
        "a full window counts the executions in it",
        QUOTA,
        "q.count >= q.rate",
        "q.count - (entry.counted and 1 or 0) >= q.rate",
        frozen(admission.test_a_retry_waits_for_a_place_as_others_do),
    ),
    (
        "an execution in the window counts once",
        QUOTA,
        "if not entry.counted then q.count = q.count + 1 end",
        "q.count = q.count + 1",
        counts_a_retry_once_in_a_batch,
    ),
    (
        "the edge of the window",
        QUOTA,
        "local counted = times[i] and tonumber(times[i]) > q.edge",
        "local counted = times[i] and true",
        storage.test_what_expired_does_not_count_although_it_is_still_stored,
    ),
    (
        "a full cap",
        QUOTA,
        "if q.cap > 0 and q.held - (entry.slot and 1 or 0) >= q.cap then",
        "if false then",
        frozen(admission.test_a_cap_and_a_release),
    ),
    (
        "its own slot does not fill the cap",
        QUOTA,
        "q.held - (entry.slot and 1 or 0) >= q.cap",
        "q.held >= q.cap",
        frozen(admission.test_only_other_executions_fill_the_cap),
    ),
    (
        "the guard of an admission without a cap",
        QUOTA,
        "if entry.guard and (entry.slot or q.cap == 0) then",
        "if entry.guard and entry.slot then",
        frozen(admission.test_an_execution_counts_once_in_a_window),
    ),
    (
        "a guard without its slot",
        QUOTA,
        "if entry.guard and (entry.slot or q.cap == 0) then",
        "if entry.guard then",
        frozen(admission.test_a_slot_that_ended_is_taken_again_without_a_second_entry),
    ),
    (
        "confirmed slots keep their end",
        QUOTA,
        "if entry.slot and entry.slot < quota.CLAIMED then",
        "if entry.slot then",
        frozen(admission.test_admitting_again_extends_an_unconfirmed_slot),
    ),
    (
        "unconfirmed slots are extended",
        QUOTA,
        "entry.new_slot, entry.slot = ends, ends end",
        "end",
        frozen(admission.test_admitting_again_extends_an_unconfirmed_slot),
    ),
    (
        "an admission that two calls rely on",
        QUOTA,
        "if entry.guard ~= SHARED then entry.guard, entry.new_guard = SHARED, SHARED end",
        "",
        frozen(admission.test_a_rollback_undoes_only_what_its_call_recorded),
    ),
    (
        "a rollback of its own request",
        QUOTA,
        "if guards[i] == request then own",
        "if true then own",
        frozen(admission.test_a_rollback_undoes_only_what_its_call_recorded),
    ),
    (
        "a rollback frees the place in the window",
        QUOTA,
        "local freed = server.call('ZREM', q.window, unpack(ids))",
        "local freed = 0",
        frozen(admission.test_a_rollback_frees_both),
    ),
    (
        "a rollback leaves the slot of a run",
        QUOTA,
        "local free = unclaimed(q, ids)",
        "local free = ids",
        order.test_a_late_caller_does_not_take_the_slot_of_a_run,
    ),
    (
        "an admission leaves the slot of a run",
        QUOTA,
        "not (entry.slot and entry.slot >= quota.CLAIMED)",
        "true",
        order.test_a_late_caller_does_not_take_the_slot_of_a_run,
    ),
    (
        "a release deletes the guard",
        QUOTA,
        "  server.call('HDEL', q.guards, unpack(ids))\n  return",
        "  return",
        frozen(admission.test_a_retry_waits_for_a_place_as_others_do),
    ),
    (
        "slots that ended",
        QUOTA,
        "slot = slot and slot > q.now and slot or nil",
        "slot = slot",
        storage.test_a_slot_that_ended_is_no_own_slot_although_it_is_still_stored,
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
        "q.window_ms = seconds > 0 and seconds * 1000 or DEFAULT_WINDOW_MS",
        "q.window_ms = seconds * 1000",
        frozen(admission.test_a_window_of_0_is_a_minute),
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
        CONFIRM,
        "if q.cap > 0 then",
        "if true then",
        frozen(admission.test_a_policy_without_a_cap_keeps_no_slots),
    ),
    (
        "slots that changed since they were read",
        RECONCILE,
        "if tonumber(server.call('ZSCORE', q.slots, member)) == tonumber(args[i + 1]) then",
        "if true then",
        reconciler.test_only_slots_that_are_as_they_were_read_change,
    ),
]
