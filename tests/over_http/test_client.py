"""Applications and clients on a server's address, and what they survive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

import flowfabric as ff
from flowfabric.core.contracts.flows import FlowGraph, GraphNode
from flowfabric.core.errors import ConfigError, CorruptionError, TransportError
from flowfabric.core.ids import new_uuid
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.connect import ServerLocation, open_backend
from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.backend import HttpBackend
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.client import Client
from flowfabric.sdk.sync import SyncClient
from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.http_engine import serving
from tests.support.listening import listening
from tests.support.server import TestServer
from tests.support.suspension import SECRET

Address = tuple[str, int]


def url_of(address: Address) -> str:
    return "http://{}:{}".format(*address)


@pytest.fixture
async def url(backend: ValkeyBackend) -> AsyncIterator[str]:
    async with serving(Engine(backend)) as server:
        yield url_of(server.address)


async def test_an_application_on_a_server(
    url: str, valkey: TestServer, backend: ValkeyBackend
) -> None:
    """A worker next to the store runs what a program submits through the server."""
    await backend.secrets.seed_at_boot(SECRET)
    near, far = ff.Fabric(valkey.url), ff.Fabric(url)

    @near.task()
    async def greet(ctx: ff.Context, name: str) -> str:
        await ctx.stream("thinking")
        verdict = await ctx.wait_for("approval", timeout="1m")
        return f"{verdict.name}: Hello, {name}!"

    async with near, near.worker(scanners=False), far:
        run = await far.named("greet").submit("Ada")
        client = await far.client()
        wait = await client.wait_until_suspended(run.id, timeout=10)
        assert wait.public_state == "suspended"
        await client.approve(run.id, by="ada")
        assert await run.result(timeout=10) == "approved: Hello, Ada!"
        frames = [frame.payload async for frame in client.tail(run.id)]
        # Before the wait, and again when the handler resumed.
        assert frames == [b"thinking"] * 2


async def test_events_arrive_as_they_happen(url: str, backend: ValkeyBackend) -> None:
    engine = Engine(backend)
    async with await Client.connect(url) as client:
        feed = await client.subscribe_completion()
        handle = await engine.running()
        await backend.executions.complete(handle, b"1")
        event = await asyncio.wait_for(anext(feed), 10)
        assert not isinstance(event, CorruptionError)
        assert event.execution_id == handle.execution_id
        graph = FlowGraph(
            flow_id=new_uuid(), flow_kind="f", nodes=(GraphNode(key="a", execution_kind="job"),)
        )
        await client.submit_flow(graph)
        waiting = asyncio.create_task(client.wait_flow(graph.flow_id))
        await asyncio.wait_for(client.cancel_flow(graph.flow_id), 10)
        assert await asyncio.wait_for(waiting, 10) == "failed"
        assert await client.backend.meta.failing_checks() == []


async def test_ordinary_code(url: str, backend: ValkeyBackend) -> None:
    def submit() -> str:
        with SyncClient.connect(url) as client:
            return client.submit("resize", b"{}").execution_id

    execution_id = await asyncio.to_thread(submit)
    (claim,) = await Engine(backend).claim_all()
    assert claim.handle.execution_id == execution_id


async def test_long_lists_are_sent_in_parts(url: str, backend: ValkeyBackend) -> None:
    async with await Client.connect(url) as client:
        payload = b"x" * 1_000_000
        items = [client.new_execution("big", payload, lane="images") for _ in range(10)]
        outcomes = await client.submit_many(items)
        assert [each.kind for each in outcomes if not isinstance(each, Exception)] == [
            "created"
        ] * 10
        shown = await backend.reads.read_execution_context(items[9].execution_id)
        assert shown.input_payload == payload


def test_on_the_loop_that_workers_use(valkey: TestServer) -> None:
    async def ask() -> int:
        address = parse_url(valkey.url)
        async with (
            await ValkeyBackend.connect(address, prepare_with=PartitionCounts()) as backend,
            serving(Engine(backend)) as server,
            await Client.connect(url_of(server.address)) as client,
        ):
            return (await client.backend.meta.usage()).commands

    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        assert runner.run(ask()) > 0


@asynccontextmanager
async def losing_answers(server: Address, count: int) -> AsyncGenerator[Address]:
    """A way to the server on which the first answers are lost after the requests were served."""
    left = count

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        far_reader, far_writer = await asyncio.open_connection(*server)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (
                        int(line[16:])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length: ")
                    ),
                    0,
                )
                far_writer.write(head + await reader.readexactly(length))
                answer = await far_reader.readuntil(b"\r\n\r\n")
                size = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                answer += await far_reader.readexactly(size)
                if left and b"/v1/engine/" in head:
                    left -= 1
                    return
                writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            far_writer.close()

    async with listening(carry) as port:
        yield "127.0.0.1", port


async def test_a_lost_answer_repeats_nothing(backend: ValkeyBackend) -> None:
    """The server recognises the repeat, whatever the operation is."""
    engine = Engine(backend)
    execution_id = await engine.create()
    await backend.executions.cancel_execution(execution_id)
    async with (
        serving(engine) as server,
        losing_answers(server.address, 2) as (host, port),
        await HttpBackend.connect(ServerAddress(host=host, port=port)) as remote,
    ):
        replayed = await remote.executions.replay_execution(execution_id, "again")
        assert replayed.public_state == "waiting"
        await remote.executions.cancel_execution(execution_id)
    replays = [event for event in await engine.events(execution_id) if event.type == "replayed"]
    assert len(replays) == 1


async def test_a_command_does_not_wait_for_a_lost_server(backend: ValkeyBackend) -> None:
    async with serving(Engine(backend)) as server:
        address = server.address
    location = ServerLocation(url_of(address))
    with pytest.raises(TransportError, match="connection refused") as caught:
        await location.open_existing(name="cli", connect_timeout=3)
    assert "`flowfabric server` is running there" in str(caught.value)
    (finding,) = await location.diagnose(None, prepare=False, connect_timeout=3)
    assert (finding.name, finding.grade) == ("server", "broken")
    (finding,) = await location.diagnose(None, prepare=True, connect_timeout=3)
    assert (finding.name, finding.grade) == ("prepare", "broken")


async def test_waiting_survives_a_restart_of_the_server(backend: ValkeyBackend) -> None:
    engine = Engine(backend)
    handle = await engine.running()
    async with serving(engine) as server:
        address = server.address
        client = await Client.connect(url_of(address))
        waiting = asyncio.create_task(client.result(handle.execution_id))
        await asyncio.sleep(0)
    async with serving(engine, listen=address):
        await backend.executions.complete(handle, b"42")
        assert await asyncio.wait_for(waiting, 20) == b"42"
        await client.aclose()


async def test_only_a_store_can_be_served_or_prepared(url: str) -> None:
    with pytest.raises(ConfigError, match="is a FlowFabric server"):
        await ServerProcess.start(ServerConfig(), ServerLocation(url))
    with pytest.raises(ConfigError, match="pass the Valkey URL"):
        await ServerLocation(url).open(prepare=True)


async def test_the_address_of_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_URL", url)
    location = ServerLocation()
    assert (location.remote, location.embedded, location.peer) == (True, False, url)
    async with await Client.connect(url) as client:
        assert client.backend.meta.backend_label() == "valkey"
    monkeypatch.setenv("FF_URL", "http://me:s3cret@127.0.0.1")
    with pytest.raises(ConfigError, match="FF_URL: a server URL cannot contain a user") as caught:
        ServerLocation()
    assert "s3cret" not in str(caught.value)


async def test_a_backend_by_its_address(url: str) -> None:
    backend = await open_backend(url)
    assert await backend.meta.server_time_ms() > 0
    await backend.aclose()
    with pytest.raises(TransportError, match="the client is closed"):
        await backend.meta.ping()
