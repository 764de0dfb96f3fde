"""Metrics of what calls do besides their answer: ends of flows, hops, siblings, suspensions."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.flows import AnyOf, Quorum
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.metrics import Meter
from flowfabric.engine.valkey.effects import count_effects
from tests.support.engine import TTL, Engine
from tests.support.flows import drained, set_units, submitted, without_followups
from tests.support.leases import WORKER, grant
from tests.support.suspension import GO, Waits

WAITED = "ff_claim_wait_seconds"


def seconds(meter: Meter, name: str, *labels: str) -> tuple[int, float]:
    """How many durations were observed, and their sum."""
    found = meter.histograms[name][labels]
    return sum(found.counts), found.total


class FrozenClock:
    """The engine's clock, which moves only when it is told."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._at = 0

    async def advance(self, ms: int = 0) -> None:
        self._at = (self._at or await self._engine.now()) + ms
        await self._engine.freeze(self._at)


@pytest.fixture
async def clock(engine: Engine) -> FrozenClock:
    frozen = FrozenClock(engine)
    await frozen.advance()
    return frozen


async def test_how_long_executions_waited_for_a_claim(
    engine: Engine, meter: Meter, clock: FrozenClock
) -> None:
    await engine.create(lane="mails")
    await clock.advance(1500)
    await engine.create(lane="mails")
    await clock.advance(500)
    await engine.claim_all(lane="mails")
    assert seconds(meter, WAITED, "mails") == (2, 2.5)


async def test_how_long_an_execution_waited_for_a_claim_by_grant(
    engine: Engine, meter: Meter, clock: FrozenClock
) -> None:
    execution_id = await engine.create(lane="mails")
    await clock.advance(1500)
    held = await grant(engine, execution_id)
    await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
    assert seconds(meter, WAITED, "mails") == (1, 1.5)


async def test_a_retry_waits_from_when_it_is_due(
    engine: Engine, meter: Meter, clock: FrozenClock
) -> None:
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 4000}}}
    handle = await engine.running(policy=policy)
    assert seconds(meter, WAITED, "default") == (1, 0)
    await engine.backend.executions.fail(handle, "boom", "boom")
    await clock.advance(5000)
    await engine.backend.upkeep.promote_delayed(
        handle.execution_id.tag, "default", [handle.execution_id]
    )
    await clock.advance(250)
    await engine.claim()
    assert seconds(meter, WAITED, "default") == (2, 0.25)


async def test_claims_of_a_completing_call_wait_too(
    engine: Engine, meter: Meter, clock: FrozenClock
) -> None:
    handle = await engine.running()
    await engine.create()
    await clock.advance(3000)
    tag, request = handle.execution_id.tag, engine.want()
    await engine.backend.claims.complete_and_claim(tag, [Completion(handle)], request, 1)
    assert seconds(meter, WAITED, "default") == (2, 3.0)


async def test_flows_that_finish(engine: Engine, meter: Meter) -> None:
    good, bad = await submitted(engine, "a>b"), await submitted(engine, "a>b")
    for key in ("a", "b"):
        await good.end(key)
    await bad.end("a", "failed")
    assert meter.numbers["ff_flow_terminal_total"] == {("completed",): 1, ("failed",): 1}


async def test_a_hop_takes_no_time_in_the_call_that_ends_the_upstream(
    engine: Engine, meter: Meter
) -> None:
    flow = await submitted(engine, "a>b a>c")
    await flow.end("a")
    assert seconds(meter, "ff_dag_hop_seconds") == (2, 0)


async def test_a_hop_that_was_left_for_later_takes_as_long_as_it_took(
    engine: Engine, meter: Meter, clock: FrozenClock
) -> None:
    await without_followups(engine)
    flow = await submitted(engine, "a>b")
    await set_units(engine, 0)
    await flow.end("a")
    await set_units(engine)
    assert meter.value("ff_dag_hop_seconds") == 0
    await clock.advance(7000)
    await drained(engine, flow.tag)
    assert seconds(meter, "ff_dag_hop_seconds") == (1, 7.0)


@pytest.mark.parametrize(
    ("join", "how", "reason"),
    [
        (AnyOf("cancel_remaining"), "success", "sibling_quorum_satisfied"),
        (Quorum(3, "cancel_remaining"), "failed", "sibling_quorum_impossible"),
    ],
)
async def test_siblings_that_a_join_no_longer_needs(
    engine: Engine, meter: Meter, join: AnyOf | Quorum, how: str, reason: str
) -> None:
    flow = await submitted(engine, "a>d b>d c>d", joins={"d": join})
    await flow.end("a", how)
    assert meter.numbers["ff_sibling_cancel_dispatched_total"] == {(reason,): 2}
    assert meter.numbers["ff_sibling_cancel_disposition_total"] == {("cancelled",): 2}


async def test_how_long_suspensions_took_by_what_ended_them(
    engine: Engine, meter: Meter, clock: FrozenClock
) -> None:
    waits = await Waits.open(engine)
    cancelled = await waits.park(GO)
    resumed = await waits.park(GO)
    await clock.advance(90_000)
    await engine.backend.executions.cancel_execution(cancelled.handle.execution_id)
    await engine.backend.suspensions.resume_execution(resumed.handle.execution_id)
    found = {labels: h.total for labels, h in meter.histograms["ff_suspension_seconds"].items()}
    assert found.keys() >= {("cancelled",)}
    assert (len(found), set(found.values())) == (2, {90.0})


def test_effects_of_a_later_version_are_ignored() -> None:
    meter = Meter()
    count_effects(meter, ["Zanything:5", "Fcompleted"])
    assert meter.value("ff_flow_terminal_total", "completed") == 1


async def test_without_metrics_effects_change_nothing(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("a")
    assert await flow.states() == {"a": "completed", "b": "waiting"}


def test_a_reason_may_contain_a_colon(meter: Meter) -> None:
    count_effects(meter, ["Sterminal:execution_deadline:1500"])
    assert seconds(meter, "ff_suspension_seconds", "terminal:execution_deadline") == (1, 1.5)
