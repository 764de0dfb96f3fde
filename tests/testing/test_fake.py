"""Handlers run in the test itself, with a context that records and answers."""

from __future__ import annotations

import pytest

import flowfabric as ff
from flowfabric.testing import FakeContext, FakeSyncContext, UnansweredWait

app = ff.Fabric()


@app.task
async def deploy(ctx: ff.Context, version: str) -> str:
    await ctx.progress(10, "built")
    await ctx.stream(f"deploying {version}\n")
    async with ctx.open_stream("log") as log:
        await log.write({"team": ctx.tags["team"]})
    verdict = await ctx.wait_for("approval", ["approved", "rejected"], timeout="1h", prompt="Go?")
    assert [each.name for each in await ctx.signals()] == [verdict.name]
    return f"{verdict.name} by {verdict.source_identity}" if ctx.lease_healthy else ""


@app.task
def count(ctx: ff.SyncContext, words: list[str]) -> int:
    with ctx.open_stream("log") as log:
        log.write("counting")
    ctx.progress(100)
    try:
        return len(words) if ctx.wait_for("go").name == "now" else ctx.attempt
    except ff.WaitTimeout:
        return -1


def approved_by(name: str) -> ff.Signal:
    return ff.Signal(name="approved", source_identity=name, source_type="operator")


async def test_what_a_handler_did() -> None:
    ctx = FakeContext({"approval": approved_by("ada")}, tags={"team": "web"})
    assert await deploy(ctx, "1.2") == "approved by ada"
    assert ctx.reports == [(10, "built")]
    assert [frame.name for frame in ctx.frames] == ["delta", "log"]
    assert ctx.output == 'deploying 1.2\n{"team":"web"}'
    assert (ctx.waits, ctx.prompts) == (["approval"], ["Go?"])


def test_without_await() -> None:
    ctx = FakeSyncContext({"go": "now"})
    assert count(ctx, ["a", "b"]) == 2
    assert (ctx.reports, ctx.output, ctx.waits) == ([(100, None)], "counting", ["go"])
    assert count(FakeSyncContext({"go": "later"}, attempt=4), []) == 4
    assert count(FakeSyncContext({"go": None}), []) == -1


async def test_each_wait_needs_an_answer() -> None:
    ctx = FakeContext(tags={"team": "web"})
    with pytest.raises(UnansweredWait, match=r"waits for 'approval', and answers= has none"):
        await deploy(ctx, "1.2")
    ctx = FakeContext({"approval": "later"}, tags={"team": "web"})
    with pytest.raises(UnansweredWait, match=r"only 'later', which does not end the wait"):
        await deploy(ctx, "1.2")


async def test_several_waits_of_one_name() -> None:
    ctx = FakeContext({"step": ["one", "two", None]})
    assert [(await ctx.wait_for("step")).name for _ in range(2)] == ["one", "two"]
    assert await ctx.wait_for("step", on_timeout="default", default=3) == 3


async def test_conditions_over_several_waitpoints() -> None:
    both = ff.AllOf((ff.Single("legal", "approved"), ff.Single("finance", "approved")))
    ctx = FakeContext({"legal": "approved", "finance": "approved"})
    assert [each.name for each in await ctx.wait_condition(both)] == ["approved", "approved"]
    two = ff.Count(n=2, waitpoints=("approval",), count_kind=ff.CountKind.DISTINCT_SOURCES)
    people = [approved_by("ada"), approved_by("ada"), approved_by("bob")]
    signals = await FakeContext({"approval": people}).wait_condition(two)
    assert [each.source_identity for each in signals] == ["ada", "bob"]
    assert await FakeContext().wait_condition(ff.TimeoutOnly()) == []


async def test_a_waitpoint_to_hand_out() -> None:
    ctx = FakeContext({"reply": "yes"})
    handed_out = await ctx.waitpoint("reply")
    assert handed_out.waitpoint_key == "reply"
    assert (await ctx.wait_for("reply")).name == "yes"


async def test_a_context_is_independent_of_others() -> None:
    first, second = FakeContext(), FakeContext()
    assert first.execution_id != second.execution_id
    assert not first.shutting_down
    first.check()


@app.task
async def crawl(ctx: ff.Context, site: str) -> list[int]:
    assert ctx.flow_id is not None
    children = ctx.spawn()
    children.map(count_words, [f"{site}/1", f"{site}/2"])
    children.options(key="index").add(count_words, site)
    found = await children.results()
    before = ctx.inputs.get("before", int)
    return [*found.values(), -1 if before is None else before]


@app.task
def count_words(page: str) -> int:
    return len(page)


@app.task
def sum_up(ctx: ff.SyncContext) -> int:
    children = ctx.spawn()
    children.add(count_words, "a")
    return children.results()["count_words_1"] + ctx.inputs["first"]


async def test_results_of_other_nodes_are_given() -> None:
    results = {"count_words_1": 1, "count_words_2": 2, "index": 3}
    ctx = FakeContext(inputs={"before": 4}, children=results)
    assert await crawl(ctx, "x") == [1, 2, 3, 4]
    assert ctx.spawned == ["count_words_1", "count_words_2", "index"]
    failed = FakeContext(inputs={"before": None}, children=results)
    assert await crawl(failed, "x") == [1, 2, 3, -1]
    assert failed.inputs.outcome("before") == "failed"
    assert sum_up(FakeSyncContext(inputs={"first": 1}, children={"count_words_1": 2})) == 3


async def test_each_child_needs_a_result() -> None:
    with pytest.raises(UnansweredWait, match="waits for the child 'count_words_1'"):
        await crawl(FakeContext(children={}), "x")
    with pytest.raises(ff.FlowFabricError, match=r"Submit the task with app\.flow"):
        sum_up(FakeSyncContext())


@app.task
async def spend(ctx: ff.Context) -> None:
    await ctx.usage("team", tokens=5)
    async with ctx.reserve("team", tokens=10) as hold:
        await hold.settle(tokens=3)
    async with ctx.reserve("team", tokens=10):
        pass
    async with ctx.reserve("team", tokens=10) as hold:
        await hold.release()


@app.task
def spend_sync(ctx: ff.SyncContext) -> str:
    with ctx.reserve("team", tokens=10) as hold:
        hold.settle(tokens=3)
    return ctx.usage("team", calls=1).kind


async def test_what_a_handler_spent() -> None:
    ctx = FakeContext()
    await spend(ctx)
    assert ctx.spent == [
        ("team", {"tokens": 5}),
        ("team", {"tokens": 3}),
        ("team", {"tokens": 10}),
    ]


def test_what_a_def_handler_spent() -> None:
    ctx = FakeSyncContext()
    assert spend_sync(ctx) == "ok"
    assert ctx.spent == [("team", {"tokens": 3}), ("team", {"calls": 1})]
