"""What a worker logs never holds it up."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import flowfabric as ff
from tests.support.command import COMMAND, Cli
from tests.support.server import TestServer

APP = """
import logging
import flowfabric as ff

app = ff.Fabric()


@app.task()
async def chatty(lines: int) -> int:
    for number in range(lines):
        logging.getLogger("shop").warning("%5d %s", number, "x" * 200)
    return lines
"""
LINES = 12_000


def read_until_dropped(descriptor: int) -> str:
    """Everything that comes, up to the line that counts what was dropped."""
    seen = bytearray()
    while not re.search(rb"dropped \d+ log lines.*\n", seen[-100_000:]):
        data = os.read(descriptor, 1 << 16)
        assert data, f"it ends with {seen[-1000:]}"
        seen += data
    return seen.decode()


async def test_an_unread_pipe_blocks_neither_work_nor_shutdown(
    cli: Cli, valkey: TestServer
) -> None:
    """A pipe holds 64 KiB, the worker keeps 10,000 lines, and counts what it drops."""
    (cli.folder / "shop.py").write_text(APP)
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(COMMAND, "worker", "shop:app", "--grace", "100ms"),
        cwd=cli.folder,
        env=cli.environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=writing,
    )
    os.close(writing)
    try:
        async with ff.Fabric(valkey.url) as app:
            run: ff.Run[int] = await app.submit("chatty", LINES)
            assert await run.result(timeout=20) == LINES
            seen = await asyncio.to_thread(read_until_dropped, reading)
            again: ff.Run[int] = await app.submit("chatty", LINES)
            assert await again.result(timeout=20) == LINES
        kept = [int(number) for number in re.findall(r"WARNING\s+(\d+) x", seen)]
        (dropped,) = re.findall(r"dropped (\d+) log lines: standard error was", seen)
        assert kept[:10_000] == list(range(10_000))
        assert int(dropped) <= LINES - 10_000
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            assert await process.wait() == 0
    finally:
        os.close(reading)
        if process.returncode is None:
            process.kill()
            await process.wait()
