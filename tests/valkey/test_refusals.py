"""Server errors inside a function are reported as such, never as damaged data."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import pytest

from flowfabric.core.errors import TransportError
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support.cluster import TestCluster
from tests.support.engine import LANE, TTL, Engine
from tests.support.server import TestServer


@asynccontextmanager
async def limited(backend: ValkeyBackend, url: str, *rules: str) -> AsyncGenerator[Engine]:
    """A client whose ACL user has every right but those that the rules take away."""
    everything = ("reset", "on", ">pw", "~*", "&*", "+@all")
    await backend.transport.call_all_primaries("ACL", "SETUSER", "limited", *everything, *rules)
    address = msgspec.structs.replace(parse_url(url), username="limited", password="pw")
    try:
        async with await ValkeyBackend.connect(address) as client:
            yield Engine(client)
    finally:
        await backend.transport.call_all_primaries("ACL", "DELUSER", "limited")


@pytest.mark.corrupts
async def test_a_missing_right_inside_a_function(engine: Engine, valkey: TestServer) -> None:
    handles = [await engine.running() for _ in range(3)]
    ids = [handle.execution_id for handle in handles]
    await engine.advance(TTL)
    async with limited(engine.backend, valkey.url, "-xadd") as client:
        for call in (
            lambda: client.backend.executions.cancel_execution(ids[0]),
            lambda: client.backend.leases.revoke_lease(ids[1], reason="x"),
            lambda: client.backend.upkeep.mark_lease_expired_if_due(ids[2].tag, [ids[2]]),
        ):
            with pytest.raises(TransportError) as caught:
                await call()
            assert (caught.value.kind, caught.value.retryable) == ("auth", False)
            assert "'xadd'" in caught.value.message


async def test_a_ring_that_is_refused_fails_nothing(engine: Engine, valkey: TestServer) -> None:
    others = ("resetkeys", "~*{*", "~ff:idx:*", "~ff:config:*")
    async with limited(engine.backend, valkey.url, *others) as client:
        execution_id = await client.create()
        assert await engine.backend.transport.call("EXISTS", keys.wake(LANE)) == 0
        handle = (await client.claim()).handle
        await client.backend.executions.delay(handle, 1)
        await client.backend.executions.complete((await client.claim()).handle, b"r")
        assert await client.backend.reads.get_execution_result(execution_id) == b"r"


async def test_a_submitter_without_channels_on_a_cluster(cluster: TestCluster) -> None:
    async with (
        await ValkeyBackend.connect(
            parse_url(cluster.url), prepare_with=PartitionCounts()
        ) as backend,
        limited(backend, cluster.url, "resetchannels") as client,
    ):
        execution_id = await client.create()
        assert (await client.claim()).execution_id == execution_id
