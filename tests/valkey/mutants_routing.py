"""The guards of routing: what waits where, and who may take it, as in `mutants.py`."""

from __future__ import annotations

from tests.conformance import test_claim_many as many
from tests.conformance import test_claim_namespaces as namespaces
from tests.conformance import test_claim_offers as offers
from tests.conformance import test_claim_repeats as repeats
from tests.conformance import test_claim_tasks as tasks
from tests.conformance import test_flow_handover as handover
from tests.conformance.test_claim_properties import Lane, Work, Worker
from tests.scanners import test_doorbell as bells
from tests.sdk import test_grant_admission as grant_admission
from tests.support.engine import Engine
from tests.valkey import test_bounds as bounds
from tests.valkey import test_claim_offers as stored_offers
from tests.valkey import test_exec_doorbell as rings
from tests.valkey.mutants import Scenario
from tests.valkey.mutants_tasks import CLAIMING, OFFERS, WAITING

NOTHING, GPU = frozenset[str](), frozenset({"gpu"})


async def takes_the_best_of_all_it_covers(engine: Engine) -> None:
    """Of several indexes: with and without requirements, waiting and lost."""
    lane = Lane(engine, await engine.now())
    for arrives in ([GPU], [NOTHING], [GPU, NOTHING, GPU]):
        for needs in arrives:
            await lane.submit(Work(needs, "default", 0, 1))
        for count in (1, 2, 3):
            await lane.claim(Worker(NOTHING, None, 1))
            await lane.claim(Worker(GPU, None, count))
            await lane.lose_all()


