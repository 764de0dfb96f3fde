"""Lanes and partitions that were lost in a failover are registered again by their users."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.errors import ConfigError, TransportError
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.keys import LANES, NAMESPACES, PARTITIONS, PLACES
from flowfabric.sdk.client import Client
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import parse_url
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.scanning import idle
from tests.support.sdk import claims_of, config, serving, submit, until
from tests.support.server import TestServer


async def nothing(task: ClaimedTask) -> None:
    pass


async def lose(engine: Engine) -> None:
    """What a failover to a lagging replica does."""
    await engine.backend.transport.call("DEL", LANES, PLACES, PARTITIONS, NAMESPACES)


async def knows_namespace(engine: Engine) -> bool:
    return await engine.backend.transport.call("SISMEMBER", NAMESPACES, "default") == 1


async def registered(engine: Engine) -> tuple[set[str], set[str]]:
    lanes, tags = (
        await engine.backend.lanes.list_lanes(),
        await engine.backend.places.used_partitions(),
    )
    return set(lanes[0]), set(tags)


def are_registered(engine: Engine, lane: str, tag: str) -> Any:
    async def both() -> bool:
        lanes, tags = await registered(engine)
        return lane in lanes and tag in tags

    return both


async def test_live_worker_and_submitter_survive_the_loss(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer
) -> None:
    worker = await make_worker(scanners=True, lanes=["mail"], lease_ttl_ms=1000)
    async with (
        await Client.connect(valkey.url) as client,
        serving(worker, {"job": nothing}) as runtime,
    ):
        await client.submit("job", lane="mail")
        await until(lambda: runtime.summary.completed == 1, "the first")
        await lose(engine)
        await client.submit("job", lane="mail", delay_ms=100)
        home = claims_of(worker).lanes["mail"].home
        await until(are_registered(engine, "mail", home), "the registration")
        await until(lambda: runtime.summary.completed == 2, "the delayed one")
        # Whoever claims registers lanes and partitions; the worker's heartbeat the namespace, too.
        await until(lambda: knows_namespace(engine), "the namespace")


async def test_worker_registers_its_places_when_it_connects(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """A submitter that registered with a server that is gone, and a worker that comes later."""
    await submit(engine.backend, lane="mail", delay_ms=1)
    await lose(engine)
    worker = await make_worker(scanners=True, lanes=["mail"])
    assert await registered(engine) == ({"mail"}, {claims_of(worker).lanes["mail"].home})
    async with serving(worker, {"job": nothing}) as runtime:
        await until(lambda: runtime.summary.completed == 1, "the delayed one")


async def test_claim_registers_where_it_found_work(engine: Engine, make_worker: MakeWorker) -> None:
    await submit(engine.backend, partition=9)
    worker = await make_worker()
    await lose(engine)
    (task,), _ = await claims_of(worker).claim_at("default", "{fp:9}", 1)
    await until(are_registered(engine, "default", "{fp:9}"), "the registration")
    await task.complete()


async def test_creations_register_again_now_and_then(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submit(engine.backend, lane="old", partition=3)
    await lose(engine)
    await submit(engine.backend, partition=4)
    assert "{fp:3}" not in (await registered(engine))[1], "not with every creation"
    monkeypatch.setattr(engine.backend.places, "_repeat_at", 0.0)
    await submit(engine.backend, partition=4)
    lanes, tags = await registered(engine)
    assert lanes >= {"old", "default"}
    assert tags >= {"{fp:3}", "{fp:4}"}


async def test_registration_that_failed_is_made_up_for(
    engine: Engine, valkey: TestServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await ValkeyBackend.connect(parse_url(proxy.url), request_timeout=0.2)
    async with backend:
        await submit(backend, partition=3)
        await lose(engine)
        monkeypatch.setattr(backend.places, "_repeat_at", 0.0)
        proxy.down()
        with pytest.raises(TransportError):
            await submit(backend, partition=3)
        proxy.up()
        await backend.transport.wait_ready(5)
        await submit(backend, partition=3)
        assert await registered(engine) == ({"default"}, {"{fp:3}"})


async def test_scanners_find_work_in_a_partition_nobody_registered(
    engine: Engine, valkey: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its submitter is gone, and no worker has claimed there."""
    await submit(engine.backend, partition=201)
    await lose(engine)
    async with await ValkeyBackend.connect(parse_url(valkey.url)) as fresh:
        other = Engine(fresh)
        assert (await idle(other).scan_once("index_reconciler")).processed == 2
        assert (await idle(other).scan_once("index_reconciler")).processed == 0
    assert await registered(engine) == ({"default"}, {"{fp:201}"})
    actions = [record.__dict__.get("action") for record in caplog.records]
    assert actions.count("partition_registered") == actions.count("lane_registered") == 1


@pytest.mark.parametrize(
    ("name", "value"), [("FF_LEASE_EXPIRY_INTERVAL_MS", "abc"), ("FF_MAX_PAYLOAD_BYTES", "0")]
)
async def test_local_settings_are_checked_before_anything_is_dialled(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        await Worker.connect(config(scanners=True), "unix:///nowhere")
