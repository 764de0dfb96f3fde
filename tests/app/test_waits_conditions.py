"""What a wait for a condition returns is what the engine says has met it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.core.conditions import (
    AcceptedSignal,
    AllOf,
    Condition,
    Count,
    CountKind,
    Single,
    contributors,
    satisfied,
)
from tests.support.engine import Engine
from tests.support.waiting import parked

KEYS = ("a", "b")
NAMES = ("yes", "no")
PEOPLE = ("ada", "eve")

_leaves = st.one_of(
    st.builds(Single, st.sampled_from(KEYS), st.sampled_from((*NAMES, NAMES, None))),
    st.builds(
        Count,
        n=st.integers(1, 2),
        waitpoints=st.just(KEYS),
        count_kind=st.sampled_from(CountKind),
        signal_name=st.sampled_from((*NAMES, None)),
    ),
)
conditions = st.recursive(
    _leaves, lambda inner: st.builds(AllOf, st.lists(inner, min_size=1, max_size=3).map(tuple))
)
accepted = st.lists(
    st.builds(
        AcceptedSignal,
        st.uuids().map(str),
        st.sampled_from(KEYS),
        st.sampled_from(NAMES),
        st.just("person"),
        st.sampled_from(PEOPLE),
    ),
    max_size=8,
    unique_by=lambda seen: seen.signal_id,
)


@given(conditions, accepted)
def test_contributors_are_just_enough_and_in_order(
    condition: Condition, seen: list[AcceptedSignal]
) -> None:
    met = contributors(condition, seen)
    assert bool(met) == satisfied(condition, seen)
    if met:
        rest = iter(seen)
        assert all(one in rest for one in met)
        assert satisfied(condition, met)
        assert not satisfied(condition, met[:-1])


@pytest.mark.parametrize(
    "condition",
    [
        AllOf((Single("a", "yes"), Single("b"))),
        AllOf((Single("a"), AllOf((Single("b", "no"), Single("a", "yes"))))),
        AllOf((Single("a", NAMES), Count(n=2, waitpoints=KEYS))),
        Count(n=2, waitpoints=KEYS, count_kind=CountKind.DISTINCT_SOURCES, signal_name="yes"),
        AllOf(
            (
                Count(n=2, waitpoints=("a",), count_kind=CountKind.DISTINCT_SIGNALS),
                Count(n=2, waitpoints=KEYS, count_kind=CountKind.DISTINCT_SOURCES),
            )
        ),
    ],
    ids=str,
)
async def test_the_engine_agrees(
    waiting_app: ff.Fabric, engine: Engine, condition: Condition
) -> None:
    app = waiting_app

    @app.task()
    async def ask(ctx: ff.Context) -> list[list[str]]:
        met = await ctx.wait_condition(condition)
        said = await ctx.signals()
        return [[signal.signal_id for signal in found] for found in (met, said)]

    rng = random.Random(str(condition))
    async with app.worker(scanners=False):
        run: ff.Run[Any] = await app.submit(ask)
        entry = await parked(engine, run)
        page = await engine.backend.waitpoints.list_pending_waitpoints(run.id)
        keys = [entry.waitpoint_key for entry in page.entries]
        for _ in range(100):
            outcome: Any = await run.signal(
                rng.choice(keys), rng.choice(NAMES), by=rng.choice(PEOPLE)
            )
            # Signals of one millisecond on two waitpoints have no order.
            await engine.advance(1)
            if outcome.resumed:
                break
        ours, engines = await run.result(10)
    assert entry.execution_id == run.id
    assert ours == engines != []
