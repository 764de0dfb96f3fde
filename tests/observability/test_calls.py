"""Each metric that follows from a call, made by that call."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.core.contracts.flows import AnyOf, Quorum
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.executions import Completion, FailedAttempt
from flowfabric.engine.metrics import Meter
from flowfabric.engine.valkey.stream_pool import StreamPool
from tests.support.budgets import new_budget
from tests.support.engine import Engine, refused
from tests.support.flows import TestFlow, submitted
from tests.support.suspension import Waits

OUTCOMES = "ff_attempt_outcome_total"


async def test_a_completion_counts_for_its_lane(engine: Engine, meter: Meter) -> None:
    handle = await engine.running(lane="mails")
    await engine.backend.executions.complete(handle)
    assert meter.value(OUTCOMES, "mails", "ok") == 1
    assert meter.value("ff_engine_call_duration_seconds", "complete_execution") == 1
    assert meter.value("ff_engine_call_duration_seconds", "complete") == 0


async def test_only_the_items_of_a_batch_that_landed_count(engine: Engine, meter: Meter) -> None:
    good, ended = await engine.running(), await engine.running()
    await engine.backend.executions.cancel(ended)
    items = [Completion(good), Completion(ended)]
    _, refusal = await engine.backend.executions.complete_many(items)
    assert isinstance(refusal, EngineError)
    assert meter.value(OUTCOMES, "default", "ok") == 1
    assert meter.value(OUTCOMES, "default", "cancelled") == 1


async def test_completing_and_claiming_in_one_call(engine: Engine, meter: Meter) -> None:
    done, ended = await engine.running(), await engine.running()
    await engine.backend.executions.cancel(ended)
    await engine.create()
    items = [Completion(done), Completion(ended)]
    tag, request = done.execution_id.tag, engine.want()
    await engine.backend.claims.complete_and_claim(tag, items, request, 1)
    assert meter.value(OUTCOMES, "default", "ok") == 1


@pytest.mark.parametrize(
    ("category", "retries", "outcome"),
    [("boom", 0, "error"), ("timeout", 0, "timeout"), ("boom", 3, "retry")],
)
async def test_failing_and_claiming_in_one_call(
    engine: Engine, meter: Meter, category: str, retries: int, outcome: str
) -> None:
    failed = await engine.running(policy={"retry_policy": {"max_retries": retries}})
    done, ended = await engine.running(), await engine.running()
    await engine.backend.executions.complete(ended)
    items = [FailedAttempt(failed, "x", category), Completion(done), FailedAttempt(ended, "x")]
    tag, request = failed.execution_id.tag, engine.want()
    await engine.backend.claims.complete_and_claim(tag, items, request, 1)
    assert meter.numbers[OUTCOMES] == {("default", outcome): 1, ("default", "ok"): 2}


@pytest.mark.parametrize(
    ("category", "retries", "outcome"),
    [("boom", 0, "error"), ("timeout", 0, "timeout"), ("boom", 3, "retry")],
)
async def test_failures(
    engine: Engine, meter: Meter, category: str, retries: int, outcome: str
) -> None:
    handle = await engine.running(policy={"retry_policy": {"max_retries": retries}})
    await engine.backend.executions.fail(handle, "broken", category)
    assert meter.numbers[OUTCOMES] == {("default", outcome): 1}


async def test_a_refused_call_counts_as_an_error_alone(engine: Engine, meter: Meter) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    await refused(engine.backend.executions.fail(handle, "late", "boom"), "execution_not_active")
    assert meter.numbers[OUTCOMES] == {("default", "ok"): 1}
    failures = meter.numbers["ff_engine_errors_total"]
    assert failures == {("fail_execution", "execution_not_active"): 1}


async def test_an_attempt_that_timed_out_counts_once(engine: Engine, meter: Meter) -> None:
    handle = await engine.running(
        lane="mails", policy={"timeout_policy": {"attempt_timeout_ms": 1000}}
    )
    await engine.advance(2000)
    execution_id = handle.execution_id
    for _ in range(2):
        await engine.backend.upkeep.expire_execution(
            execution_id.tag, ExpireReason.ATTEMPT_TIMEOUT, [execution_id]
        )
    assert meter.numbers[OUTCOMES] == {("mails", "timeout"): 1}


async def test_a_deadline_is_no_attempt_timeout(engine: Engine, meter: Meter) -> None:
    execution_id = await engine.create(execution_deadline_at=await engine.now() + 1000)
    await engine.advance(2000)
    await engine.backend.upkeep.expire_execution(
        execution_id.tag, ExpireReason.EXECUTION_DEADLINE, [execution_id]
    )
    assert meter.numbers[OUTCOMES] == {}


async def test_renewals(engine: Engine, meter: Meter) -> None:
    kept, lost = await engine.running(), await engine.running()
    await engine.backend.executions.complete(lost)
    leases = engine.backend.leases
    await leases.renew_many([kept, lost])
    await leases.renew(kept)
    await refused(leases.renew(lost), "execution_not_active")
    renewals = meter.numbers["ff_lease_renewal_total"]
    assert renewals == {("ok",): 2, ("error",): 2}


async def test_an_expired_lease_counts_once_for_its_lane(engine: Engine, meter: Meter) -> None:
    handle = await engine.running(lane="mails")
    await engine.advance(60_000)
    tag, upkeep = handle.execution_id.tag, engine.backend.upkeep
    for _ in range(2):
        await upkeep.mark_lease_expired_if_due(tag, [handle.execution_id])
    assert meter.numbers["ff_lease_expired_total"] == {("mails",): 1}


async def test_a_revoked_lease_and_its_reclaim(engine: Engine, meter: Meter) -> None:
    handle = await engine.running()
    assert meter.value("ff_lease_revoked_total") == 0
    for _ in range(2):
        await engine.backend.leases.revoke_lease(handle.execution_id)
    assert meter.value("ff_lease_revoked_total") == 1
    await engine.claim()
    assert meter.numbers["ff_reclaim_total"] == {("claimed",): 1}


async def test_signals_by_effect_and_refusals_by_code(engine: Engine, meter: Meter) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await waits.send(parked, "other")
    await waits.send(parked, "other", idempotency_key="once")
    await waits.send(parked, "other", idempotency_key="once")
    await waits.send(parked, "go")
    counts = meter.numbers["ff_signals_total"]
    assert counts["duplicate",] == 1
    assert counts["resume_condition_satisfied",] == 1
    assert sum(counts.values()) == 4
    wrong = parked.details.waitpoint_id, "k1:" + "0" * 40
    signals, execution_id = engine.backend.signals, parked.handle.execution_id
    await refused(signals.deliver_signal(execution_id, *wrong, "go"), "invalid_token")
    assert meter.numbers["ff_signal_rejections_total"] == {("invalid_token",): 1}


async def test_an_unknown_waitpoint_is_refused_once(engine: Engine, meter: Meter) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    unknown = "00000000-0000-4000-8000-000000000000"
    call = engine.backend.signals.verify_and_deliver(
        parked.handle.execution_id, unknown, "k1:" + "0" * 40, "go"
    )
    await refused(call, "waitpoint_token_not_found")
    refusals = meter.numbers["ff_signal_rejections_total"]
    assert refusals == {("waitpoint_token_not_found",): 1}


async def test_frames_and_their_bytes(engine: Engine, meter: Meter) -> None:
    handle = await engine.running()
    streams = engine.backend.streams
    for _ in range(2):
        # The second is the repeat of a call whose reply was lost.
        await streams.append_frames(handle, [Frame(payload=b"12345"), Frame(payload=b"1")], seq=2)
    await streams.append_frame(handle, Frame(payload=b"123"), mode="best_effort")
    assert meter.numbers["ff_stream_frames_total"] == {("durable",): 2, ("best_effort",): 1}
    assert meter.numbers["ff_stream_bytes_total"] == {("durable",): 6, ("best_effort",): 3}
    await engine.backend.executions.complete(handle)
    code = await _code(streams.append_frame(handle, Frame(payload=b"x")))
    assert meter.numbers["ff_stream_append_rejected_total"] == {(code,): 1}


async def _code(call: object) -> str:
    with pytest.raises(EngineError) as caught:
        await call  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
    return caught.value.code


async def test_tails_by_outcome(engine: Engine, meter: Meter) -> None:
    handle = await engine.running()
    streams, at = engine.backend.streams, (handle.execution_id, 0)
    waits = "ff_stream_tail_wait_seconds"
    await streams.tail_stream(*at)
    assert meter.histograms[waits] == {}
    await streams.tail_stream(*at, block_ms=1)
    assert meter.value(waits, "timeout") == 1
    await streams.append_frame(handle, Frame(payload=b"x"))
    page = await streams.tail_stream(*at, block_ms=1000)
    assert meter.value(waits, "frames") == 1
    await engine.backend.executions.complete(handle)
    await streams.tail_stream(*at, after=page.next_cursor, block_ms=1000)
    assert meter.value(waits, "closed") == 1
    assert meter.value("ff_stream_ops_in_flight", "tail_stream") == 0


async def test_reads_beyond_the_limit(engine: Engine, meter: Meter) -> None:
    handle = await engine.running()
    pool: StreamPool = engine.backend.stream_pool
    pool.ceiling = 1
    streams, at = engine.backend.streams, (handle.execution_id, 0)
    waiting = asyncio.create_task(streams.tail_stream(*at, block_ms=10_000))
    while meter.value("ff_stream_ops_in_flight", "tail_stream") == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await refused(streams.tail_stream(*at, block_ms=1), "resource_exhausted")
    assert meter.numbers["ff_stream_ops_rejected_total"] == {("tail_stream",): 1}
    await streams.append_frame(handle, Frame(payload=b"x"))
    await waiting
    assert meter.value("ff_stream_ops_in_flight", "tail_stream") == 0


async def test_joins_by_policy_once_per_graph(engine: Engine, meter: Meter) -> None:
    joins = {"any": AnyOf("let_run"), "most": Quorum(1, "let_run")}
    await submitted(engine, "a>all b>all a>any b>any a>most", joins=joins)
    policies = meter.numbers["ff_edge_group_policy_total"]
    assert policies == {("all_of",): 1, ("any_of",): 1, ("quorum",): 1}


async def test_a_join_that_is_set_counts_when_it_changes(engine: Engine, meter: Meter) -> None:
    flow, flows = await submitted(engine, "a"), engine.backend.flows
    for _ in range(2):
        await flows.set_edge_group_policy(flow.flow_id, flow.nodes["a"], AnyOf("let_run"))
    assert meter.numbers["ff_edge_group_policy_total"] == {("any_of",): 1}


async def test_dependencies_resolved_inline(engine: Engine, meter: Meter) -> None:
    flow: TestFlow = await submitted(engine, "a>b a>c")
    await flow.end("a")
    assert meter.numbers["ff_cascade_resolved_total"] == {("inline",): 2}


async def test_dependencies_resolved_in_a_batch(engine: Engine, meter: Meter) -> None:
    flow: TestFlow = await submitted(engine, "a>b")
    await flow.claim()
    handle: Handle = flow.claims["a"].handle
    await engine.backend.claims.complete_and_claim(flow.tag, [Completion(handle)], engine.want(), 1)
    assert meter.numbers["ff_cascade_resolved_total"] == {("inline",): 1}


async def test_decided_joins_that_a_reconciler_checks(engine: Engine, meter: Meter) -> None:
    flow = await submitted(engine, "a>c b>c", joins={"c": AnyOf("let_run")})
    flows = engine.backend.flows
    assert await flows.reconcile_sibling_cancel_group(flow.flow_id, flow.nodes["c"]) == "no_op"
    assert meter.numbers["ff_sibling_cancel_reconcile_total"] == {("no_op",): 1}


async def test_a_shutdown_that_runs_out_of_time(engine: Engine, meter: Meter) -> None:
    backend = engine.backend
    with backend.stream_pool.permit(waits=False):
        await refused(backend.meta.shutdown_prepare(0), "timeout")
    assert meter.value("ff_shutdown_timeout_total") == 1


async def test_arguments_by_name_are_counted_like_those_by_position(
    engine: Engine, meter: Meter
) -> None:
    first, second = await engine.running(), await engine.running()
    calls = engine.backend.executions
    await calls.complete_execution(execution_id=first.execution_id, fence=first)
    await calls.cancel_execution(execution_id=second.execution_id, reason="enough")
    assert meter.value(OUTCOMES, first.lane_id, "ok") == 1
    assert meter.value(OUTCOMES, second.lane_id, "cancelled") == 1


async def test_only_attempts_count_as_cancelled(engine: Engine, meter: Meter) -> None:
    cancel = engine.backend.executions.cancel_execution
    waiting, running = await engine.create(lane="a b:c%"), await engine.running(lane="a b:c%")
    for execution_id in (waiting, running.execution_id, running.execution_id):
        await cancel(execution_id)
    assert meter.numbers[OUTCOMES] == {("a b:c%", "cancelled"): 1}


async def test_usage_reports_by_result(engine: Engine, meter: Meter) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    limited = await new_budget(engine.backend, {"a": 10}, {"a": 5})
    for amount, key in ((4, "k"), (4, "k"), (4, ""), (9, "")):
        await budgets.report_usage(handle, limited, {"a": amount}, dedup_key=key)
    await budgets.report_usage_admin(limited, {"a": 1})
    await refused(budgets.report_usage_admin(new_uuid(), {"a": 1}), "budget_not_found")
    name = "ff_budget_report_total"
    results = ("ok", "already_applied", "soft_breach", "hard_breach", "budget_not_found")
    assert [meter.value(name, each) for each in results] == [1, 1, 2, 1, 1]