# Name, file, the guard as written, what stands there instead, the scenario that must notice.
MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    (
        "a whole index that nobody can take now",
        CLAIMING,
        " and #rows < want.max and (limit < want.most_looked or #rows > 0) then",
        " and #rows < want.max then",
        stored_offers.test_a_whole_index_that_nobody_can_take_now_hides_no_other,
    ),
    (
        "rings of a claim that takes nothing",
        CLAIMING,
        "if left > 0 and (#rows > 0 or want.needing) and",
        "if left > 0 and",
        stored_offers.test_a_whole_index_that_nobody_can_take_now_hides_no_other,
    ),
    (
        "rings for what a claim leaves in another index",
        CLAIMING,
        "        if not want.plain then want.rest[key] = true end\n",
        "",
        rings.test_work_that_a_claim_leaves_in_another_index,
    ),
    (
        "rings for a released member that the claim leaves",
        CLAIMING,
        "      waiting.ring(c, rec)\n      given",
        "      given",
        rings.test_a_released_member_that_the_claim_leaves,
    ),
    (
        "rings for a returned grant",
        "functions/ff_release_grant.lua",
        "    waiting.ring(c, rec)\n",
        "",
        rings.test_a_returned_grant,
    ),
    (
        "rings for a lease of an unknown task",
        "functions/ff_release_unknown.lua",
        "  waiting.ring(c, rec)\n",
        "",
        rings.test_a_lease_of_an_unknown_task,
    ),
    (
        "lost work before what was released",
        CLAIMING,
        "server.call('EXISTS', K.eligible(tag, lane), K.reclaimable(tag, lane),\n",
        "server.call('EXISTS', K.eligible(tag, lane),\n",
        handover.test_lost_work_may_be_better_than_what_was_released,
    ),
    (
        "blocks that an operator would lift",
        "functions/ff_grant_and_claim.lua",
        "  if not S.is_eligible(rec.state) then return reply.err('execution_not_eligible') end\n",
        "",
        repeats.test_an_operator_does_not_lift_a_block,
    ),
    (
        "lost runs that were admitted before",
        "functions/ff_issue_claim_grant.lua",
        "if not lost and admission.is_needed(rec) and",
        "if admission.is_needed(rec) and",
        grant_admission.test_a_lost_run_needs_no_second_admission,
    ),
    (
        "rings for other lanes than a damaged one",
        "functions/ff_ring_waiting.lua",
        "local ok, holds_work = try(waiting.ring_all, c, lane)",
        "local ok, holds_work = true, waiting.ring_all(c, lane)",
        bells.test_damage_in_one_lane_silences_no_other,
    ),
    (
        "the number of lanes rung for",
        WAITING,
        "  if not c:holds_work(lane) then return false end\n",
        "  if c:is_closed(lane) then return false end\n",
        bells.test_silent_without_claimable_work,
    ),
    (
        "the order of a repeat",
        CLAIMING,
        "  table.sort(found, function(a, b) return a.rec.lease < b.rec.lease end)\n",
        "",
        many.test_a_repeat_keeps_the_order_of_many,
    ),
    (
        "a repeat of a resumed claim after a reclaim",
        CLAIMING,
        "local mode = rec.attempt_type == 'reclaim' and not rec.resumed_at and 'reclaimed'",
        "local mode = rec.attempt_type == 'reclaim' and 'reclaimed'",
        many.test_a_repeat_tells_that_a_reclaimed_attempt_was_resumed,
    ),
    (
        "requirements that a worker lacks",
        OFFERS,
        "if not offered.tokens[token] then",
        "if false then",
        offers.test_only_covered_requirements_are_claimed_and_nothing_is_written,
    ),
    (
        "an entry in an index of others",
        OFFERS,
        "return offered.covers(signature)",
        "return true",
        lambda e: stored_offers.test_an_index_does_not_decide_who_may_claim(e, lost=False),
    ),
    (
        "plain work of a namespace that the worker does not serve",
        OFFERS,
        "  if not signature then return offered.serves_default end\n",
        "  if not signature then return true end\n",
        lambda e: namespaces.test_admission_opens_no_other_namespace(e, "default"),
    ),
    (
        "the plain index of a namespace that the worker does not serve",
        OFFERS,
        "  if offered.serves_default then add('default', false) end\n",
        "  add('default', false)\n",
        namespaces.test_work_of_others_is_not_counted_as_left,
    ),
    (
        "very many signatures at once",
        OFFERS,
        "part_of(space.signatures, MAX_COVERED - count, c.now)",
        "space.signatures",
        bounds.test_a_claim_of_a_worker_with_very_many_tasks,
    ),
    (
        "another part of very many signatures",
        OFFERS,
        "local part, first = {}, now % #signatures",
        "local part, first = {}, 0",
        bounds.test_no_task_of_very_many_starves,
    ),
    (
        "signatures that a claim did not see",
        CLAIMING,
        "  if left == 0 and want.unseen then left = 1 end\n",
        "",
        bounds.test_what_a_claim_does_not_see_counts_as_left,
    ),
    (
        "the worker's own tasks among very many",
        OFFERS,
        "    for _, token in ipairs(tokens) do own[#own + 1] = prefix .. token end\n",
        "",
        lambda e: tasks.test_the_most_signatures_of_a_lane_are_those_that_people_chose(e, "acme"),
    ),
    (
        "the worker's capabilities among very many",
        OFFERS,
        "tokens[#tokens + 1] = true, token\n",
        "tokens[#tokens + 1] = true, string.find(token, '^task:') and token\n",
        bounds.test_very_many_tasks_of_others_hide_no_work_for_a_capability,
    ),
    (
        "the worker's own namespaces among very many",
        OFFERS,
        "    if prefix ~= '' then own[#own + 1] = prefix end\n",
        "",
        bounds.test_namespaces_do_not_use_up_the_limit,
    ),
    (
        "signatures beside the plain index",
        OFFERS,
        "or not offers.only_plain(covered(c, want, offered))",
        "",
        takes_the_best_of_all_it_covers,
    ),
    (
        "lost work beside the plain index",
        OFFERS,
        " or server.call('EXISTS', lost, config) > 0\n",
        "\n",
        takes_the_best_of_all_it_covers,
    ),
    (
        "the best of several indexes",
        OFFERS,
        "if sources > 1 then table.sort(found, best_first) end",
        "",
        takes_the_best_of_all_it_covers,
    ),
    (
        "lost work with requirements",
        OFFERS,
        "any = add(K.reclaimable(c.tag, want.lane, signature), signature) or any",
        "",
        takes_the_best_of_all_it_covers,
    ),
    (
        "the namespace that has gone longest without a lease",
        OFFERS,
        "if last_a ~= last_b then return last_a < last_b end",
        "",
        namespaces.test_a_noisy_namespace_delays_others_by_one_turn,
    ),
    (
        "how many signatures people may choose",
        WAITING,
        "if is_full(key) then",
        "if false then",
        bounds.test_a_lane_has_a_limited_number_of_signatures,
    ),
    (
        "signatures of the same batch",
        WAITING,
        "if c.joined then",
        "if false then",
        bounds.test_a_lane_has_a_limited_number_of_signatures,
    ),
    (
        "signatures that the lane has already",
        WAITING,
        "if server.call('SISMEMBER', key, signature) == 1 then return nil end",
        "",
        bounds.test_a_lane_has_a_limited_number_of_signatures,
    ),
    (
        "a signature that nothing has any more",
        WAITING,
        "    c:release_signature(rec.lane_id, signature)\n  else",
        "  else",
        bounds.test_a_reclaimed_execution_takes_its_signature_along,
    ),
    (
        "names of tasks that look like lists",
        WAITING,
        "string.gsub(kind, '[^!-$&-+--~]', escaped)",
        "kind",
        lambda e: tasks.test_a_task_of_any_name_is_found_again(e, "a,b"),
    ),
    (
        "work that a claim frees for others",
        WAITING,
        "if later and not offers.takes(c.claimer, rec) then c.rings_later = nil end",
        "",
        lambda e: rings.test_what_a_completing_worker_releases_for_others(e, "a capability"),
    ),
    (
        "bells of signatures that ring again",
        WAITING,
        "    c:ring(lane, signature)\n",
        "",
        bells.test_for_work_with_requirements_and_for_reclaims,
    ),
    (
        "the plain bell without plain work",
        WAITING,
        "if server.call('EXISTS', K.eligible(c.tag, lane), K.reclaimable(c.tag, lane)) > 0 then",
        "do",
        bells.test_for_work_that_waits_for_a_worker_with_its_task,
    ),
]
