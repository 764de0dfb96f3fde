"""What tests of storage look at: keys, stored fields, connections. Conformance tests do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import StreamFrames
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.stream_pool import StreamPool
from flowfabric.engine.valkey.streams import ValkeyStreams
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer


async def indexes(engine: Engine, execution_id: ExecutionId) -> dict[str, float | None]:
    """Every index that holds the execution but the list of all, with its score (None in a set)."""
    held = await everywhere(engine, execution_id)
    held.pop("all_executions", None)
    return held


async def everywhere(engine: Engine, execution_id: ExecutionId) -> dict[str, float | None]:
    """Every index that holds the execution, with its score (None in a plain set)."""
    member = execution_id.encode()
    prefix = keys.index(execution_id.tag, "").encode()
    held: dict[str, float | None] = {}
    for name, content in (await engine.dump()).items():
        if not name.startswith(prefix) or not isinstance(content, list):
            continue
        rows: list[Any] = cast("list[Any]", content)
        for row in rows:
            if row == member:
                held[name.removeprefix(prefix).decode()] = None
            elif isinstance(row, list):
                scored = cast("list[Any]", row)
                if scored[0] != member:
                    continue
                held[name.removeprefix(prefix).decode()] = float(scored[1])
    return held


async def raw(engine: Engine, key: str) -> dict[str, str]:
    """A stored hash as it is."""
    fields: Any = await engine.backend.transport.call("HGETALL", key)
    return {
        name.decode(): value.decode(errors="backslashreplace") for name, value in fields.items()
    }


async def record(engine: Engine, execution_id: ExecutionId) -> dict[str, str]:
    """The stored record as it is."""
    return await raw(engine, keys.core(execution_id.tag, execution_id))


async def write(engine: Engine, execution_id: ExecutionId, **values: Any) -> None:
    """Damage, or set, stored fields of the record."""
    flat = [part for pair in values.items() for part in pair]
    await engine.backend.transport.call("HSET", keys.core(execution_id.tag, execution_id), *flat)


async def grant_fields(engine: Engine, execution_id: ExecutionId) -> dict[str, str]:
    """The stored grant; empty when there is none."""
    return await raw(engine, keys.grant(execution_id.tag, execution_id))


@asynccontextmanager
async def lossy(
    engine: Engine, valkey: TestServer
) -> AsyncGenerator[tuple[ValkeyBackend, FaultProxy]]:
    """A second client of the same engine whose replies can be lost on the way."""
    with FaultProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(parse_url(proxy.url), prepare_with=PartitionCounts())
        try:
            yield client, proxy
        finally:
            await client.aclose()


def stream_key(handle: Handle, suffix: str = "") -> str:
    execution_id = handle.execution_id
    return f"ff:stream:{execution_id.tag}:{execution_id}:{handle.attempt_index}{suffix}"


def summary_key(handle: Handle) -> str:
    execution_id = handle.execution_id
    return f"ff:attempt:{execution_id.tag}:{execution_id}:{handle.attempt_index}:summary"


async def meta(engine: Engine, handle: Handle) -> dict[str, str]:
    return await raw(engine, stream_key(handle, ":meta"))


async def length(engine: Engine, handle: Handle) -> int:
    return await engine.backend.transport.call("XLEN", stream_key(handle))


async def expiry(engine: Engine, handle: Handle) -> int:
    """Milliseconds the stream has left; -1 without an end, -2 when it is gone."""
    return await engine.backend.transport.call("PTTL", stream_key(handle))


async def commands(backend: ValkeyBackend) -> int:
    """Everything the server did so far, calls inside functions and this question included."""
    info: Any = await backend.transport.call("INFO", "stats")
    return int(info.decode().partition("total_commands_processed:")[2].split()[0])


async def blocked_clients(backend: ValkeyBackend) -> int:
    info: Any = await backend.transport.call("INFO", "clients")
    (line,) = [row for row in info.decode().splitlines() if row.startswith("blocked_clients:")]
    return int(line.partition(":")[2])


async def until_blocked(backend: ValkeyBackend, count: int = 1) -> None:
    """Return when this many calls wait in the server."""
    async with asyncio.timeout(20):
        while await blocked_clients(backend) != count:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0)


async def waiting_tail(
    engine: Engine, execution_id: ExecutionId, index: int = 0, **how: Any
) -> asyncio.Task[StreamFrames]:
    """A tail that waits in the server by now."""
    # By id: one that was cancelled a moment ago may still count as blocked.
    before = await blocked_ids(engine.backend)
    limits: dict[str, Any] = {"block_ms": 20_000} | how
    task = asyncio.ensure_future(engine.backend.streams.tail_stream(execution_id, index, **limits))
    async with asyncio.timeout(20):
        while await blocked_ids(engine.backend) <= before:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0)
    return task


async def blocked_ids(backend: ValkeyBackend) -> set[str]:
    """The connections that wait in the server."""
    listing: Any = await backend.transport.call("CLIENT", "LIST")
    clients = [dict(p.split("=", 1) for p in row.split()) for row in listing.decode().splitlines()]
    return {client["id"] for client in clients if "b" in client["flags"]}


async def use_pool(backend: ValkeyBackend, pool: StreamPool) -> None:
    """Read streams through another pool."""
    await backend.stream_pool.aclose()
    backend.stream_pool = pool
    assert isinstance(backend.streams, ValkeyStreams)
    backend.streams._pool = pool
