"""What a signal is said to have done, and what is recorded of it."""

from __future__ import annotations

import pytest

from flowfabric.core.conditions import (
    AllOf,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    condition_json,
)
from flowfabric.core.contracts.suspension import Accepted
from tests.support.engine import Engine
from tests.support.leases import running
from tests.support.suspension import Waits


async def test_effects_of_single_conditions(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Single("k", "go"))
    assert await waits.effect(parked, "Go") == "no_op"
    assert await waits.effect(parked, "go ") == "no_op"
    assert await waits.effect(parked, "go") == "resume_condition_satisfied"
    timeout = await engine.now() + 60_000
    for condition in (OperatorOnly(), TimeoutOnly()):
        parked = await waits.park(condition, handle=await running(engine), timeout_at=timeout)
        for name in ("OperatorOnly", "operator_resume", "TimeoutOnly", "__operator_only__"):
            assert await waits.effect(parked, name) == "no_op"
        vector = await engine.vector(parked.handle.execution_id)
        assert vector.lifecycle_phase == "suspended"


async def test_effects_of_composites(engine: Engine) -> None:
    waits = await Waits.open(engine)
    votes = Count(n=2, waitpoints=("v",), count_kind=CountKind.DISTINCT_SOURCES, signal_name="yes")
    parked = await waits.park(AllOf((votes, Single("s", "go"))))
    assert await waits.effect(parked, "no") == "signal_ignored_matcher_failed"
    assert await waits.effect(parked, "yes", source_identity="a") == "appended_to_waitpoint"
    assert (
        await waits.effect(parked, "yes", source_identity="a") == "appended_to_waitpoint_duplicate"
    )
    assert await waits.effect(parked, "go", at=1) == "appended_to_waitpoint"
    assert await waits.effect(parked, "go", at=1) == "appended_to_waitpoint_duplicate"
    counts = [
        (w["signal_count"], w["matched_signal_count"]) for w in await waits.waitpoints(parked)
    ]
    assert counts == [("3", "2"), ("2", "2")]
    assert await waits.effect(parked, "yes", source_identity="b") == "resume_condition_satisfied"
    claim = await engine.claim()
    assert [
        (s.signal_name, s.source_identity)
        for s in await waits.backend.waitpoints.observe_signals(claim.handle)
    ] == [
        ("yes", "a"),
        ("go", ""),
        ("yes", "b"),
    ]


@pytest.mark.corrupts
async def test_a_waitpoint_that_no_node_names(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(AllOf((Single("k"),)))
    current = (
        f"ff:exec:{parked.handle.execution_id.tag}:{parked.handle.execution_id}:suspension:current"
    )
    await waits.write(current, resume_condition_json=condition_json(AllOf((Single("x"),))))
    assert await waits.effect(parked) == "signal_ignored_not_in_condition"


async def test_sources_are_pairs(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Count(n=4, waitpoints=("k",), count_kind=CountKind.DISTINCT_SOURCES))
    pairs = [("a\x01b", "c"), ("a", "b\x01c"), ("a", ""), ("", "a")]
    effects = [
        await waits.effect(parked, source_type=kind, source_identity=identity)
        for kind, identity in pairs
    ]
    assert effects == ["appended_to_waitpoint"] * 3 + ["resume_condition_satisfied"]


async def test_what_is_recorded(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id = parked.handle.execution_id
    await engine.freeze(await engine.now())
    now = await engine.now()
    outcome = await waits.send(
        parked,
        "noise",
        payload=b'"body"',
        signal_category="c",
        source_type="t",
        source_identity="i",
        correlation_id="x",
        idempotency_key="key",
        created_at=17,
        target_scope="execution",
    )
    assert isinstance(outcome, Accepted)
    stored = await waits.hash(f"ff:signal:{execution_id}:{outcome.signal_id}")
    assert stored == {
        "target_waitpoint_id": parked.details.waitpoint_id,
        "target_scope": "execution",
        "signal_name": "noise",
        "signal_category": "c",
        "source_type": "t",
        "source_identity": "i",
        "correlation_id": "x",
        "idempotency_key": "key",
        "created_at": "17",
        "accepted_at": str(now),
        "payload_encoding": "json",
        "observed_effect": "no_op",
    }
    (waitpoint,) = await waits.waitpoints(parked)
    assert (waitpoint["signal_count"], waitpoint["last_signal_at"]) == ("1", str(now))
    assert (await waits.suspension(execution_id))["last_signal_at"] == str(now)
    (event,) = [e for e in await engine.events(execution_id) if e.type == "signal"]
    assert event.fields == {
        "signal_id": outcome.signal_id,
        "signal_name": "noise",
        "waitpoint_id": parked.details.waitpoint_id,
        "source_type": "t",
        "source_identity": "i",
        "effect": "no_op",
    }
    await waits.send(parked, idempotency_key="key")
    assert len([e for e in await engine.events(execution_id) if e.type == "signal"]) == 1
