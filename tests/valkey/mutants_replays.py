"""Guards of replayed flows and subflows, and of repeats on cancelled flows."""

from __future__ import annotations

from tests.conformance import test_flow_cancel_rules, test_flow_growth, test_flow_upkeep
from tests.valkey import test_subflows
from tests.valkey.mutants import Scenario
from tests.valkey.mutants_flows import GRAPH, REPLAYING

SUBFLOWS = "lib/86_subflows.lua"

MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    (
        "who never got past its dependencies waits again",
        REPLAYING,
        "return not ran and edges.group(id, rec).state ~= 's'",
        "return false",
        test_flow_upkeep.test_members_that_ended_while_they_waited_wait_again,
    ),
    (
        "who ran does not wait again",
        REPLAYING,
        "local ran = S.has_ended_attempt(rec.state) and not rec.between_attempts",
        "local ran = false",
        test_flow_upkeep.test_a_member_that_ran_runs_again_at_once,
    ),
    (
        "names of inputs are unique",
        GRAPH,
        "named[id][each[4]] = true",
        "",
        test_flow_growth.test_an_extension_cannot_use_the_name_of_an_input_twice,
    ),
    (
        "what is new does not join a cancelled flow",
        "functions/ff_extend_flow.lua",
        "if not graph.is_stored(c, flow_id, items, late, more) then",
        "if false then",
        test_flow_cancel_rules.test_no_member_joins_a_cancelled_flow,
    ),
    (
        "a held flow whose members end is not released",
        "functions/ff_release_flow.lua",
        "if flow.ends_members(f) then return reply.err('flow_already_terminal') end",
        "",
        test_flow_cancel_rules.test_a_held_flow_whose_members_end_is_not_released,
    ),
    (
        "the end before does not end the node that runs again",
        SUBFLOWS,
        "or server.call('HEXISTS', K.index(c.tag, 'subflow_outbox'), 's|' .. flow_id) == 1 then",
        "then",
        test_subflows.test_an_end_that_arrives_after_the_replay_changes_nothing,
    ),
    (
        "an order to start replaces one to cancel",
        SUBFLOWS,
        "if OPPOSITE[kind] then",
        "if false then",
        test_subflows.test_a_subflow_whose_cancellation_never_arrived_continues,
    ),
]
