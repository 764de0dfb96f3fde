"""The example workers in Node and Go run against a server, renew, fail and stop on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from tests.project.checkout import ROOT
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import info, state, submit, until

EXAMPLES = ROOT / "examples" / "remote"
_BUILD_S = 240


@pytest.fixture(scope="session")
def go_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Go worker, built once; Go's own cache makes the next build quick."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("there is no go command to build the example with")
    program = tmp_path_factory.mktemp("go") / "worker"
    command = [go, "build", "-o", str(program), str(EXAMPLES / "worker.go")]
    subprocess.run(command, check=True, timeout=_BUILD_S, cwd=program.parent)
    return program


@asynccontextmanager
async def running(http: Http, *command: str) -> AsyncGenerator[None]:
    """A worker process that is ready; it must end well."""
    url = "http://{}:{}".format(*http.address)
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | {"FF_URL": url}, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert b"serves shout, refuse" in await process.stdout.readline()
        yield
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def works(engine: Engine, http: Http, *command: str) -> list[ExecutionId]:
    async with running(http, *command):
        shouts: list[ExecutionId] = []
        for text in ("a", "é", "c"):
            payload = json.dumps([text]).encode()
            shouts += await submit(engine.backend, kind="shout", input_payload=payload)
        (refused,) = await submit(engine.backend, kind="refuse")
        (other,) = await submit(engine.backend, kind="other")
        ended: dict[ExecutionId, Any] = dict.fromkeys(shouts, "completed") | {refused: "failed"}

        async def done() -> bool:
            found = {each: await state(engine.backend, each) for each in ended}
            return found == ended

        await until(done, "all ends")
        (worker,) = await engine.backend.workers.list_workers("default")
        assert worker.tasks == ("refuse", "shout")
    results = [await engine.backend.reads.get_execution_result(each) for each in shouts]
    assert [json.loads(each or b"") for each in results] == ["A", "É", "C"]
    assert (await info(engine.backend, refused)).failure_reason == "not today"
    assert await state(engine.backend, other) == "waiting"
    assert await engine.backend.workers.list_workers("default") == []
    return shouts


async def test_node(engine: Engine, http: Http) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node command to run the example with")
    first, *_ = await works(engine, http, node, str(EXAMPLES / "worker.mjs"))
    page = await engine.backend.streams.read_stream(first, 0)
    assert [frame.text for frame in page.frames] == ["shouting a"]


@pytest.mark.timeout(_BUILD_S + 60)
async def test_go(engine: Engine, http: Http, go_worker: Path) -> None:
    await works(engine, http, str(go_worker))
