"""The durability that docs/promises.md states, on the embedded Valkey; and the tests it names."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.client import Client
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.embedded import EmbeddedServer
from flowfabric.valkey.embedded_folder import Aof
from tests.docs.markdown import ROOT
from tests.docs.scratch import wait_for_server_end


@asynccontextmanager
async def connected(server: EmbeddedServer) -> AsyncGenerator[Client]:
    backend = await ValkeyBackend.connect(parse_url(server.url), prepare_with=PartitionCounts())
    async with Client(backend) as client:
        yield client


@asynccontextmanager
async def embedded(folder: Path, aof: Aof) -> AsyncGenerator[EmbeddedServer]:
    server = await asyncio.to_thread(EmbeddedServer.acquire, folder, aof=aof)
    try:
        yield server
    finally:
        server.release()
        await asyncio.to_thread(wait_for_server_end, folder)


async def submit_until_killed(client: Client, server: EmbeddedServer) -> list[ExecutionId]:
    """Submit as fast as possible, kill the server in the midst of it; what was accepted."""
    accepted: list[ExecutionId] = []
    enough = asyncio.Event()

    async def submitter() -> None:
        while True:
            try:
                outcome = await client.submit("work", b"x" * 200)
            except EngineError:
                return
            accepted.append(outcome.execution_id)
            if len(accepted) >= 300:
                enough.set()

    tasks = [asyncio.create_task(submitter()) for _ in range(8)]
    await enough.wait()
    kill(server)
    await client.backend.aclose()
    await asyncio.gather(*tasks)
    return accepted


def kill(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)


async def missing(server: EmbeddedServer, accepted: list[ExecutionId]) -> list[ExecutionId]:
    """Which of them are gone after a restart on the same data."""
    await asyncio.to_thread(restarted, server)
    async with connected(server) as client:
        found = await asyncio.gather(*(client.inspect(each) for each in accepted))
    return [each for each, snapshot in zip(accepted, found, strict=True) if snapshot is None]


def restarted(server: EmbeddedServer) -> None:
    # A killed process may answer for a moment longer.
    while not server.ensure_running():
        pass


async def test_always_loses_nothing_when_the_server_is_killed(tmp_path: Path) -> None:
    async with embedded(tmp_path / "data", "always") as server:
        async with connected(server) as client:
            accepted = await submit_until_killed(client, server)
        assert await missing(server, accepted) == []


async def test_everysec_loses_nothing_that_is_on_disk(tmp_path: Path) -> None:
    async with embedded(tmp_path / "data", "everysec") as server:
        async with connected(server) as client:
            outcomes = [await client.submit("work") for _ in range(50)]
            # What the promise calls a second is this: the log was flushed.
            backend = cast("ValkeyBackend", client.backend)
            await backend.transport.call("WAITAOF", 1, 0, 5000, key="")
            kill(server)
        assert await missing(server, [outcome.execution_id for outcome in outcomes]) == []


async def test_without_a_log_nothing_survives_the_server(tmp_path: Path) -> None:
    async with embedded(tmp_path / "data", "no") as server:
        async with connected(server) as client:
            outcome = await client.submit("work")
            kill(server)
        assert await missing(server, [outcome.execution_id]) == [outcome.execution_id]


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "promises.md").read_text())
    assert len(named) >= 15
    absent: list[str] = []
    for path, name in named:
        file = ROOT / path
        tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
        functions = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        if name not in functions:
            absent.append(f"{path}::{name}")
    assert absent == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_every_named_file_exists(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|examples|benchmarks|docs)/[\w/.-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
