"""Guards of flows: edges and joins, the cascade and its limits, cancellation, replay, holds."""

from __future__ import annotations

from tests.conformance import (
    test_flow_acceptance,
    test_flow_cancel_rules,
    test_flow_codes,
    test_flow_growth,
    test_flow_rules,
    test_flow_siblings,
    test_flow_upkeep,
)
from tests.support.engine import Engine
from tests.support.flows import without_followups
from tests.valkey import test_flow_faults, test_flow_races, test_join_algebra
from tests.valkey.flow_scenarios import (
    counts_an_edge_once,
    finishes_once,
    goes_on_after_completing_and_claiming,
    staged_edges_count_nothing,
)
from tests.valkey.mutants import CLAIMING, Scenario

FLOW = "lib/83_flow.lua"
EDGES = "lib/84_edges.lua"
CASCADE = "lib/87_cascade.lua"
FLOW_CANCEL = "lib/88_flow_cancel.lua"
GRAPH = "lib/89_graph.lua"
RETRY = "lib/90_retry.lua"
CREATING = "lib/91_creating.lua"
GRANTING = "lib/94_granting.lua"
REPLAYING = "lib/95_replaying.lua"
STAGE = "functions/ff_stage_edge.lua"
APPLY = "functions/ff_apply_edge.lua"
JOIN = "functions/ff_set_join.lua"
ADD = "functions/ff_add_to_flow.lua"
DRAIN = "functions/ff_drain_cascade.lua"
CANCEL_FLOW = "functions/ff_cancel_flow.lua"
SPAWN = "functions/ff_spawn.lua"
SUBMIT = "functions/ff_submit_flow.lua"
COMPLETE = "functions/ff_complete.lua"


def alone(scenario: Scenario) -> Scenario:
    """As if each caller died after its call."""

    async def run(engine: Engine) -> None:
        await without_followups(engine)
        await scenario(engine)

    return run


MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    # --- edges and joins ---
    (
        "a join is decided once",
        CASCADE,
        "local was_open = g.state == 'p'",
        "local was_open = true",
        lambda e: test_flow_siblings.test_what_ends_after_the_decision_moves_counters_alone(
            e, "success"
        ),
    ),
    (
        "an edge is resolved once",
        CASCADE,
        "if e.state ~= 'u' then return 'already_resolved' end",
        "",
        counts_an_edge_once,
    ),
    (
        "only a later run of the upstream counts",
        CASCADE,
        "if e.run ~= '' and run <= tonumber(e.run) then",
        "if false then",
        test_flow_acceptance.test_a_child_waits_while_its_upstream_stays_failed,
    ),
    (
        "a staged edge does not count",
        CASCADE,
        "or e.state == 'g' or",
        "or",
        staged_edges_count_nothing,
    ),
    (
        "an edge of a trimmed member leads nowhere",
        CASCADE,
        " or e.upstream ~= edges.uuid_of(up_id) then",
        " then",
        alone(
            test_flow_upkeep.test_the_edges_of_a_trimmed_member_do_not_lead_to_another_with_its_id
        ),
    ),
    (
        "counters never exceed the edges",
        CASCADE,
        "if edges.open_count(g) < 1 then",
        "if false then",
        lambda e: test_flow_faults.test_a_damaged_child_does_not_affect_others(
            e, test_flow_faults._full_counters, "success"
        ),
    ),
    (
        "an ended child gets no data",
        CASCADE,
        "good and not S.is_terminal(rec.state) and",
        "good and",
        test_flow_acceptance.test_an_ended_child_keeps_its_payload,
    ),
    (
        "the edge staged last passes its result",
        CASCADE,
        "or tonumber(rec.passed or 0) >= e.number then",
        "then",
        lambda e: test_flow_acceptance.test_of_two_results_the_edge_staged_last_counts(e, "ba"),
    ),
    (
        "only a child that waits is moved",
        CASCADE,
        "if not S.is_blocked_by_dependencies(rec.state) or rec.subflow_open then",
        "if S.is_terminal(rec.state) then",
        lambda e: test_flow_rules.test_an_edge_into_a_running_member_waits_until_it_waits(
            e, "failed"
        ),
    ),
    (
        "too few edges make nothing impossible",
        EDGES,
        "if staged >= join.k and g.failed",
        "if g.failed",
        lambda e: test_join_algebra.check(e, ("failed", "success"), (), (1, 1)),
    ),
    (
        "skipped upstreams are counted apart",
        CASCADE,
        "good and 's' or outcome == 'k' and 'k' or 'i'",
        "good and 's' or 'i'",
        lambda e: test_join_algebra.check(e, ("skipped",)),
    ),
    (
        "no edge into an ended member",
        GRAPH,
        "if S.is_terminal(rec.state) then reply.refuse('terminal') end",
        "",
        test_flow_rules.test_an_edge_into_an_ended_member_is_refused,
    ),
    (
        "a decided join stays decided",
        GRAPH,
        "local reopened = g.state == 'p' or g.state == 's' and not rec.join",
        "local reopened = true",
        test_flow_rules.test_a_late_edge_leaves_a_decided_join_of_any_as_it_is,
    ),
    (
        "a join of all opens again",
        GRAPH,
        "local reopened = g.state == 'p' or g.state == 's' and not rec.join",
        "local reopened = g.state == 'p'",
        test_flow_rules.test_a_late_edge_opens_a_join_of_all_again,
    ),
    (
        "an upstream that has ended decides at once",
        GRAPH,
        "local resolution = graph.resolve_ended(c, flow_id, place, id, e.upstream)",
        "local resolution",
        test_flow_growth.test_an_edge_from_an_ended_upstream_decides_at_once,
    ),
    (
        "a policy is fixed by the first edge",
        JOIN,
        "if edges.group(id, rec).n > 0 then",
        "if false then",
        test_flow_codes.test_the_policy_of_a_join,
    ),
    # --- growing ---
    (
        "the revision that a stager expects",
        STAGE,
        "if args[8] ~= '' and tonumber(args[8]) ~= f.graph_revision then",
        "if false then",
        test_flow_acceptance.test_of_two_stagers_one_is_too_late,
    ),
    (
        "the same edge is found again",
        STAGE,
        "reply.stop_with(existing(c, flow_id, f, args))",
        "",
        test_flow_acceptance.test_staging_refuses_in_this_order,
    ),
    (
        "a cycle",
        STAGE,
        "reply.stop_with(graph.cycle_problem(c, flow_id, up_id, id))",
        "",
        test_flow_acceptance.test_staging_refuses_in_this_order,
    ),
    (
        "a cycle through new members",
        GRAPH,
        "  local problem = late_problem(c, flow_id, late, created)\n",
        "  local problem\n",
        test_flow_growth.test_an_extension_cannot_close_a_cycle,
    ),
    (
        "an edge is applied as it was staged",
        APPLY,
        "local other = differing(e, id, args)",
        "local other",
        test_flow_codes.test_applying_an_edge,
    ),
    (
        "one flow forever",
        ADD,
        "if rec.flow_id and rec.flow_id ~= flow_id then",
        "if false then",
        test_flow_codes.test_an_execution_is_in_one_flow_forever,
    ),
    (
        "no growth after the cancellation",
        FLOW,
        "if flow.is_cancelled(f) then reply.refuse('flow_already_terminal') end",
        "",
        test_flow_cancel_rules.test_no_member_joins_a_cancelled_flow,
    ),
    (
        "upstreams of a new member are members",
        GRAPH,
        "if not up or up.flow_id ~= flow_id then return",
        "if not up then return",
        test_flow_codes.test_a_new_member_waits_for_members_only,
    ),
    (
        "another graph under the same id",
        SUBMIT,
        "if f.digest ~= header.digest then",
        "if false then",
        test_flow_codes.test_submitting_a_graph_twice,
    ),
    (
        "only the lease holder spawns",
        SPAWN,
        "local problem = fence.check(c, id, rec, args[2], false, true)",
        "local problem",
        test_flow_rules.test_who_may_not_spawn,
    ),
    # --- the cascade and its limits ---
    (
        "a call stops at its limit",
        CASCADE,
        "function cascade.spend(c, units) c.units = cascade.room(c) - units end",
        "function cascade.spend(c) cascade.room(c) end",
        alone(lambda e: test_flow_races.test_a_call_stays_within_its_limit(e, 2)),
    ),
    (
        "what is left is stored",
        CASCADE,
        "'NX', c.now, name_of(flow_id, id))",
        "'XX', c.now, name_of(flow_id, id))",
        alone(lambda e: test_flow_races.test_a_call_stays_within_its_limit(e, 2)),
    ),
    (
        "what is done leaves the queue",
        CASCADE,
        "elseif each.marked then",
        "elseif false then",
        alone(lambda e: test_flow_races.test_a_call_stays_within_its_limit(e, 2)),
    ),
    (
        "progress is kept",
        CASCADE,
        "  record.set(c, id, rec, 'cascaded', from)\n",
        "",
        alone(lambda e: test_flow_races.test_a_call_stays_within_its_limit(e, 1)),
    ),
    (
        "an upstream that runs again decides nothing",
        DRAIN,
        "rec.flow_id == flow_id and S.is_terminal(rec.state) then",
        "rec.flow_id == flow_id then",
        alone(test_flow_races.test_an_upstream_that_runs_again_decides_nothing_yet),
    ),
    (
        "a unit that fails is tried again, then parked",
        CASCADE,
        "if count > MAX_FAILURES then",
        "if false then",
        alone(
            lambda e: test_flow_faults.test_a_damaged_child_does_not_affect_others(
                e, test_flow_faults._odd_edge, "success"
            )
        ),
    ),
    (
        "the reply of a worker says that something is left",
        COMPLETE,
        "unknown or false, cascade.told(c) or false, want.needing)",
        "unknown, cascade.told(c))",
        goes_on_after_completing_and_claiming,
    ),
    (
        "a flow finishes once",
        FLOW,
        "if live == 0 and not f.finished_at and",
        "if live == 0 and",
        finishes_once,
    ),
    # --- siblings ---
    (
        "let_run leaves the others alone",
        EDGES,
        "cancels = cancels == 'c'",
        "cancels = true",
        lambda e: test_flow_siblings.test_what_a_decided_join_does_with_the_others(
            e, "any", "satisfied", "let_run"
        ),
    ),
    (
        "siblings that are left are stored",
        CASCADE,
        "    server.call('SADD', groups, name)\n",
        "",
        alone(test_flow_races.test_siblings_in_small_steps),
    ),
    (
        "edges that came later have no siblings",
        CASCADE,
        "not e or e.number > tonumber(last)",
        "not e",
        alone(test_flow_races.test_an_edge_that_came_after_the_decision_has_no_siblings),
    ),
    (
        "shared siblings are spared",
        CASCADE,
        "if spares and feeds_another(c, flow_id, up_id, child) then return end",
        "",
        test_flow_siblings.test_siblings_that_others_wait_for_may_be_spared,
    ),
    (
        "only undecided joins spare",
        CASCADE,
        "if found[1] and not S.is_terminal(found[1])",
        "if found[1]",
        test_flow_siblings.test_a_sibling_that_only_ended_members_wait_for_is_not_spared,
    ),
    # --- cancellation ---
    (
        "claims skip members of a cancelled flow",
        CLAIMING,
        "if claiming.ends_with_flow(c, id, rec, mode) then return false end",
        "",
        alone(test_flow_races.test_no_member_runs_after_the_cancellation),
    ),
    (
        "grants give no member of a cancelled flow",
        GRANTING,
        "if claiming.ends_with_flow(c, id, rec, mode) then",
        "if false then",
        alone(test_flow_races.test_no_member_runs_after_the_cancellation),
    ),
    (
        "a cancelled flow neither promotes nor skips",
        CASCADE,
        "local f = flow.ending_member(c, rec, flow.resumes(c, rec))",
        "local f",
        lambda e: test_flow_cancel_rules.test_a_parked_member_ends_with_those_that_wait(
            e, "terminal"
        ),
    ),
    (
        "those that waited end first",
        FLOW,
        "and not (rec.flow_id and server.call('ZSCORE'",
        "and not (false and server.call('ZSCORE'",
        lambda e: test_flow_cancel_rules.test_a_parked_member_ends_with_those_that_wait(
            e, "success_only"
        ),
    ),
    (
        "running members drain",
        FLOW_CANCEL,
        "if not S.is_runnable(rec.state) or continues then return 'settled' end",
        "",
        test_flow_cancel_rules.test_pending_members_end_and_running_ones_go_on,
    ),
    (
        "a resumed attempt drains",
        FLOW,
        "if resumes and f.cancellation_policy == 'cancel_pending' then return nil end",
        "",
        test_flow_cancel_rules.test_a_resumed_member_of_a_draining_flow_goes_on,
    ),
    (
        "no retry in a cancelled flow",
        RETRY,
        "if flow.ending_member(c, rec) then return false end",
        "",
        test_flow_cancel_rules.test_a_failing_attempt_gets_no_retry,
    ),
    (
        "a weaker policy changes nothing",
        CANCEL_FLOW,
        "flow_cancel.strength(policy) <= flow_cancel.strength(before)",
        "false",
        test_flow_cancel_rules.test_a_stronger_policy_reaches_more_and_a_weaker_one_nothing,
    ),
    (
        "members that are left are stored",
        FLOW_CANCEL,
        "  server.call('ZADD', K.index(c.tag, 'cancel_backlog'), c:after(grace), flow_id)\n",
        "",
        alone(lambda e: test_flow_races.test_a_cancellation_in_small_steps(e, 2)),
    ),
    # --- holds and replays ---
    (
        "a held flow holds members that are unblocked",
        FLOW,
        "if flow.holds(c, id, rec) then",
        "if false then",
        test_flow_rules.test_an_edge_satisfied_in_a_held_flow_leaves_the_hold,
    ),
    (
        "a held flow holds new members",
        CREATING,
        "elseif f.held_from then",
        "elseif false then",
        test_flow_codes.test_growing_and_releasing_a_held_flow,
    ),
    (
        "a held flow holds replays",
        REPLAYING,
        "if gated then flow.move_on(c, id, rec) else",
        "if subflows.is_node(rec) then flow.move_on(c, id, rec) else",
        test_flow_rules.test_a_replay_in_a_held_flow_waits_for_the_release,
    ),
    (
        "an end before the reopening counts",
        REPLAYING,
        "  if not waits then return end\n",
        "  if not blocked then return end\n",
        test_flow_upkeep.test_a_rerun_counts_what_ended_again_before_it,
    ),
    (
        "a delay outlasts a join",
        FLOW,
        "if tonumber(rec.delay_until or 0) > c.now then return S.delayed('d', attempt) end",
        "",
        test_flow_rules.test_a_delayed_member_waits_for_the_edge_and_then_for_its_time,
    ),
    (
        "no replay in a cancelled flow",
        REPLAYING,
        "if f and flow.is_cancelled(f) then return reply.err('flow_already_terminal') end",
        "",
        test_flow_upkeep.test_a_cancelled_flow_is_not_replayed,
    ),
    (
        "strict replays need their upstreams",
        REPLAYING,
        "local wanted = strict and ended or lost(c, id, rec, ended)",
        "local wanted = lost(c, id, rec, ended)",
        test_flow_growth.test_a_skipped_member_waits_for_a_new_run_of_its_upstream,
    ),
    (
        "nobody runs before its reopened upstreams",
        REPLAYING,
        "if g.state == 'p' and not blocked then flow.block(c, id, rec) end",
        "",
        test_flow_upkeep.test_a_rerun_starts_nobody_before_its_upstreams,
    ),
    (
        "a replay keeps what others decided",
        REPLAYING,
        "g[counter] = math.max(0, g[counter] - 1)",
        "g.succeeded, g.failed, g.skipped = 0, 0, 0",
        test_flow_upkeep.test_a_replay_keeps_what_other_upstreams_decided,
    ),
    (
        "what a current run decided stands",
        REPLAYING,
        "or decided and tonumber(e.run) >= run then",
        "then",
        alone(
            lambda e: test_flow_races.test_a_reopening_that_comes_late_changes_nothing(e, "failed")
        ),
    ),
]
