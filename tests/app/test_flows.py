"""Flows: handles passed as arguments become edges, and results arrive typed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import date
from typing import Any, cast

import pytest

import flowfabric as ff
from flowfabric.core.errors import EngineError, NotFoundError, ValidationError
from tests.support.engine import Engine
from tests.support.flows import set_units
from tests.support.server import TestServer


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


@dataclass
class Holder:
    """An argument that is no list and no dict."""

    value: Any


@dataclass
class Photo:
    """What a task returns and another takes."""

    name: str
    taken: date


async def test_a_chain_passes_typed_results(app: ff.Fabric) -> None:
    @app.task
    async def shoot(name: str) -> Photo:
        return Photo(name, date(2026, 3, 1))

    @app.task
    def label(photo: Photo, suffix: str = "!") -> str:
        return f"{photo.name} {photo.taken.year}{suffix}"

    flow = app.flow("studio", tags={"app.order": "17"})
    photo = flow.add(shoot, "cat")
    flow.add(label, photo, suffix="?")
    async with app.worker():
        submitted = await flow.submit()
        assert await submitted.result(timeout=10) == "cat 2026?"
        assert await submitted.results() == {
            "shoot-1": Photo("cat", date(2026, 3, 1)),
            "label-1": "cat 2026?",
        }
    assert await submitted.run(photo).result() == Photo("cat", date(2026, 3, 1))
    graph = await submitted.graph()
    assert graph.state == "completed"
    assert [(e.frm, e.to, e.input_name) for e in graph.edges] == [("shoot-1", "label-1", "photo")]
    stored = await (await app.client()).describe_flow(submitted.id)
    assert stored is not None
    assert (stored.flow_kind, stored.tags) == ("studio", {"app.order": "17"})


async def test_handles_in_lists_and_dicts(app: ff.Fabric) -> None:
    @app.task
    def double(n: int) -> int:
        return 2 * n

    @app.task
    def show(parts: Any, named: dict[str, Any]) -> list[Any]:
        return [parts, named]

    flow = app.flow("test")
    one, two, three = flow.map(double, [1, 2, 3])
    flow.add("show", [one, 9, {"deep": (two, two)}], {"x": three, "y": "plain"})
    async with app.worker():
        found = await (await flow.submit()).result(timeout=10)
    assert found == [[2, 9, {"deep": [4, 4]}], {"x": 6, "y": "plain"}]


async def test_data_that_looks_like_a_reference_survives(app: ff.Fabric) -> None:
    """Whatever a user writes, only handles are replaced."""

    @app.task
    def every_byte() -> bytes:
        return bytes(range(256))

    @app.task
    def echo(data: dict[str, Any], raw: bytes) -> list[Any]:
        return [data, raw == bytes(range(256))]

    tricks = {
        "$input": "raw",
        "more": [{"$input'": "raw"}, {"$input": ["any", "raw"]}, '"$input":'],
    }
    flow = app.flow("test")
    raw = flow.add(every_byte)
    flow.add(echo, tricks, raw)
    async with app.worker():
        assert await (await flow.submit()).result(timeout=10) == [tricks, True]


async def test_map_and_gather(app: ff.Fabric) -> None:
    @app.task
    def add(n: int, by: int) -> int:
        return n + by

    @app.task
    def total(parts: list[int]) -> int:
        return sum(parts)

    flow = app.flow("test")
    first = flow.map(add, range(1000), by=1)
    flow.add(total, ff.gather(flow.map(add, first, by=0)))
    async with app.worker():
        assert await (await flow.submit()).result(timeout=60) == 500500


@pytest.mark.timeout(120)
async def test_a_graph_larger_than_one_call_runs_only_when_it_is_whole(app: ff.Fabric) -> None:
    @app.task
    def one(_n: int) -> int:
        return 1

    @app.task
    def total(parts: list[int]) -> int:
        return sum(parts)

    flow = app.flow("test")
    flow.add(total, ff.gather(flow.map(one, range(5100))))
    async with app.worker(batch=256, concurrency=256):
        submitted = await flow.submit()
        assert await submitted.result(timeout=90) == 5100
    again = await flow.submit()
    assert (again.id, again.duplicate, submitted.duplicate) == (submitted.id, True, False)


async def test_the_first_result_wins_and_the_others_are_cancelled(app: ff.Fabric) -> None:
    started = asyncio.Event()

    @app.task
    async def ask(model: str) -> str:
        if model == "slow":
            started.set()
            await asyncio.Event().wait()
        await started.wait()
        return f"answer of {model}"

    @app.task
    async def show(ctx: ff.Context, answer: str) -> list[str]:
        return [answer, str(ctx.inputs.fired_by)]

    flow = app.flow("race")
    slow, quick = flow.map(ask, ["slow", "quick"])
    flow.add(show, ff.any_of(slow, quick, on_satisfied="cancel_remaining"))
    async with app.worker(lease_ttl=1):
        submitted = await flow.submit()
        answer = await submitted.result(timeout=10)
        assert answer == ["answer of quick", submitted.run(quick).id]
    states = {key: node.state.value for key, node in (await submitted.graph()).nodes.items()}
    assert states == {"ask-1": "cancelled", "ask-2": "completed", "show-1": "completed"}


async def test_a_quorum_passes_the_results_that_satisfied_it(app: ff.Fabric) -> None:
    votes_in = asyncio.Event()

    @app.task
    async def vote(name: str) -> str:
        if name == "late":
            await votes_in.wait()
        return name

    @app.task
    async def decide(votes: list[str]) -> list[str]:
        votes_in.set()
        return votes

    flow = app.flow("test")
    flow.add(decide, ff.quorum(2, *flow.map(vote, ["a", "late", "c"])))
    async with app.worker():
        assert await (await flow.submit()).result(timeout=10) == ["a", "c"]


async def test_order_and_kinds(app: ff.Fabric) -> None:
    ran: list[str] = []

    @app.task
    async def work(name: str) -> str:
        if name == "bad":
            raise ValueError("broken")
        ran.append(name)
        return name

    @app.task
    async def report(text: str | None, other: str | None) -> list[str | None]:
        return [text, other]

    flow = app.flow("test")
    good, bad = flow.map(work, ["good", "bad"])
    flow.options(key="never", after=[bad]).add(work, "after success")
    flow.options(key="finally", after=[bad], kind="terminal").add(work, "after any end")
    flow.options(key="alarm", after=[bad], kind="failure_only").add(work, "after failure")
    flow.options(key="no alarm", after=good, kind="failure_only").add(work, "no failure")
    flow.options(key="report").add(report, bad.or_none, good.or_none)
    async with app.worker():
        submitted = await flow.submit()
        with pytest.raises(ff.FlowFailed) as caught:
            await submitted.result(timeout=10)
        assert await submitted.run("report").result() == [None, "good"]
    assert sorted(ran) == ["after any end", "after failure", "good"]
    assert list(caught.value.failures) == ["work-2"]
    assert caught.value.failures["work-2"].reason == "ValueError: broken"
    assert sorted(caught.value.skipped) == ["never", "no alarm"]
    assert "work-2: work failed after 1 attempt: ValueError: broken" in str(caught.value)
    assert "2 nodes skipped" in str(caught.value)


async def test_an_alarm_that_nothing_set_off_is_no_failure(app: ff.Fabric) -> None:
    @app.task
    async def work(name: str) -> str:
        return name

    flow = app.flow("test")
    done = flow.add(work, "done")
    flow.options(after=[done], kind="failure_only").add(work, "alarm")
    flow.add(work, done)
    async with app.worker():
        assert await (await flow.submit()).result(timeout=10) == {"work-3": "done"}


async def test_a_missing_result_that_the_parameter_refuses(app: ff.Fabric) -> None:
    @app.task
    async def fail() -> str:
        raise ValueError("broken")

    @app.task
    async def take(text: str) -> str:
        return text

    flow = app.flow("test")
    flow.add(take, cast("Any", flow.add(fail).or_none))
    async with app.worker():
        submitted = await flow.submit()
        with pytest.raises(ff.ExecutionFailed, match=r"Inputs without a result: 'text' failed"):
            await submitted.run("take-1").result(timeout=10)


async def test_several_exits_give_results_by_key(app: ff.Fabric) -> None:
    @app.task
    async def work(name: str) -> str:
        return name

    flow = app.flow("test")
    flow.options(key="left").add(work, "a")
    flow.options(key="right").add(work, "b")
    async with app.worker():
        submitted = await flow.submit()
        expected = {"left": "a", "right": "b"}
        assert await submitted.result(timeout=10) == expected
        assert await app.get_flow(submitted.id).result(timeout=10) == expected
        assert await app.get_flow(submitted.id).run("left").result() == "a"


async def test_cancelling_a_flow(app: ff.Fabric) -> None:
    running = asyncio.Event()

    @app.task
    async def forever(_after: Any = None) -> None:
        running.set()
        await asyncio.Event().wait()

    flow = app.flow("test")
    flow.add("forever", flow.add(forever))
    async with app.worker(lease_ttl=1):
        submitted = await flow.submit()
        await running.wait()
        with pytest.raises(ValidationError, match="policy: must be one of cancel_all"):
            await submitted.cancel("no", policy="all")  # pyright: ignore[reportArgumentType]
        await submitted.cancel("too expensive")
        with pytest.raises(ff.FlowFailed, match=r"was cancelled \(too expensive\)") as caught:
            await submitted.result(timeout=10)
    assert list(caught.value.failures) == ["forever-2"]
    assert (await submitted.graph()).cancelled


async def test_waiting_until_a_wide_flow_is_cancelled(app: ff.Fabric, engine: Engine) -> None:
    @app.task
    async def work(_n: int) -> None: ...

    def wide() -> Any:
        flow = app.flow("wide")
        flow.map(work, range(300))
        return flow.submit()

    outcome = await (await wide()).cancel("no", timeout="10s")
    assert (outcome.kind, len(outcome.member_execution_ids)) == ("cancelled", 300)
    await set_units(engine, 1)
    try:
        with pytest.raises(TimeoutError, match=r"did not end within the timeout\. The engine"):
            await (await wide()).cancel("no", timeout="1ms")
    finally:
        await set_units(engine)


async def test_watching_a_flow(app: ff.Fabric) -> None:
    go = asyncio.Event()

    @app.task
    async def work(name: str) -> str:
        await go.wait()
        if name == "bad":
            raise ValueError("broken")
        return name

    flow = app.flow("test")
    flow.add(work, flow.add(work, "bad"))
    submitted = await flow.submit()
    changes = submitted.watch()
    first = [await anext(changes), await anext(changes)]
    assert [each.state.value for each in first] == ["waiting", "waiting_children"]
    async with app.worker():
        go.set()
        seen = [(change.key, change.state.value) async for change in changes]
    assert seen == [("work-1", "active"), ("work-1", "failed"), ("work-2", "skipped")]
    after = [(change.key, change.state.value) async for change in submitted.watch()]
    assert after == [("work-1", "failed"), ("work-2", "skipped")]


async def test_a_flow_that_takes_too_long_says_why(app: ff.Fabric) -> None:
    @app.task
    async def work() -> None: ...

    flow = app.flow("test")
    flow.add(work)
    submitted = await flow.submit()
    told = r"Flow .* did not finish within 0.05 s. Its 1 node: 1 waiting"
    with pytest.raises(TimeoutError, match=told):
        await submitted.result(timeout=0.05)
    with pytest.raises(EngineError, match="flow_not_found"):
        await app.get_flow("00000000-0000-4000-8000-000000000000").result(timeout=5)


def test_flows_without_an_event_loop(engine: Engine, valkey: TestServer) -> None:
    app = ff.Fabric(valkey.url)

    @app.task
    def double(n: int) -> int:
        return 2 * n

    with ff.SyncFabric(app) as sync, app.worker():
        flow = sync.flow("test")
        one = flow.add(double, 1)
        flow.add(double, one)
        submitted = flow.submit()
        assert submitted.result(timeout=10) == 4
        assert submitted.run(one).result(timeout=10) == 2
        assert [change.state.value for change in submitted.watch()] == ["completed"] * 2
        assert sync.get_flow(submitted.id).graph().exits == ["double-2"]


REFUSED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda f, t: f.add(t), "double.. is missing the argument 'n'"),
    (lambda f, t: f.add(t, float("nan")), r"arguments\[0\]: is nan"),
    (lambda f, t: f.add(t, object()), "cannot be written as JSON"),
    (lambda f, t: f.add(t, Holder(f.add(t, 1))), "a node has no value before its flow runs"),
    (lambda f, t: f.add(t, {f.add(t, 1): 2}), "but not inside another object, as a dict key"),
    (lambda f, t: f.map(t, f.add(t, 1)), r"one node per item of a result, use ctx\.spawn"),
    (lambda f, t: f.map(t, 5), "items: must be a list, got int"),
    (lambda f, t: ff.gather(f.add(t, 1)), r"one node per item of a result, use ctx\.spawn"),
    (lambda f, t: ff.any_of(cast("Any", [f.add(t, 1)])), r"Unpack a list: any_of\(\*nodes\)"),
    (lambda f, t: f.add(t.options(idempotency_key="k"), 1), "nodes need no idempotency key"),
    (lambda f, t: [f.options(key="a").add(t, n) for n in (1, 2)], "'a' already names another node"),
    (lambda f, t: f.options(key="a").map(t, [1, 2]), "names one node"),
    (lambda f, t: f.options(after=[1]).add(t, 1), "must be a list of nodes"),
    (lambda f, t: f.options(after=3).add(t, 1), "must be a list of nodes, got int"),
    (lambda f, t: f.options(kind="always").add(t, 1), "kind: must be one of success_only"),
    (
        lambda _f, _t: cast("Any", ff.any_of()),
        r"must be nodes of the flow\. Pass what flow\.add\(\) returned",
    ),
    (lambda f, t: ff.quorum(2, f.add(t, 1)), "k: must be 1 to 1"),
    (lambda f, t: cast("Any", ff).quorum([f.add(t, 1)]), r"Pass k first.*quorum\(2, \*nodes\)"),
    (lambda f, t: f.add(t, 1, after=[]), r"no parameter 'after'.* flow\.options\(after=…\)\.add"),
    (
        lambda f, t: ff.any_of(f.add(t, 1), on_satisfied=cast("Any", "stop")),
        "cancel_remaining or let_run",
    ),
    (lambda f, t: ff.any_of(*[f.add(t, 1)] * 2), "one of them is passed twice"),
    (lambda _f, _t: ff.gather(cast("Any", [1])), "must be nodes; one item is a int"),
    (
        lambda f, t: f.options(after=[f.add(t, 1)]).add(t, ff.any_of(f.add(t, 2))),
        r"has an any_of\(\) or quorum\(\) and cannot depend on other nodes",
    ),
]


@pytest.mark.parametrize(("build", "words"), REFUSED)
def test_what_cannot_be_a_node_is_refused_at_once(build: Any, words: str) -> None:
    app = ff.Fabric()

    @app.task
    def double(n: int) -> int:
        return 2 * n

    with pytest.raises(ValidationError, match=words):
        build(app.flow("test"), double)


async def test_flows_that_cannot_be_submitted(app: ff.Fabric) -> None:
    @app.task
    def double(n: int) -> int:
        return 2 * n

    with pytest.raises(ValidationError, match="The flow has no nodes"):
        await app.flow("test").submit()
    with pytest.raises(ValidationError, match="is a node of another flow"):
        app.flow("test").add(double, app.flow("test").add(double, 1))
    with pytest.raises(TypeError, match="There is no option 'afer'"):
        app.flow("test").options(afer=[])  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValidationError, match="kind: must not be empty"):
        app.flow("")
    flow = app.flow("test")
    node = flow.add(double, 1)
    for use in (lambda: f"{node}", lambda: bool(node)):
        with pytest.raises(TypeError, match="no value before its flow runs"):
            use()
    value = cast("Any", node)
    with pytest.raises(AttributeError, match=r"await submitted\.run\(node\)\.result\(\)"):
        value.result()
    for submitting in (app.submit(double, value), double.submit(value)):
        with pytest.raises(ValidationError, match="a node has no value before its flow runs"):
            await submitting
    submitted = await flow.submit()
    with pytest.raises(ValidationError, match=r"flow: was submitted\. Build another one"):
        flow.add(double, 2)
    with pytest.raises(ValidationError, match="is a node of another flow"):
        submitted.run(app.flow("test").add(double, 1))
    with pytest.raises(NotFoundError, match=f"node double-9 of flow {submitted.id}"):
        await submitted.run("double-9").state()
    again = await flow.submit()
    assert (again.id, again.duplicate) == (submitted.id, True)
    other = app.flow("test", flow_id=submitted.id)
    other.add(double, 2)
    with pytest.raises(EngineError, match="flow_submission_conflict"):
        await other.submit()


async def test_a_cancelled_flow_is_found_again(app: ff.Fabric) -> None:
    """A program that starts again submits the same flow, however many calls that takes."""

    @app.task
    def double(n: int) -> int:
        return 2 * n

    def built(flow_id: str | None = None) -> Any:
        flow, part = app.flow("test", flow_id=flow_id), app.flow("part")
        part.add(double, 1)
        flow.subflow(part, after=flow.map(double, range(1001)))
        return flow

    first = await built().submit()
    await first.cancel("enough", timeout=30)
    again = await built(first.id).submit()
    assert again.duplicate
    with pytest.raises(ff.FlowFailed, match=r"was cancelled \(enough\)"):
        await again.result(timeout=10)
