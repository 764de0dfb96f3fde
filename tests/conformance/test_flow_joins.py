"""Joins decide as a small model says, whatever the order in which their upstreams end."""

from __future__ import annotations

import itertools

import pytest

from flowfabric.core.contracts.flows import AnyOf, JoinAll, JoinPolicy, Quorum
from tests.support.engine import Engine
from tests.support.flows import submitted

ENDS = ("success", "failed", "cancelled")


def expected(policy: JoinPolicy, ends: tuple[str, ...]) -> str:
    """The child's state after these ends, in this order."""
    good = bad = 0
    n = len(ends)
    k = {JoinAll: n, AnyOf: 1}.get(type(policy)) or policy.k  # type: ignore[union-attr]
    for end in ends:
        good += end == "success"
        bad += end != "success"
        if good >= k:
            return "waiting"
        if bad > n - k:
            return "skipped"
    raise AssertionError("undecided")


@pytest.mark.parametrize("ends", list(itertools.product(ENDS, repeat=3)))
@pytest.mark.parametrize("policy", [JoinAll(), AnyOf("let_run"), Quorum(2, "let_run")])
async def test_a_join_of_three(engine: Engine, policy: JoinPolicy, ends: tuple[str, ...]) -> None:
    flow = await submitted(engine, "a>z b>z c>z z>after", {"z": policy})
    assert await flow.claim() == ["a", "b", "c"]
    for key, end in zip("abc", ends, strict=True):
        await flow.end(key, end)
    want = expected(policy, ends)
    assert await flow.state("z") == want
    assert await flow.state("after") == ("waiting_children" if want == "waiting" else "skipped")
    snapshot = await flow.snapshot()
    assert snapshot.members == await flow.recount()
    if want == "waiting":
        await flow.end("z")
        await flow.end("after")
    done = await flow.snapshot()
    assert done.finished_at is not None
    assert done.derived_state == ("failed" if set(ends) - {"success"} else "completed")


async def test_a_chain_moves_with_each_completion(engine: Engine) -> None:
    flow = await submitted(engine, "a>b>c>d>e", input_name="before")
    for key in "abcde":
        assert await flow.claim() == [key]
        if key != "a":
            (name, given), *_ = flow.claims[key].inputs.inputs.items()
            assert (name, given.result) == ("before", chr(ord(key) - 1).encode())
        await flow.end(key, result=key.encode())
    assert (await flow.snapshot()).derived_state == "completed"


async def test_the_first_of_a_race_cancels_the_others(engine: Engine) -> None:
    flow = await submitted(engine, "a>z b>z c>z", {"z": AnyOf("cancel_remaining")})
    await flow.claim()
    await flow.end("b")
    assert await flow.states() == {
        "a": "cancelled",
        "b": "completed",
        "c": "cancelled",
        "z": "waiting",
    }


async def test_a_flow_is_cancelled_with_all_members(engine: Engine) -> None:
    flow = await submitted(engine, "a>b>c d")
    await flow.claim()
    outcome = await engine.backend.flows.cancel_flow(flow.flow_id, "no longer needed")
    assert outcome.kind == "cancelled"
    assert set((await flow.states()).values()) == {"cancelled"}


async def test_a_large_fan_out_needs_few_calls(engine: Engine) -> None:
    flow = await submitted(engine, " ".join(f"root>n{i} n{i}>end" for i in range(300)))
    assert await flow.claim() == ["root"]
    await flow.end("root")
    snapshot = await flow.snapshot()
    calls = 1
    while (await engine.backend.flows.drain_cascade(flow.nodes["root"].partition)).pending:
        calls += 1
    assert calls <= 3
    snapshot = await flow.snapshot()
    assert snapshot.members == {"completed": 1, "waiting": 300, "waiting_children": 1}
