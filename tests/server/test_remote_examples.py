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
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from tests.project.checkout import ROOT
from tests.support.engine import Engine
from tests.support.http import Address, Http
from tests.support.proxy import FaultProxy
from tests.support.sdk import info, state, submit, until

EXAMPLES = ROOT / "examples" / "remote"
_BUILD_S = 240
_NODE_NAP = """
  nap: ([ms], { signal }) => sleep(ms, "rested", { signal }),
"""
_GO_NAP = """
	"nap": func(ctx context.Context, in []any) (any, error) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Duration(in[0].(float64)) * time.Millisecond):
			return "rested", nil
		}
	},
"""


def varied(name: str, folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of an example whose leases are short, and which knows a slow task."""
    text = (EXAMPLES / name).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / name
    copy.write_text(text)
    return copy


@pytest.fixture(scope="session")
def node_worker(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the Node worker."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node command to run the example with")
    changes = (("ttl = 30_000", "ttl = 6_000"), ("\n  refuse:", f"{_NODE_NAP}  refuse:"))
    return [node, str(varied("worker.mjs", tmp_path_factory.mktemp("node"), *changes))]


@pytest.fixture(scope="session")
def go_worker(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The Go worker, built once; Go's own cache makes the next build quick."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("there is no go command to build the example with")
    folder = tmp_path_factory.mktemp("go")
    changes = (("ttl = 30 *", "ttl = 6 *"), ('\n\t"refuse":', f'{_GO_NAP}\t"refuse":'))
    source = varied("worker.go", folder, *changes)
    command = [go, "build", "-o", str(folder / "worker"), str(source)]
    subprocess.run(command, check=True, timeout=_BUILD_S, cwd=folder)
    return [str(folder / "worker")]


@asynccontextmanager
async def running(address: Address, *command: str) -> AsyncGenerator[None]:
    """A worker process that is ready; it must end well."""
    url = "http://{}:{}".format(*address)
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | {"FF_URL": url}, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert b" serves " in await process.stdout.readline()
        yield
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def works(engine: Engine, http: Http, *command: str) -> list[ExecutionId]:
    async with running(http.address, *command):
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
        assert worker.tasks == ("nap", "refuse", "shout")
    results = [await engine.backend.reads.get_execution_result(each) for each in shouts]
    assert [json.loads(each or b"") for each in results] == ["A", "É", "C"]
    assert (await info(engine.backend, refused)).failure_reason == "not today"
    assert await state(engine.backend, other) == "waiting"
    assert await engine.backend.workers.list_workers("default") == []
    return shouts


async def naps(engine: Engine, http: Http, *command: str) -> None:
    """A lease is renewed while its handler runs; a worker that lost it stops and goes on."""
    async with running(http.address, *command):
        (napping,) = await submit(engine.backend, kind="nap", input_payload=b"[600000]")
        (short,) = await submit(engine.backend, kind="nap", input_payload=b"[1]")
        await until(partial(is_renewed, engine, napping, set()), "a renewal", timeout=30)
        assert await state(engine.backend, napping) == "active"
        await engine.backend.leases.revoke_lease(napping)
        await engine.backend.executions.cancel_execution(napping)
        await until(partial(is_completed, engine, short), "the next task", timeout=30)
    # It ended at once, so nothing waited for the rest of the ten minutes.
    assert await state(engine.backend, napping) == "cancelled"


async def is_renewed(engine: Engine, execution_id: ExecutionId, seen: set[int]) -> bool:
    """Whether the end of the lease has moved since the first look; `seen` keeps the looks."""
    found = await engine.backend.reads.describe_execution(execution_id)
    if found is not None and found.current_lease is not None:
        seen.add(found.current_lease.expires_at)
    return len(seen) > 1


async def is_completed(engine: Engine, execution_id: ExecutionId) -> bool:
    return await state(engine.backend, execution_id) == "completed"


async def test_node(engine: Engine, http: Http, node_worker: list[str]) -> None:
    first, *_ = await works(engine, http, *node_worker)
    page = await engine.backend.streams.read_stream(first, 0)
    assert [frame.text for frame in page.frames] == ["shouting a"]


async def test_node_renews(engine: Engine, http: Http, node_worker: list[str]) -> None:
    await naps(engine, http, *node_worker)


async def repeats(engine: Engine, http: Http, call: str, *command: str) -> ExecutionId:
    """The answer to a call is lost: the worker sends it again, and the task runs once."""
    (shout,) = await submit(engine.backend, kind="shout", input_payload=b'["a"]')
    with FaultProxy(http.address) as proxy:
        proxy.drop_next_reply(f"/v1/remote/{call}".encode())
        async with running(proxy.address, *command):
            await until(partial(is_completed, engine, shout), "its end")
        assert proxy.dropped == 1
    assert await engine.backend.reads.read_total_attempt_count(shout) == 1
    return shout


@pytest.mark.parametrize("call", ["claim", "frames", "complete"])
async def test_node_repeats_what_gets_no_answer(
    engine: Engine, http: Http, node_worker: list[str], call: str
) -> None:
    shout = await repeats(engine, http, call, *node_worker)
    page = await engine.backend.streams.read_stream(shout, 0)
    assert [frame.text for frame in page.frames] == ["shouting a"]


@pytest.mark.timeout(_BUILD_S + 60)
@pytest.mark.parametrize("call", ["claim", "complete"])
async def test_go_repeats_what_gets_no_answer(
    engine: Engine, http: Http, go_worker: list[str], call: str
) -> None:
    await repeats(engine, http, call, *go_worker)


async def resends(
    engine: Engine, http: Http, monkeypatch: pytest.MonkeyPatch, *command: str
) -> None:
    """The server cannot reach its store for one row: the worker sends the item again."""
    faults, fail = [TransportError("timeout", "no reply")], engine.backend.executions.fail

    async def faulty(*given: Any, **options: Any) -> Any:
        if faults:
            raise faults.pop()
        return await fail(*given, **options)

    monkeypatch.setattr(engine.backend.executions, "fail", faulty)
    (refused,) = await submit(engine.backend, kind="refuse")
    async with running(http.address, *command):
        await until(partial(is_failed, engine, refused), "its end", timeout=5)
    assert faults == []


async def is_failed(engine: Engine, execution_id: ExecutionId) -> bool:
    return await state(engine.backend, execution_id) == "failed"


async def test_node_resends_a_row(
    engine: Engine, http: Http, node_worker: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await resends(engine, http, monkeypatch, *node_worker)


@pytest.mark.timeout(_BUILD_S + 60)
async def test_go_resends_a_row(
    engine: Engine, http: Http, go_worker: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await resends(engine, http, monkeypatch, *go_worker)


@pytest.mark.timeout(_BUILD_S + 60)
async def test_go(engine: Engine, http: Http, go_worker: list[str]) -> None:
    await works(engine, http, *go_worker)


@pytest.mark.timeout(_BUILD_S + 60)
async def test_go_renews(engine: Engine, http: Http, go_worker: list[str]) -> None:
    await naps(engine, http, *go_worker)


def test_the_go_example_is_formatted() -> None:
    gofmt = shutil.which("gofmt")
    if gofmt is None:
        pytest.skip("there is no gofmt command")
    command = [gofmt, "-l", str(EXAMPLES)]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b""
