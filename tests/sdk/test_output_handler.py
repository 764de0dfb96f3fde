"""What a handler writes: order, splitting, back-pressure, and when it is stored."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.contracts.streams import Frame, FrameMode, StreamedFrame
from flowfabric.core.errors import EngineError, LeaseLost
from flowfabric.core.ids import ExecutionId
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import claimed, state, until
from tests.support.server import TestServer
from tests.support.suspension import SECRET

COUNT = 300


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> ff.Fabric:
    await engine.backend.secrets.seed_at_boot(SECRET)
    return ff.Fabric(valkey.url)


async def frames(
    engine: Engine, execution_id: ExecutionId, attempt: int = 0
) -> list[StreamedFrame]:
    page = await engine.backend.streams.read_stream(execution_id, attempt, count_limit=10_000)
    return list(page.frames)


async def payloads(engine: Engine, execution_id: ExecutionId, attempt: int = 0) -> list[bytes]:
    return [frame.payload for frame in await frames(engine, execution_id, attempt)]


@pytest.mark.parametrize("end", ["return", "raise", "wait", "thread"])
async def test_everything_is_stored_in_order_before_the_run_ends_or_waits(
    app: ff.Fabric, engine: Engine, end: str
) -> None:
    @app.task()
    async def write(ctx: ff.Context) -> None:
        for number in range(COUNT):
            await ctx.stream(str(number))
        if end == "raise":
            raise ff.PermanentError("after all of it")
        if end == "wait":
            await ctx.wait_for("a")

    @app.task()
    def write_in_thread(ctx: ff.SyncContext) -> None:
        for number in range(COUNT):
            ctx.stream(str(number))

    async with app, app.worker(scanners=False):
        run = await app.submit(write_in_thread if end == "thread" else write)
        wanted = {"raise": "failed", "wait": "suspended"}.get(end, "completed")

        async def reached() -> bool:
            return await state(engine.backend, run.id) == wanted

        await until(reached, wanted)
        assert await payloads(engine, run.id) == [b"%d" % number for number in range(COUNT)]


async def test_a_frame_is_read_as_text_or_as_the_value_that_was_written(
    app: ff.Fabric, engine: Engine
) -> None:
    @app.task()
    async def write(ctx: ff.Context) -> None:
        for data in ("Grüße", {"a": [1, None]}, b"\xff1", ["x" * 70_000]):
            await ctx.stream(data)

    async with app, app.worker(scanners=False):
        run = await app.submit(write)
        await run.result(timeout=10)
        text, value, binary, *parts = [frame async for frame in run.stream()]
    assert (text.text, value.text, binary.text) == ("Grüße", '{"a":[1,null]}', "�1")
    assert value.json() == {"a": [1, None]}
    for frame, problem in (
        (text, r"\(utf8\) is not JSON: .*\. Read `text` or `payload`\."),
        (binary, r"\(binary\) is not JSON: .*"),
        (parts[0], r"\(json\) is not JSON: holds one part of a larger value: .*\"of\":2"),
    ):
        with pytest.raises(ValueError, match=rf"Frame {frame.id} {problem}"):
            frame.json()
    assert json.loads(b"".join(part.payload for part in parts)) == ["x" * 70_000]


async def test_each_attempt_keeps_its_own_output(app: ff.Fabric, engine: Engine) -> None:
    @app.task(retry=ff.Retry(1, backoff=0, jitter=False))
    async def flaky(ctx: ff.Context) -> None:
        await ctx.stream(f"attempt {ctx.attempt}")
        if ctx.attempt == 1:
            raise ff.RetryableError("once")

    async with app, app.worker():
        run = await app.submit(flaky)
        assert [frame.payload async for frame in run.stream(1)] == [b"attempt 1", b"attempt 2"]
    assert await payloads(engine, run.id, 0) == [b"attempt 1"]


async def test_output_is_seen_while_the_handler_runs(app: ff.Fabric) -> None:
    go_on = asyncio.Event()

    @app.task()
    async def talk(ctx: ff.Context) -> None:
        await ctx.stream("one")
        await go_on.wait()
        await ctx.stream("two")

    async with app, app.worker(scanners=False):
        run = await app.submit(talk)
        stream = run.stream()
        assert (await anext(stream)).payload == b"one"
        go_on.set()
        assert [frame.payload async for frame in stream] == [b"two"]


async def test_kinds_of_data(app: ff.Fabric, engine: Engine) -> None:
    @app.task()
    async def write(ctx: ff.Context) -> None:
        await ctx.stream("tëxt")
        await ctx.stream(b"\x00\xff", frame_type="blob")
        await ctx.stream({"step": 1}, "agent_step")
        await ctx.stream("")
        await ctx.stream({"total": 1}, "summary", mode="summary")
        await ctx.stream("maybe", mode="best_effort")
        with pytest.raises(EngineError, match="cannot be written as JSON"):
            await ctx.stream(object())
        with pytest.raises(EngineError, match="invalid_frame_type"):
            await ctx.stream("x", frame_type="a\nb")

    async with app, app.worker(scanners=False):
        run = await app.submit(write)
        assert (await run.wait(10)).failure_reason is None
    found = await frames(engine, run.id)
    assert [(f.payload, f.encoding, f.frame_type, f.mode) for f in found] == [
        ("tëxt".encode(), "utf8", "delta", "durable"),
        (b"\x00\xff", "binary", "blob", "durable"),
        (b'{"step":1}', "json", "agent_step", "durable"),
        (b"", "utf8", "delta", "durable"),
        (b'{"total":1}', "json", "summary", "summary"),
        (b"maybe", "utf8", "delta", "best_effort"),
    ]


async def test_large_data_goes_in_several_frames(app: ff.Fabric, engine: Engine) -> None:
    text = "aé漢😀" * 20_000
    blob = bytes(range(256)) * 1000
    data = {"rows": list(range(30_000))}

    @app.task()
    async def write(ctx: ff.Context) -> None:
        for piece in (text, blob, data):
            await ctx.stream(piece)
        # Exactly what one frame carries stays whole.
        await ctx.stream(b"x" * 65_536)
        with pytest.raises(EngineError, match="retention_limit_exceeded"):
            await ctx.stream(data, mode="summary")

    async with app, app.worker(scanners=False):
        run = await app.submit(write)
        assert (await run.wait(10)).failure_reason is None
    pieces: dict[str, list[StreamedFrame]] = {}
    *parts, whole = await frames(engine, run.id)
    for frame in parts:
        assert len(frame.payload) + len(frame.metadata_json) <= 65_536
        pieces.setdefault(frame.encoding, []).append(frame)
    assert "".join(f.payload.decode() for f in pieces["utf8"]) == text
    assert b"".join(f.payload for f in pieces["binary"]) == blob
    assert json.loads(b"".join(f.payload for f in pieces["json"])) == data
    count = len(pieces["utf8"])
    assert [json.loads(f.metadata_json) for f in pieces["utf8"]] == [
        {"part": number, "of": count} for number in range(1, count + 1)
    ]
    assert (len(whole.payload), whole.metadata_json) == (65_536, "")


async def test_a_stream_of_its_own_mode(app: ff.Fabric, engine: Engine) -> None:
    stored: list[bytes] = []

    @app.task()
    async def later(ctx: ff.Context) -> None:
        async with ctx.open_stream("progress", mode="summary") as summary:
            for page in range(3):
                await summary.write({"pages": page})
        found = await engine.backend.streams.read_summary(ctx.execution_id, 0)
        assert found is not None
        stored.append(found.document_json)
        async with ctx.open_stream() as output:
            await output.write("kept")
            raise ff.PermanentError("in the block")

    @app.task()
    def threaded(ctx: ff.SyncContext) -> None:
        with ctx.open_stream("stdout") as output:
            output.write(b"one")
            output.write(b"two")

    async with app, app.worker(scanners=False):
        run = await app.submit(later)
        with pytest.raises(ff.ExecutionFailed, match="in the block"):
            await run.result(10)
        assert (await payloads(engine, run.id))[-1] == b"kept"
        run = await app.submit(threaded)
        await run.result(10)
        assert await payloads(engine, run.id) == [b"one", b"two"]
    assert stored == [b'{"pages":2}']


# --- one claimed task -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["complete", "fail", "cancel", "delay"])
async def test_every_end_stores_what_was_written(
    engine: Engine, make_worker: MakeWorker, how: str
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    for number in range(COUNT):
        await task.write_frame(Frame(payload=b"%d" % number))
    calls: dict[str, Any] = {
        "complete": task.complete,
        "fail": lambda: task.fail("no", "permanent"),
        "cancel": task.cancel,
        "delay": lambda: task.delay_execution(1),
    }
    await calls[how]()
    assert await payloads(engine, task.execution_id) == [b"%d" % n for n in range(COUNT)]


async def test_a_writer_waits_while_too_much_is_under_way(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    worker = await make_worker(proxy.url, valkey.url)
    task = await claimed(worker, engine)
    written = 0

    async def write_many() -> None:
        nonlocal written
        for number in range(5000):
            await task.write_frame(Frame(payload=b"%d" % number))
            written += 1

    proxy.pause()
    writing = asyncio.create_task(write_many())
    await until(lambda: written > 1000, "some writes")
    for _ in range(100):
        await asyncio.sleep(0)
    held = written
    assert held < 2000
    proxy.resume()
    await writing
    await task.complete()
    assert await payloads(engine, task.execution_id) == [b"%d" % n for n in range(5000)]


async def test_a_lost_reply_writes_nothing_twice(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    worker = await make_worker(proxy.url, valkey.url)
    task = await claimed(worker, engine)
    for number in range(20):
        if number % 5 == 0:
            proxy.drop_next_reply(b"ff_append")
        await task.append_frame("delta", b"%d" % number, "about it")
    assert proxy.dropped == 4
    await task.complete()
    assert await payloads(engine, task.execution_id) == [b"%d" % n for n in range(20)]


async def test_reading_the_own_attempt(engine: Engine, make_worker: MakeWorker) -> None:
    task = await claimed(await make_worker(), engine)
    assert not task.wrote_output
    modes: list[FrameMode] = ["durable", "best_effort"]
    for mode in modes:
        await task.append_frame_with_mode("delta", mode.encode(), mode=mode)
    assert task.wrote_output
    assert [f.payload for f in (await task.read_stream()).frames] == [b"durable", b"best_effort"]
    page = await task.tail_stream(visibility="exclude_best_effort")
    assert [f.payload for f in page.frames] == [b"durable"]
    await task.complete()


async def test_no_output_with_a_lost_lease(engine: Engine, make_worker: MakeWorker) -> None:
    task = await claimed(await make_worker(lease_ttl_ms=1000), engine)
    await task.write_frame(Frame(payload=b"ours"))
    await task.flush_output()
    await engine.backend.leases.revoke_lease(task.execution_id)
    (claim,) = await engine.claim_all()
    # Not known here yet, but the store refuses; then it is known, and nothing is sent.
    with pytest.raises((EngineError, LeaseLost)):
        await task.append_frame("delta", b"zombie")
    await until(lambda: task.lease_lost is not None, "the loss")
    for call in (
        task.write_frame(Frame(payload=b"zombie")),
        task.append_frame("delta", b"zombie"),
    ):
        with pytest.raises(LeaseLost):
            await call
    await engine.backend.executions.complete(claim.handle)
    assert await payloads(engine, task.execution_id) == [b"ours"]
    assert await payloads(engine, task.execution_id, 1) == []


async def test_a_handler_that_lost_its_lease_learns_it_when_it_writes(
    app: ff.Fabric, engine: Engine
) -> None:
    stopped: list[str] = []

    @app.task()
    async def write(ctx: ff.Context) -> str:
        if ctx.attempt == 2:
            return "second"
        await ctx.stream("begun")
        try:
            while True:
                await ctx.stream("more")
                await asyncio.sleep(0)
        finally:
            stopped.append("stopped")

    async with app, app.worker(scanners=False, lease_ttl=1):
        run = await app.submit(write)
        await anext(run.stream())
        await engine.backend.leases.revoke_lease(run.id)
        assert await run.result(20) == "second"
        await until(lambda: stopped == ["stopped"], "the end of the first attempt")
