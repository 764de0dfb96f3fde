"""The guards of budgets, as in `mutants.py`."""

from __future__ import annotations

from tests.conformance import test_budget_admin as admin
from tests.conformance import test_budget_holds as holds
from tests.conformance import test_budget_usage as usage
from tests.scanners import test_budget_scanners as scanners
from tests.valkey.mutants import Scenario

BUDGETS = "lib/76_budgets.lua"
HOLDS = "lib/77_holds.lua"
SPEND = "functions/ff_budget_spend.lua"
RESERVE = "functions/ff_budget_reserve.lua"
SETTLE = "functions/ff_budget_settle.lua"
RELEASE = "functions/ff_budget_release.lua"
RESET_DUE = "functions/ff_budget_reset_due.lua"
RECONCILE = "functions/ff_budget_reconcile.lua"

MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    (
        "hard limits",
        BUDGETS,
        "if sum > hard then above",
        "if false then above",
        usage.test_parallel_reports_never_overshoot,
    ),
    (
        "reaching a limit is no breach",
        BUDGETS,
        "if sum > hard then above",
        "if sum >= hard then above",
        usage.test_reaching_a_limit_is_no_breach,
    ),
    (
        "an exhausted budget admits nothing",
        BUDGETS,
        "(usage[name] or 0) >= limit and",
        "(usage[name] or 0) > limit and",
        usage.test_exhausted_compares_usage_with_hard_limits,
    ),
    (
        "a dimension without a hard limit closes nothing",
        BUDGETS,
        "limit > NO_LIMIT and string.match",
        "string.match",
        usage.test_exhausted_compares_usage_with_hard_limits,
    ),
    (
        "budgets that warn",
        BUDGETS,
        "return name and (b.strict or",
        "return name and (true or",
        usage.test_a_budget_that_warns_never_refuses,
    ),
    (
        "numbers stay exact",
        BUDGETS,
        "elseif sum > clock.END then",
        "elseif false then",
        usage.test_numbers_stay_exact,
    ),
    (
        "the most dimensions",
        BUDGETS,
        "if adds and count > MAX_DIMENSIONS then",
        "if false then",
        usage.test_the_most_dimensions,
    ),
    (
        "what is held is settled although the dimensions are full",
        BUDGETS,
        "if adds and count > MAX_DIMENSIONS then",
        "if count > MAX_DIMENSIONS then",
        holds.test_what_is_held_counts_among_the_most_dimensions,
    ),
    (
        "held dimensions count among the most",
        BUDGETS,
        "if not usage[name] then count = count + 1 end",
        "",
        holds.test_what_is_held_counts_among_the_most_dimensions,
    ),
    (
        "a dimension that is used and held counts once",
        BUDGETS,
        "if not usage[name] then count = count + 1 end",
        "count = count + 1",
        holds.test_a_dimension_that_is_used_and_held_counts_once,
    ),
    (
        "a key counts once",
        SPEND,
        "if before then return before, true end",
        "",
        usage.test_a_key_counts_once,
    ),
    (
        "marks of a deleted budget",
        BUDGETS,
        "return mark.incarnation == incarnation and",
        "return",
        admin.test_a_deleted_budget_leaves_nothing,
    ),
    (
        "one breach event per minute",
        BUDGETS,
        "if b.now - budgets.number(b, 'breach_event_at') < BREACH_EVENT_MS then return end",
        "",
        admin.test_events_of_operators,
    ),
    (
        "a ledger belongs to a period",
        RELEASE,
        "if ledger._period == budgets.period(b) then",
        "if ledger._period then",
        usage.test_a_reset_ends_the_ledgers,
    ),
    (
        "a ledger of a new period starts empty",
        SPEND,
        "server.call('DEL', ledger)",
        "",
        usage.test_a_reset_ends_the_ledgers,
    ),
    (
        "holds count",
        RESERVE,
        "budgets.first_above(spend, limits, usage, reserved)",
        "budgets.first_above(spend, limits, usage)",
        holds.test_holds_count_against_hard_limits,
    ),
    (
        "a repeated reservation",
        RESERVE,
        "if before then return before.answer end",
        "",
        holds.test_a_repeat_gets_the_first_answer,
    ),
    (
        "the owner of a reservation",
        RESERVE,
        "if before and before.execution_id ~= execution_id then",
        "if false then",
        holds.test_an_id_belongs_to_one_execution,
    ),
    (
        "the lease of a reservation",
        "functions/ff_hold_budget.lua",
        "reply.stop_with(fence.check(c, id, rec, args[2], false, true))",
        "",
        lambda e: holds.test_only_the_holder_of_the_lease_reserves(e, "another"),
    ),
    (
        "the room of other holds",
        SETTLE,
        "budgets.first_above(excess, limits, taken, reserved)",
        "budgets.first_above(excess, limits, taken)",
        holds.test_an_excess_never_takes_the_room_of_another_hold,
    ),
    (
        "unknown cost",
        SETTLE,
        "if not actual.deltas[name] then divide(name, held) end",
        "",
        holds.test_unknown_cost_counts_as_held,
    ),
    (
        "holds of later leases",
        HOLDS,
        "if hold and hold.epoch <= epoch then",
        "if hold then",
        holds.test_returning_the_holds_of_ended_leases,
    ),
    (
        "an extension never shortens",
        "functions/ff_budget_extend_holds.lua",
        "math.max(hold.expires_at, budgets.hold_end(hold, tonumber(args[4])))",
        "budgets.hold_end(hold, tonumber(args[4]) - 100000)",
        holds.test_holds_last_as_long_as_a_renewed_lease,
    ),
    (
        "a time to live of its own",
        HOLDS,
        "return math.min(clock.after(lease_expires_at, GRACE_MS), hold.latest)",
        "return clock.after(lease_expires_at, GRACE_MS)",
        holds.test_overdue_holds_are_given_back,
    ),
    (
        "one reset per due time",
        RESET_DUE,
        "if due > b.now then return 'not_due' end",
        "",
        scanners.test_parallel_scanners_reset_once,
    ),
    (
        "the schedule does not drift",
        RESET_DUE,
        "clock.after(due, (math.floor((b.now - due) / interval) + 1) * interval)",
        "clock.after(b.now, interval)",
        scanners.test_due_budgets_are_reset_without_drift,
    ),
    (
        "marks of budgets that recur",
        RECONCILE,
        "if budgets.number(b, 'reset_interval_ms') > 0 then return 'skipped' end",
        "",
        scanners.test_marks_of_lowered_limits,
    ),
]
