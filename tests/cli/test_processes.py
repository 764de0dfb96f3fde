"""`flowfabric worker --processes N`."""

from __future__ import annotations

import os
import re
import signal
from contextlib import AbstractAsyncContextManager

import pytest

from flowfabric.sdk.client import Client
from tests.support.command import Cli, Running

APP = """
import asyncio, os
import flowfabric as ff

app = ff.Fabric()


@app.task()
async def pid() -> int:
    return os.getpid()


@app.task()
async def until_stopped(ctx: ff.Context) -> int:
    print(f"handler started in {os.getpid()}")
    while not ctx.shutting_down:
        await asyncio.sleep(0.01)
    return os.getpid()


@app.task()
async def until_released() -> None:
    print(f"handler started in {os.getpid()}")
    while not os.path.exists("released"):
        await asyncio.sleep(0.01)


@app.task()
async def forever() -> None:
    print(f"handler started in {os.getpid()}")
    await asyncio.Event().wait()
"""
READY = "All 2 processes are ready."


@pytest.fixture
def shop(cli: Cli) -> Cli:
    (cli.folder / "shop.py").write_text(APP)
    return cli


def two(shop: Cli, *options: str) -> AbstractAsyncContextManager[Running]:
    return shop.start("worker", "shop:app", "--processes", "2", *options)


async def handler_process(running: Running) -> int:
    """The pid of the process whose handler starts next."""
    return int((await running.line("handler started in ")).rpartition(" ")[2])


async def test_a_process_that_dies_is_replaced(shop: Cli, client: Client) -> None:
    async with two(shop, "--concurrency", "1", "--lease-ttl", "1s") as running:
        await running.line(READY)
        assert any(line.split() == ["processes", "2"] for line in running.seen)
        for _ in range(2):
            await client.submit("forever")
        first, second = [await handler_process(running) for _ in range(2)]
        assert first != second
        os.kill(first, signal.SIGKILL)
        died = await running.line("was killed by SIGKILL, restarting in ")
        assert re.search(r"WARNING worker [12] was killed by SIGKILL, restarting in 500 ms$", died)
        assert await handler_process(running) not in (first, second)
        os.kill(second, signal.SIGKILL)
        await handler_process(running)
        running.send(signal.SIGINT)
        # Two signals at once may arrive as one.
        await running.line("for 1 task (forever ×1)")
        running.send(signal.SIGINT)
        await running.end()
    labels = re.findall(r"INFO +\[(\d)\] worker \S+ serves", "\n".join(running.seen))
    assert sorted(labels) == ["1", "1", "2", "2"]


async def test_one_signal_lets_all_processes_finish(shop: Cli, client: Client) -> None:
    async with two(shop, "--concurrency", "1", "--log-level", "error") as running:
        await running.line(READY)
        ids = [(await client.submit("until_stopped")).execution_id for _ in range(2)]
        pids = {await handler_process(running) for _ in range(2)}
        # As a service manager does: to the supervisor and to all of its processes.
        running.send(signal.SIGTERM)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        done = await running.end()
    assert done.code == 0
    assert {int(await client.result_now(each) or 0) for each in ids} == pids
    assert "stopping: waiting for 2 workers" in done.out
    for number in (1, 2):
        waits = rf"\[{number}\] stopping: waiting up to 30 s for 1 task \(until_stopped ×1\)"
        ended = rf"\[{number}\] stopped after .*: 1 completed"
        assert re.search(f"{waits}(.|\n)*{ended}", done.out)
    assert "stopped after " in done.lines[-1]
    assert await client.backend.workers.list_workers() == []


async def test_a_late_copy_of_the_signal_is_not_a_second_one(shop: Cli, client: Client) -> None:
    async with two(shop, "--concurrency", "1") as running:
        await running.line(READY)
        for _ in range(2):
            await client.submit("until_released")
        pids = {await handler_process(running) for _ in range(2)}
        running.send(signal.SIGTERM)
        for _ in pids:
            await running.line("for 1 task (until_released ×1)")
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        (shop.folder / "released").touch()
        done = await running.end()
    assert done.code == 0
    assert len(re.findall("stopped after .*: 1 completed", done.out)) == 2


async def test_a_second_signal_ends_all_at_once(shop: Cli, client: Client) -> None:
    async with two(shop, "--grace", "1h") as running:
        await running.line(READY)
        await client.submit("forever")
        await handler_process(running)
        running.send(signal.SIGINT)
        await running.line("for 1 task (forever ×1)")
        running.send(signal.SIGINT)
        # Its output ends when no process holds it any longer.
        done = await running.end()
    assert done.code == 128 + signal.SIGINT
    assert "Traceback" not in done.out


async def test_a_signal_during_the_start_stops_all(shop: Cli) -> None:
    async with shop.start("worker", "shop:app", "--processes", "4") as running:
        await running.line("processes")
        running.send(signal.SIGTERM)
        done = await running.end()
    # A process that has not started serving ends by the signal itself.
    assert done.code in (0, 128 + signal.SIGTERM)
    assert "restarting" not in done.out


async def test_the_worst_exit_status_counts(shop: Cli, client: Client) -> None:
    async with two(shop, "--grace", "1h") as running:
        await running.line(READY)
        await client.submit("forever")
        pid = await handler_process(running)
        running.send(signal.SIGTERM)
        await running.line("for 1 task (forever ×1)")
        os.kill(pid, signal.SIGKILL)
        assert (await running.end()).code == 128 + signal.SIGKILL


async def test_no_process_outlives_a_supervisor_that_was_killed(shop: Cli, client: Client) -> None:
    """They stop as after a signal: what runs may finish."""
    async with two(shop) as running:
        await running.line(READY)
        submitted = await client.submit("until_stopped")
        pid = await handler_process(running)
        running.send(signal.SIGKILL)
        done = await running.end()
    assert done.code == -signal.SIGKILL
    assert done.out.count("stopping: the supervisor process has exited") == 2
    assert await client.result_now(submitted.execution_id) == str(pid).encode()


async def test_an_application_that_cannot_be_loaded_is_reported_once(shop: Cli) -> None:
    done = await shop("worker", "sohp:app", "--processes", "3")
    assert done.code == 1
    assert done.err.count("error: import: no module named 'sohp'") == 1
    assert "restarting" not in done.err
