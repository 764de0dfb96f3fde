"""Calls that type checkers must reject, each marked `# error`, and types that they must infer.

Never run. `test_types.py` compares what the checkers report with the marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import flowfabric as ff
from flowfabric import testing
from flowfabric.core.contracts.flows import CancelFlowOutcome
from flowfabric.core.contracts.streams import StreamedFrame
from flowfabric.core.contracts.suspension import PendingWaitpoint
from flowfabric.core.state import PublicState

app = ff.Fabric()
ff.Fabrik()  # error
testing.Klock()  # error


@app.task
async def greet(name: str, times: int = 1) -> str:
    return name * times


@app.task(lane="mail", retry=3)
async def ask(ctx: ff.Context, question: str) -> bool:
    assert_type(await ctx.wait_for("approval", prompt="Go?", details={"a": 1}), ff.Signal)
    assert_type(await ctx.wait_for("a", timeout=1, on_timeout="default"), ff.Signal | None)
    assert_type(await ctx.wait_for("a", on_timeout="default", default=3), ff.Signal | int)
    assert_type(await ctx.wait_condition(ff.Single("a")), list[ff.Signal])
    assert_type(await ctx.signals(), list[ff.Signal])
    assert_type((await ctx.wait_for("approval")).payload_as(dict[str, int]), dict[str, int])
    assert_type(await ctx.waitpoint("a"), PendingWaitpoint)
    async with ctx.open_stream() as output:
        await output.write(question)
        output.write(question)  # error
    ctx.progress(50)  # error
    ctx.stream("token")  # error
    await ctx.progress("half")  # error
    await ctx.wait_for(1)  # error
    await ctx.wait_for("a", prompt=1)  # error
    await ctx.wait_for("a", promt="Go?")  # error
    await ctx.wait_for("a", default=3)  # error
    answer = ctx.wait_for("a")
    return answer.name == "approved"  # error


@app.task("shrink")
def resize(image: str, *, priority: int) -> bytes:
    return image.encode() * priority


@app.task
def count(ctx: ff.SyncContext, words: list[str]) -> int:
    assert_type(ctx.wait_for("approval", prompt="Go?", details={"a": 1}), ff.Signal)
    assert_type(ctx.wait_for("a", timeout=1, on_timeout="default"), ff.Signal | None)
    assert_type(ctx.wait_for("a", on_timeout="default", default=3), ff.Signal | int)
    assert_type(ctx.wait_condition(ff.Single("a")), list[ff.Signal])
    assert_type(ctx.signals(), list[ff.Signal])
    assert_type(ctx.waitpoint("a"), PendingWaitpoint)
    with ctx.open_stream() as output:
        output.write(words)
    ctx.progress(50, "half way")
    ctx.progress("half")  # error
    ctx.wait_for(1)  # error
    ctx.stream("token", frame=1)  # error
    return len(words)


async def submit(ctx: ff.Context, sync_ctx: ff.SyncContext) -> None:
    assert_type(await greet.submit("Ada", times=2), ff.Run[str])
    assert_type(await app.submit(greet, "Ada"), ff.Run[str])
    assert_type(await (await ask.submit("why?")).result(), bool)
    assert_type(await app.submit(resize.options(priority=1), "cat.png", priority=2), ff.Run[bytes])
    assert_type(await app.submit_many(count, [[["a"]]]), list[ff.Run[int]])
    assert_type(await app.submit("greet", 1, 2, 3), ff.Run[Any])
    assert_type(await app.named("greet", delay="1m").submit(1, x=2), ff.Run[Any])
    assert_type(app.get_run("id", greet), ff.Run[str])
    await greet.submit(1)  # error
    await greet.submit()  # error
    await greet.submit("Ada", 1, 2)  # error
    await greet.submit("Ada", tmies=2)  # error
    await greet.options(priority=1).submit(1)  # error
    await greet.options(prioritiy=1).submit("Ada")  # error
    await greet.options(priority="high").submit("Ada")  # error
    await app.submit(greet, 1)  # error
    await app.submit(greet)  # error
    await app.submit(greet, "Ada", 1, 2)  # error
    await app.submit(greet, "Ada", tmies=2)  # error
    await app.submit(greet.options(delay="1m"), 1)  # error
    await app.submit(ask, ctx, "why?")  # error
    await app.submit(len, "Ada")  # error
    await app.submit(resize, "cat.png", priority="high")  # error
    await app.submit_many(greet, 5)  # error
    app.named("greet", delay=object())  # error
    app.task(timeot=3)  # error
    app.task(retry="3")  # error
    app.task(retry=ff.Retry(3, on=(OSError, "httpx.ConnectError"), never=ValueError))
    ff.Retry(3, on=5)  # error
    ff.Retry(3, never=(int,))  # error
    greet.options(at="tomorrow")  # error
    assert_type(await greet("Ada"), str)
    assert_type(await ask(ctx, "why?"), bool)
    assert_type(resize("cat.png", priority=1), bytes)
    assert_type(count(sync_ctx, ["a"]), int)
    greet("Ada")  # error
    await ask("why?")  # error
    count(["a"])  # error
    greet("Ada").upper()  # error


async def use_the_testing_kit(fabric: testing.TestFabric, sync: testing.SyncTestFabric) -> None:
    assert_type(fabric.use(app), ff.Fabric)
    assert_type(await fabric.drain(timeout="5s"), list[testing.Ended])
    assert_type(sync.use(app), ff.SyncFabric)
    assert_type(sync.drain(), list[testing.Ended])
    assert_type(await ask(testing.FakeContext({"approval": "approved"}), "why?"), bool)
    assert_type(count(testing.FakeSyncContext({"a": None}), ["a"]), int)
    fabric.use("app")  # error
    fabric.clock.advance(object())  # error
    fabric.crash_at(ff.Context, "progress", when="during")  # error
    testing.FakeContext({"approval": 5})  # error
    await ask(testing.FakeSyncContext(), "why?")  # error


def submit_and_block(client: ff.SyncClient) -> None:
    with ff.SyncFabric(app) as sync:
        run = sync.submit(greet, "Ada")
        assert_type(run, ff.SyncRun[str])
        assert_type(run.result(timeout="5s"), str)
        assert_type(run.state(), PublicState)
        assert_type(run.stream(), Iterator[StreamedFrame])
        assert_type(next(run.stream()).json(list[str]), list[str])
        assert_type(sync.submit_many(count, [[["a"]]]), list[ff.SyncRun[int]])
        assert_type(sync.get_run("id", greet), ff.SyncRun[str])
        sync.submit(greet, 1)  # error
        sync.submit(greet)  # error
        sync.submit(greet, "Ada", tmies=2)  # error
        sync.submit(greet.options(priority=1), 1)  # error
        sync.worker(lanes=5)  # error
        run.result(timeout=object())  # error
        run.cancel(5)  # error
        run.signal("a", "b", sender="c")  # error
        run.result().append("x")  # error
        sync.client().inspect(5)  # error
    assert_type(client.result(run.id, timeout=1), bytes | None)
    client.submit(1)  # error
    client.submit("greet", lame="default")  # error
    client.wait(run.id, timeout=object())  # error
    for event in client.subscribe_lease_history(where=5):  # error
        del event


async def flows() -> None:
    flow = app.flow("kind", tags={"a.b": "c"})
    text = flow.add(greet, "Ada")
    assert_type(text, ff.Node[str])
    assert_type(flow.add(greet, text), ff.Node[str])
    assert_type(flow.add(greet, text, times=2), ff.Node[str])
    assert_type(flow.map(greet, ["Ada", "Grace"], times=2), list[ff.Node[str]])
    assert_type(flow.map(greet, [text]), list[ff.Node[str]])
    assert_type(flow.add(count, ff.gather([text])), ff.Node[int])
    assert_type(flow.add(count, words=ff.quorum(1, text).value), ff.Node[int])
    assert_type(flow.add(greet, ff.any_of(text)), ff.Node[str])
    assert_type(text.or_none, ff.FutureValue[str | None])
    flow.add(greet, flow.add(count, ["a"]))  # error
    flow.add(greet, text.or_none)  # error
    flow.add(greet, 1)  # error
    flow.add(greet)  # error
    flow.map(greet, [1])  # error
    ff.any_of(text, on_satisfied="stop")  # error
    flow.options(afer=[text])  # error
    flow.options(kind="always")  # error
    flow.map(greet, text)  # error
    ff.gather(text)  # error
    ff.quorum("2", text)  # error
    ff.any_of([text])  # error
    assert_type(flow.subflow(app.flow("inner"), after=[text]), ff.Node[Any])
    flow.subflow("inner")  # error
    submitted = await flow.submit()
    assert_type(await submitted.run(text).result(), str)
    assert_type(await submitted.results(), dict[str, Any])
    assert_type(await submitted.cancel("why", policy="cancel_pending"), CancelFlowOutcome)
    await submitted.cancel(policy="now")  # error
    submitted.run(5)  # error
    submitted.result().upper()  # error
    async for change in submitted.watch():
        assert_type(change, ff.NodeChange)


async def budgets(client: ff.Client) -> None:
    await client.create_budget("team", {"tokens": 1}, on_hard_limit="suspend", mode="warn")
    await client.create_budget("team", {"tokens": 1}, on_hard_limit="stop")  # error
    await client.update_budget("team", mode="soft")  # error
    await client.update_budget("team", on_soft_limit="fail")  # error


async def children(ctx: ff.Context, sync_ctx: ff.SyncContext) -> None:
    spawned = ctx.spawn()
    assert_type(spawned.map(greet, ["Ada"]), list[ff.Node[str]])
    assert_type(spawned.options(key="a").add(count, ["a"]), ff.Node[int])
    assert_type(await spawned.results(), dict[str, Any])
    assert_type(sync_ctx.spawn().results(), dict[str, Any])
    assert_type(ctx.inputs.get("text", str), str | None)
    assert_type(await greet("Ada"), str)
    spawned.results()["greet_1"]  # error
    spawned.add(greet, 1)  # error
    ctx.inputs.get("text", "str")  # error
    testing.FakeContext(inputs={"text": "Ada"}, children={"greet_1": "Ada"})
    testing.FakeContext(inputs=["Ada"])  # error


def flows_without_await(sync: ff.SyncFabric) -> None:
    flow = sync.flow("kind")
    text = flow.add(greet, "Ada")
    submitted = flow.submit()
    assert_type(submitted.run(text).result(timeout=1), str)
    assert_type(submitted.results(), dict[str, Any])
    assert_type(sync.get_flow(submitted.id), ff.SyncFlow)
    for change in submitted.watch():
        assert_type(change, ff.NodeChange)
    flow.add(greet, 1)  # error
    submitted.cancel(policy="now")  # error
