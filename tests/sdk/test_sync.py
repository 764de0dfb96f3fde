"""The blocking twins: same names, several threads, forks, clean ends."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_type
from uuid import uuid4

import pytest

import flowfabric as ff
from flowfabric.app.context import OutputStream, SyncOutputStream
from flowfabric.core.contracts.executions import Created
from flowfabric.sdk.client import Client
from flowfabric.sdk.following import SyncEventFeed
from flowfabric.sdk.loop_thread import Portal
from flowfabric.sdk.sync import SyncClient
from flowfabric.testing import SyncTestFabric, TestFabric
from tests.support.engine import Engine
from tests.support.sdk import watch_of
from tests.support.server import TestServer


@pytest.fixture
def client(engine: Engine, valkey: TestServer) -> Iterator[SyncClient]:
    with SyncClient.connect(valkey.url) as client:
        yield client


def public(cls: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in inspect.getmembers(cls, inspect.isroutine)
        if not name.startswith("_")
    }


TWINS: list[tuple[type, type]] = [
    (SyncClient, Client),
    (ff.SyncFabric, ff.Fabric),
    (ff.SyncRun, ff.Run),
    (ff.SyncContext, ff.Context),
    (SyncOutputStream, OutputStream),
    (SyncTestFabric, TestFabric),
]


@pytest.mark.parametrize(("sync", "other"), TWINS, ids=lambda cls: cls.__name__)
def test_a_twin_has_every_operation_with_the_same_parameters(sync: type, other: type) -> None:
    ours, theirs = public(sync), public(other)
    if "aclose" in theirs:
        theirs["close"] = theirs.pop("aclose")
    # Makes the async half of a twin.
    theirs.pop("twin", None)
    assert set(ours) == set(theirs)
    for name, method in theirs.items():
        mine, original = inspect.signature(ours[name]), inspect.signature(method)
        if name not in ("connect", "submit", "wait_for"):
            assert list(mine.parameters) == list(original.parameters), name
        assert not inspect.iscoroutinefunction(ours[name])
        assert inspect.getdoc(ours[name])
        assert ours[name].__qualname__.endswith(f".{name}")


def returns_of_a_twin(run: ff.SyncRun[str], client: SyncClient) -> None:
    """Checked by the type checker alone."""
    assert_type(run.result(), str)
    assert_type(client.subscribe_completion(), SyncEventFeed[ff.CompletionEvent])


async def test_everything_works(client: SyncClient, engine: Engine) -> None:
    def use() -> None:
        created = client.submit("job", b"in", tags={"a": "b"})
        assert isinstance(created, Created)
        execution_id = created.execution_id
        snapshot = client.inspect(execution_id)
        assert snapshot is not None
        with pytest.raises(ff.NotFinished):
            client.result_now(execution_id)
        context = client.read_context(execution_id)
        assert context is not None
        assert context.input_payload == b"in"
        client.change_priority(execution_id, 3)
        assert client.list().executions[0].execution_id == execution_id
        client.cancel(execution_id, "no")
        with pytest.raises(ff.ExecutionCancelled):
            client.result(execution_id, timeout=5)
        assert client.wait(execution_id).state.value == "cancelled"
        client.replay(execution_id, requested_by="ada", expected_replay_count=0)
        assert client.read_summary(execution_id, 0) is None
        assert client.revoke_lease(execution_id).kind == "already_satisfied"
        with pytest.raises(ff.EngineError, match="waitpoint_not_found"):
            client.close_waitpoint(execution_id, str(uuid4()))
        client.rotate_waitpoint_hmac_secret_all("k9", "ab" * 32)
        assert client.list_waitpoint_hmac_kids().current_kid == "k9"
        many = [client.new_execution("job", execution_id=i) for i in client.mint("default", 3)]
        assert len(client.submit_many(many)) == 3
        assert client.namespace == "default"

    await asyncio.to_thread(use)


async def test_result_with_timeout_from_many_threads(client: SyncClient, engine: Engine) -> None:
    count = 16

    def one(number: int) -> bytes | None:
        created = client.submit("job", str(number).encode())
        return client.result(created.execution_id, timeout=20)

    with ThreadPoolExecutor(count) as pool:
        results = [asyncio.wrap_future(pool.submit(one, n)) for n in range(count)]
        done = 0
        while done < count:
            claims = await engine.claim_all()
            for claim in claims:
                await engine.backend.executions.complete(claim.handle, claim.input_payload)
            done += len(claims)
            await asyncio.sleep(0.005)
        assert await asyncio.gather(*results) == [str(n).encode() for n in range(count)]
    created = await asyncio.to_thread(client.submit, "job")
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(client.result, created.execution_id, 0.05)


def test_closed_client_says_so_and_ends_its_thread(engine: Engine, valkey: TestServer) -> None:
    client = SyncClient.connect(valkey.url)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.submit("job")
    assert not [t for t in threading.enumerate() if t.name == "ff-sync-client"]


def test_close_ends_the_waits_of_other_threads(engine: Engine, valkey: TestServer) -> None:
    client = SyncClient.connect(valkey.url)
    created = client.submit("job")
    ended: list[BaseException] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            client.wait(created.execution_id)
        except BaseException as error:  # noqa: BLE001
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    inner: Any = client._target
    deadline = time.monotonic() + 5
    while not watch_of(inner).waiting and time.monotonic() < deadline:
        time.sleep(0.005)
    client.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(ended) == 1


def test_call_from_its_own_loop_is_refused() -> None:
    portal = Portal()

    async def nothing() -> None: ...

    async def inner() -> None:
        portal.call(nothing)

    with pytest.raises(RuntimeError, match="never return"):
        portal.call(inner)
    portal.close()


def test_used_before_and_after_a_fork(engine: Engine, valkey: TestServer) -> None:
    with SyncClient.connect(valkey.url) as client:
        before = client.submit("job", b"parent").execution_id
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            ended = 1
            try:
                created = client.submit("job", b"child").execution_id
                seen = client.read_context(before)
                assert seen is not None
                assert seen.input_payload == b"parent"
                with pytest.raises(TimeoutError):
                    client.wait(created, timeout=0.05)
                os.write(writer, created.encode())
                client.close()
                ended = 0
            finally:
                os._exit(ended)
        os.close(writer)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        created = os.read(reader, 200).decode()
        os.close(reader)
        context = client.read_context(created)  # type: ignore[arg-type]
        assert context is not None
        assert context.input_payload == b"child"
        # The parent's connections are still its own.
        with pytest.raises(TimeoutError):
            client.wait(before, timeout=0.05)


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "client.close()",
        "import threading; threading.Thread(target=client.wait, args=(e,), daemon=True).start()",
        "import atexit; atexit.register(lambda: client.submit('job'))",
        "raise SystemExit(0)",
    ],
)
def test_interpreter_exit_never_hangs(engine: Engine, valkey: TestServer, ending: str) -> None:
    script = textwrap.dedent(
        f"""
        from flowfabric import SyncClient
        client = SyncClient.connect({valkey.url!r})
        e = client.submit("job").execution_id
        {ending}
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=20, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_sync_fabric(engine: Engine, valkey: TestServer) -> None:
    app = ff.Fabric(valkey.url)

    @app.task()
    async def double(number: int) -> int:
        return number * 2

    def use() -> None:
        with ff.SyncFabric(app) as sync:
            run = sync.submit(double.options(idempotency_key="four"), 4)
            assert run.result(timeout=10) == 8
            assert (run.state().value, run.duplicate) == ("completed", False)
            assert sync.submit(double.options(idempotency_key="four"), 4).duplicate
            assert [r.result(10) for r in sync.submit_many(double, [[1], [2]])] == [2, 4]
            later = sync.submit(double.options(delay="1h"), 1)
            later.cancel("changed my mind")
            assert later.wait(10).state.value == "cancelled"
            assert later.info().execution_kind == "double"

    async with app, app.worker(concurrency=4, scanners=False):
        await asyncio.to_thread(use)


