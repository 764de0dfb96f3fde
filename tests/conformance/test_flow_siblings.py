"""Upstreams that a decided join no longer needs (08 B2, §8, §21.3)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.flows import AnyOf, JoinPolicy, OnSatisfied, Quorum
from tests.support.engine import Engine
from tests.support.flows import TestFlow, drained, set_units, submitted

FIVE = "a>z b>z c>z d>z e>z"
# What each join needs to be decided: the policy of (k, n), and the ends that decide it last.
DECIDING = {
    ("any", "satisfied"): ("success",),
    ("any", "impossible"): ("failed",) * 5,
    ("quorum", "satisfied"): ("failed", "success", "success", "success"),
    ("quorum", "impossible"): ("success", "failed", "failed", "failed"),
}


def policy(name: str, ending: OnSatisfied) -> JoinPolicy:
    return AnyOf(ending) if name == "any" else Quorum(3, ending)


async def join_of(flow: TestFlow, key: str = "z") -> Any:
    groups = (await flow.snapshot()).edge_groups
    return next(each for each in groups if each.downstream_execution_id == flow.nodes[key])


@pytest.mark.parametrize("ending", ["cancel_remaining", "let_run"])
@pytest.mark.parametrize(("name", "decided"), list(DECIDING))
async def test_what_a_decided_join_does_with_the_others(
    engine: Engine, name: str, decided: str, ending: OnSatisfied
) -> None:
    flow = await submitted(engine, FIVE, {"z": policy(name, ending)})
    await flow.claim()
    ends = DECIDING[name, decided]
    for key, end in zip("abcde", ends, strict=False):
        assert await flow.state("z") == "waiting_children"
        await flow.end(key, end)
    assert await flow.state("z") == ("waiting" if decided == "satisfied" else "skipped")
    left = "abcde"[len(ends) :]
    for key in left:
        info = await engine.backend.reads.read_execution_info(flow.nodes[key])
        if ending == "let_run":
            assert info.public_state == "active"
        else:
            told = (info.public_state.value, info.cancelled_by, info.cancellation_reason)
            assert told == ("cancelled", "flow_cascade", f"sibling_quorum_{decided}")
    join = await join_of(flow)
    assert (join.group_state, join.total_deps) == (decided, 5)
    if ending == "cancel_remaining":
        assert join.running_count == 0
        assert join.failed_count == ends.count("failed") + len(left)


@pytest.mark.parametrize("end", ["success", "failed"])
async def test_what_ends_after_the_decision_moves_counters_alone(engine: Engine, end: str) -> None:
    flow = await submitted(engine, FIVE, {"z": AnyOf("let_run")})
    await flow.claim()
    await flow.end("b")
    assert (await engine.backend.flows.get_inputs(flow.nodes["z"])).fired_by == flow.nodes["b"]
    await flow.end("a", end)
    await flow.end("c", end)
    join = await join_of(flow)
    good = 3 if end == "success" else 1
    assert (join.group_state, join.satisfied_count, join.failed_count) == (
        "satisfied",
        good,
        3 - good,
    )
    assert (await engine.backend.flows.get_inputs(flow.nodes["z"])).fired_by == flow.nodes["b"]
    assert await flow.claim() == ["z"]
    await flow.end("z")
    await flow.end("d")
    events = [event.type for event in await engine.events(flow.nodes["z"])]
    assert events.count("completion") == 1


async def test_one_of_a_hundred_ends_the_others_in_the_same_call(engine: Engine) -> None:
    flow = await submitted(
        engine, " ".join(f"u{n}>z" for n in range(100)), {"z": Quorum(1, "cancel_remaining")}
    )
    await flow.claim()
    completed = await engine.backend.executions.complete(flow.claims["u42"].handle)
    assert completed.cascade is not None
    assert completed.cascade.cancelled == 99
    assert await flow.recount() == {"completed": 1, "cancelled": 99, "waiting": 1}


async def test_siblings_that_others_wait_for_may_be_spared(engine: Engine) -> None:
    joins = {"z": AnyOf("cancel_remaining", spare_shared=True), "y": AnyOf("cancel_remaining")}
    flow = await submitted(engine, "a>z b>z c>z b>other c>done d>done c>y d>y", joins)
    await flow.claim()
    await flow.end("d")
    # The end of d decided y and with it c: whoever waits for c is told, spared or not.
    assert await flow.state("c") == "cancelled"
    await flow.end("a")
    assert await flow.states() == {
        "a": "completed",
        "b": "active",
        "c": "cancelled",
        "d": "completed",
        "z": "waiting",
        "y": "waiting",
        "other": "waiting_children",
        "done": "skipped",
    }


async def test_spared_siblings_hold_up_nothing(engine: Engine) -> None:
    """Each call has room for fewer siblings than are spared before the one that is cancelled."""
    joins = {"z": AnyOf("cancel_remaining", spare_shared=True)}
    shared = " ".join(f"{key}>z {key}>other" for key in "bcde")
    flow = await submitted(engine, f"a>z {shared} last>z", joins)
    await set_units(engine, 2)
    await flow.end("a")
    await drained(engine, flow.tag)
    assert await flow.state("last") == "cancelled"
    assert {await flow.state(key) for key in "bcde"} == {"active"}


async def test_a_sibling_that_only_ended_members_wait_for_is_not_spared(engine: Engine) -> None:
    flow = await submitted(
        engine, "a>z b>z b>other", {"z": AnyOf("cancel_remaining", spare_shared=True)}
    )
    await flow.end("other", "cancelled")
    await flow.end("a")
    assert await flow.state("b") == "cancelled"
