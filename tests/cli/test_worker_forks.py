"""A process that a handler forks does not become a second worker."""

from __future__ import annotations

import asyncio
import signal

import flowfabric as ff
from tests.support.command import Cli
from tests.support.server import TestServer

APP = """
import os, signal, sys, time
import flowfabric as ff

app = ff.Fabric()


def ended(pid: int) -> int:
    for _ in range(1000):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError("the child stays")


@app.task()
def returns() -> int:
    child = os.fork()
    return ended(child) if child else 42


@app.task()
def raises() -> int:
    child = os.fork()
    if not child:
        raise ValueError("in the child")
    return ended(child)


@app.task()
def exits() -> int:
    child = os.fork()
    if not child:
        sys.exit(7)
    return ended(child)


@app.task()
def uses_the_context(ctx: ff.SyncContext) -> int:
    child = os.fork()
    if not child:
        ctx.progress(50)
    return ended(child)


@app.task()
async def returns_to_the_loop() -> int:
    child = os.fork()
    return ended(child) if child else 42
"""
STATUS = {"returns": 0, "raises": 1, "exits": 7, "uses_the_context": 1, "returns_to_the_loop": 0}


async def test_a_forked_process_that_leaves_its_handler_ends(cli: Cli, valkey: TestServer) -> None:
    """It completes nothing, and its parent goes on with the connections they shared."""
    (cli.folder / "shop.py").write_text(APP)
    async with cli.start("worker", "shop:app") as running:
        await running.line("Ready.")
        async with ff.Fabric(valkey.url) as app:
            runs: dict[str, ff.Run[int]] = {kind: await app.submit(kind) for kind in STATUS}
            results = await asyncio.gather(*(run.result(timeout=20) for run in runs.values()))
            assert dict(zip(runs, results, strict=True)) == STATUS
            for run in runs.values():
                assert (await run.info()).total_attempt_count == 1
        running.send(signal.SIGTERM)
        done = await running.end()
    assert done.code == 0
    assert done.out.count("it exits with status") == len(STATUS)
    assert "ValueError: in the child" in done.out
    assert "only its parent can use the context" in done.out