def test_a_program_without_an_event_loop_can_do_everything(
    engine: Engine, valkey: TestServer
) -> None:
    app = ff.Fabric(valkey.url)
    with ff.SyncFabric(app) as sync:

        @sync.task
        def shout(ctx: ff.SyncContext, word: str) -> str:
            ctx.stream(word)
            return word.upper()

        with sync.worker(concurrency=2, scanners=False):
            run = sync.submit(shout, "hello")
            assert [frame.payload for frame in run.stream()] == [b"hello"]
            assert run.result(timeout=20) == "HELLO"
            named = sync.submit(sync.named("shout", priority=3), word="again")
            assert named.result(timeout=20) == "AGAIN"
            found = sync.client().inspect(named.id)
            assert found is not None
            assert sync.get_run(named.id, shout).result(timeout=20) == "AGAIN"
    assert not [t for t in threading.enumerate() if t.name == "ff-sync-fabric"]


def test_a_worker_without_an_event_loop_stops_at_a_signal(
    engine: Engine, valkey: TestServer
) -> None:
    script = textwrap.dedent(
        f"""
        import os, signal
        import flowfabric as ff
        app = ff.Fabric({valkey.url!r})

        @app.task
        def stop() -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        with ff.SyncFabric(app) as sync:
            sync.submit(stop)
            print(sync.worker(scanners=False).run().completed)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=30, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
