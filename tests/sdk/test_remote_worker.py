"""A worker that is connected to a server: it claims, renews and completes over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest

from flowfabric.app.context import Context
from flowfabric.app.fabric import Fabric
from flowfabric.core.contracts.budgets import NewBudget
from flowfabric.core.contracts.executions import TerminalFailed
from flowfabric.core.contracts.steps import AlreadyRecorded, StepOutcome
from flowfabric.core.errors import AuthError, ConfigError, EngineError, PermanentError
from flowfabric.core.ids import budget_id
from flowfabric.core.state import PublicState
from flowfabric.engine import metrics
from flowfabric.engine.api.executions import Completion, FailedAttempt
from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.backend import HttpBackend
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.runtime import RunSummary
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import config, info, serving, state, submit, until
from tests.support.server import TestServer
from tests.support.suspension import SECRET

MakeRemote = Callable[..., Awaitable[Worker]]


def address_of(place: tuple[str, int]) -> ServerAddress:
    return ServerAddress(host=place[0], port=place[1])


async def started(engine: Engine, port: int = 0) -> ServerProcess:
    settings = ServerConfig(listen=("127.0.0.1", port), shutdown_timeout_s=5)
    process = ServerProcess(engine.backend, settings)
    await process.listen()
    return process


@pytest.fixture
async def server(engine: Engine) -> AsyncIterator[ServerProcess]:
    process = await started(engine)
    yield process
    await process.stop_serving()


@pytest.fixture
async def make_remote(server: ServerProcess) -> AsyncIterator[MakeRemote]:
    """Connects workers to the server, or to what stands in front of it."""
    made: list[Worker] = []

    async def make(place: tuple[str, int] | None = None, **settings: Any) -> Worker:
        connect = partial(HttpBackend.connect, address_of(place or server.address))
        worker = await Worker.connect(config(**settings), connect)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        await worker.aclose()
    assert [t.name for t in threading.enumerate() if t.name == "ff-lease-keeper"] == []


async def test_it_runs_tasks(engine: Engine, make_remote: MakeRemote) -> None:
    ids = await submit(engine.backend, 300, input_payload=b"[1]")
    worker = await make_remote(max_concurrent_tasks=64)

    async def handler(task: ClaimedTask) -> bytes:
        return task.input_payload + b"!"

    async with serving(worker, {"job": handler}) as runtime:
        await until(lambda: runtime.summary.completed == 300, "300 results", 30)
        # It now waits for work.
        await submit(engine.backend)
        await until(lambda: runtime.summary.completed == 301, "one more")
    assert runtime.summary == RunSummary(completed=301)
    assert await engine.backend.reads.get_execution_result(ids[-1]) == b"[1]!"


async def test_it_fails_tasks_and_takes_the_next_in_one_call(
    engine: Engine, make_remote: MakeRemote
) -> None:
    ids = await submit(engine.backend, 20, policy={"retry_policy": {"max_retries": 1}})
    worker = await make_remote(max_concurrent_tasks=1)
    sent: list[str] = []
    link = cast("HttpBackend", worker.backend).link
    original = link.call

    def counted(method: str, path: str, *args: Any, **options: Any) -> Any:
        sent.append(path.partition("?")[0])
        return original(method, path, *args, **options)

    link.call = counted

    async def handler(task: ClaimedTask) -> None:
        if task.execution_id != ids[0]:
            raise PermanentError("no") if task.execution_id in ids[2:] else ValueError("not now")

    async with serving(worker, {"job": handler}) as runtime:
        done = RunSummary(completed=1, failed=18, retried=1)
        await until(lambda: runtime.summary == done, "all of them", 30)
    states = [await state(engine.backend, each) for each in ids]
    assert states == ["completed", "delayed", *["failed"] * 18]
    assert sent.count("/v1/remote/fail") == 19
    # The first task, and then the wait for more.
    assert sent.count("/v1/remote/claim") <= 5


async def test_results_and_failures_of_one_tick_each_get_their_answer(
    engine: Engine, make_remote: MakeRemote
) -> None:
    worker = await make_remote(max_concurrent_tasks=4)
    await submit(engine.backend, 4)
    tasks = await worker.claim_many(4)
    items = [
        Completion(tasks[0].handle, b"r"),
        FailedAttempt(tasks[1].handle, "x"),
        FailedAttempt(tasks[1].handle, "y"),
        Completion(tasks[1].handle),
        Completion(tasks[2].handle),
    ]
    outcomes, claimed = await worker.claims.complete(
        "default", tasks[0].execution_id.tag, items, lambda: True
    )
    kinds = [each.code if isinstance(each, EngineError) else each for each in outcomes]
    assert kinds[0] is None
    assert kinds[4] is None
    # The two kinds go in calls of their own: one of them ended the second task.
    assert kinds[1:4] in (
        [TerminalFailed(), TerminalFailed(), "execution_not_active"],
        ["execution_not_active", "execution_not_active", None],
    )
    assert claimed() == []
    for task in tasks:
        task.finish("test")


async def test_it_is_registered_and_leaves(engine: Engine, make_remote: MakeRemote) -> None:
    worker = await make_remote(worker_id="pool", capabilities=["gpu"], worker_instance_id="one")
    (entry,) = await engine.backend.workers.list_workers("default")
    assert (entry.worker_id, entry.capabilities) == ("pool", ("gpu",))
    with pytest.raises(ConfigError, match="in use"):
        await make_remote(worker_id="pool", worker_instance_id="one")
    await worker.aclose()
    assert await engine.backend.workers.list_workers("default") == []


async def test_it_is_drained(engine: Engine, make_remote: MakeRemote) -> None:
    worker = await make_remote()
    instance = worker.config.worker_instance_id
    await engine.backend.workers.drain_worker(instance)
    (execution_id,) = await submit(engine.backend)
    assert await worker.claim() is None
    assert worker.claims.draining
    assert await state(engine.backend, execution_id) == "waiting"
    # It waits as long as any other: its caller would ask again at once.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await worker.claim(max_wait="1h")


async def test_outcomes(engine: Engine, make_remote: MakeRemote) -> None:
    kinds = ("fails", "too_large", "delays", "completes", "unknown")
    ids = {kind: (await submit(engine.backend, kind=kind))[0] for kind in kinds}
    worker = await make_remote(max_concurrent_tasks=8)

    async def fails(_: ClaimedTask) -> None:
        raise PermanentError("no")

    async def too_large(_: ClaimedTask) -> bytes:
        return b"x" * (engine.backend.max_payload_bytes + 1)

    async def delays(task: ClaimedTask) -> None:
        await task.delay_execution(4_000_000_000_000)

    async def completes(task: ClaimedTask) -> None:
        await task.complete(b"itself")

    handlers = {
        "fails": fails,
        "too_large": too_large,
        "delays": delays,
        "completes": completes,
    }
    async with serving(worker, handlers) as runtime:
        done = RunSummary(completed=1, failed=3, released=1)
        await until(lambda: runtime.summary == done, "all ends")
    states = {kind: await state(engine.backend, each) for kind, each in ids.items()}
    assert states == {
        "fails": "failed",
        "too_large": "failed",
        "delays": "delayed",
        "completes": "completed",
        "unknown": "failed",
    }


async def test_a_lost_lease_cancels_the_handler(engine: Engine, make_remote: MakeRemote) -> None:
    (execution_id,) = await submit(engine.backend)
    worker = await make_remote()
    began, ended = asyncio.Event(), asyncio.Event()

    async def handler(_: ClaimedTask) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(worker, {"job": handler}):
        await began.wait()
        worker.keeper.renew_all()
        await until(lambda: worker.keeper.renewed == 1, "a renewal")
        await engine.backend.executions.cancel_execution(execution_id, "enough")
        worker.keeper.renew_all()
        await asyncio.wait_for(ended.wait(), 10)


async def test_an_attempt_times_out(engine: Engine, make_remote: MakeRemote) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 50}}
    (execution_id,) = await submit(engine.backend, policy=policy)
    worker = await make_remote()

    async def handler(_: ClaimedTask) -> None:
        await asyncio.Event().wait()

    async with serving(worker, {"job": handler}) as runtime:
        await until(lambda: runtime.summary.failed == 1, "the timeout")
    assert await state(engine.backend, execution_id) == "expired"


async def test_a_task_added_later_is_offered_at_once(
    engine: Engine, make_remote: MakeRemote, server: ServerProcess
) -> None:
    worker = await make_remote()

    async def handler(_: ClaimedTask) -> None: ...

    async with serving(worker, {"other": handler}, on_unknown_kind="release") as runtime:
        await submit(engine.backend)
        await until(lambda: worker.claims.left_to_others == {"job"}, "it met the task")
        await until(lambda: server.services.remote.desk.waiting == 1, "a long poll")
        runtime.on("job", handler)
        await until(lambda: runtime.summary.completed == 1, "the task")


@pytest.mark.parametrize("call", [b"/v1/remote/claim", b"/v1/remote/complete", b"/v1/remote/renew"])
async def test_lost_answers(
    engine: Engine, make_remote: MakeRemote, server: ServerProcess, call: bytes
) -> None:
    """Every execution runs once, whatever answer is lost."""
    with FaultProxy(server.address) as proxy:
        worker = await make_remote(proxy.address, max_concurrent_tasks=4, lease_ttl_ms=2000)
        runs: list[str] = []

        async def handler(task: ClaimedTask) -> None:
            runs.append(task.execution_id)
            worker.keeper.renew_all()

        proxy.drop_next_reply(call)
        async with serving(worker, {"job": handler}) as runtime:
            ids = await submit(engine.backend, 20)
            await until(lambda: runtime.summary.completed == 20, "all results")
        assert proxy.dropped == 1
        assert sorted(runs) == sorted(ids)
        await worker.aclose()


async def test_steps_are_recorded_once(
    engine: Engine, make_remote: MakeRemote, server: ServerProcess
) -> None:
    """As next to the store: the answer to the first record is lost, and the next claim has it."""
    await submit(engine.backend)
    with FaultProxy(server.address) as proxy:
        worker = await make_remote(proxy.address)
        known: list[list[tuple[str, bytes | None]]] = []
        recorded: list[StepOutcome] = []

        async def handler(task: ClaimedTask) -> None:
            known.append([(each.step_key, each.result) for each in task.claim.steps.steps])
            if not known[-1]:
                proxy.drop_next_reply(b"/v1/engine/steps/record_step")
                recorded.append(await task.record_step("fetch", result=b"page"))
                await task.delay_execution(1)

        async with serving(worker, {"job": handler}) as runtime:
            await until(lambda: runtime.summary.completed == 1, "the second run")
        assert proxy.dropped == 1
        await worker.aclose()
    assert known == [[], [("fetch", b"page")]]
    (again,) = recorded
    assert isinstance(again, AlreadyRecorded)
    assert again.record.belongs_to(1, 0)


async def test_a_poll_under_way_when_it_stops_keeps_nothing(
    engine: Engine, make_remote: MakeRemote, server: ServerProcess
) -> None:
    """The answer to the last poll is lost: what it claimed is released at once."""
    with FaultProxy(server.address) as proxy:
        worker = await make_remote(proxy.address)

        async def handler(_: ClaimedTask) -> None: ...

        async with serving(worker, {"job": handler}):
            await until(lambda: server.services.remote.desk.waiting == 1, "a long poll")
            proxy.mute()
            (execution_id,) = await submit(engine.backend)
            await until(lambda: server.services.remote.desk.waiting == 0, "the claim")
            await until(lambda: proxy.dropped > 0, "the lost answer")
            proxy.cut()
        assert await state(engine.backend, execution_id) in ("waiting", "completed")
        await worker.aclose()


async def test_it_continues_after_a_restart_of_the_server(engine: Engine) -> None:
    first = await started(engine)
    port = first.address[1]
    connect = partial(HttpBackend.connect, address_of(first.address))
    worker = await Worker.connect(config(max_concurrent_tasks=4, lease_ttl_ms=30_000), connect)
    go_on = asyncio.Event()

    async def handler(_: ClaimedTask) -> None:
        await go_on.wait()

    async with serving(worker, {"job": handler}) as runtime:
        await submit(engine.backend, 2)
        await until(lambda: worker.free == 2, "two handlers")
        await first.stop_serving()
        go_on.set()
        second = await started(engine, port)
        await until(lambda: runtime.summary.completed == 2, "both results")
        await submit(engine.backend)
        await until(lambda: runtime.summary.completed == 3, "one more")
    await worker.aclose()
    await second.stop_serving()


async def test_a_wrong_token_ends_the_run(engine: Engine) -> None:
    settings = ServerConfig(listen=("127.0.0.1", 0), shutdown_timeout_s=5, api_token="secret")
    process = ServerProcess(engine.backend, settings)
    await process.listen()
    address = address_of(process.address)
    with pytest.raises(AuthError):
        await Worker.connect(config(), partial(HttpBackend.connect, address))
    right = ServerAddress(host=address.host, port=address.port, token="secret")
    async with await Worker.connect(config(), partial(HttpBackend.connect, right)) as worker:
        assert await worker.claim() is None
    await process.stop_serving()


@pytest.fixture
def measured() -> Iterator[None]:
    """Metrics are on, as in every server process."""
    metrics.enable()
    yield
    metrics.disable()


@pytest.mark.usefixtures("measured")
async def test_everything_a_handler_can_do(engine: Engine, valkey: TestServer) -> None:
    async with await ValkeyBackend.connect(parse_url(valkey.url)) as backend:
        server = await started(Engine(backend))
        try:
            await _does_everything(engine, server)
        finally:
            await server.stop_serving()


async def _does_everything(engine: Engine, server: ServerProcess) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    await engine.backend.budgets.create_budget(
        NewBudget(
            budget_id=budget_id("team"),
            scope_type="team",
            scope_id="a",
            dimensions=("tokens",),
            hard_limits=(100,),
            soft_limits=(0,),
        )
    )
    app = Fabric(address_of(server.address).url)

    @app.task
    async def double(number: int) -> int:
        return number * 2

    @app.task
    def halve(number: int) -> int:
        return number // 2

    @app.task
    async def parent(ctx: Context) -> list[Any]:
        await ctx.stream("one")
        await ctx.progress(40, "half")
        await ctx.usage("team", tokens=5)
        async with ctx.reserve("team", tokens=10) as hold:
            await hold.settle(tokens=7)
        signal = await ctx.wait_for("approval")
        other = await app.submit(halve, 4)
        children = ctx.spawn()
        children.map(double, [1, 2])
        found = await children.results()
        return [signal.name, sorted(found.values()), await other.result(timeout=10)]

    async with app, app.worker(concurrency=8):
        builder = app.flow("remote")
        node = builder.add(parent)
        run = (await builder.submit()).run(node)

        async def waits() -> bool:
            return await run.state() is PublicState.SUSPENDED

        await until(waits, "the wait")
        await run.signal("approval", "approved")
        assert await run.result(timeout=10) == ["approved", [2, 4], 2]
    status = await engine.backend.budgets.get_budget_status(budget_id("team"))
    assert status.usage["tokens"] >= 12
    page = await engine.backend.streams.read_stream(run.id, 0)
    assert {frame.text for frame in page.frames} == {"one"}
    assert (await info(engine.backend, run.id)).progress_pct == 40
