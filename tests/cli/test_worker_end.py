"""`flowfabric worker` stops on request, whatever its handlers do."""

from __future__ import annotations

import signal
import time

import pytest

from flowfabric.core.state import PublicState
from flowfabric.sdk.client import Client
from tests.support.command import Cli, busy_worker
from tests.support.server import TestServer

APP = """
import asyncio, ctypes, multiprocessing, time
import flowfabric as ff

app = ff.Fabric()


@app.task()
async def stubborn() -> None:
    print("handler started")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


@app.task()
async def threaded() -> None:
    print("handler started")
    await asyncio.to_thread(time.sleep, 3600)


@app.task()
async def blocks() -> None:
    print("handler started")
    time.sleep(3600)


@app.task()
async def blocks_in_c() -> None:
    # No signal handler of Python runs in the meantime.
    print("handler started")
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


@app.task()
def has_children() -> int:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
    child.start()
    child.terminate()
    child.join()
    return child.exitcode
"""


@pytest.fixture
def shop(cli: Cli) -> Cli:
    (cli.folder / "shop.py").write_text(APP)
    return cli


@pytest.mark.parametrize("kind", ["stubborn", "threaded"])
async def test_what_cannot_be_stopped_does_not_keep_the_process(
    shop: Cli, client: Client, kind: str
) -> None:
    """Its work is given back first."""
    async with busy_worker(shop, client, kind, "--grace", "10ms") as (running, execution_id):
        running.send(signal.SIGTERM)
        done = await running.end()
    assert done.code == 0
    assert "1 released." in done.lines[-1]
    named = f"stubborn {execution_id.short} ignored its cancellation" in done.out
    assert named == (kind == "stubborn")
    state = await client.backend.reads.read_execution_state(execution_id)
    assert state is PublicState.WAITING


@pytest.mark.parametrize("kind", ["blocks", "blocks_in_c"])
async def test_a_blocked_event_loop_does_not_keep_the_process(
    shop: Cli, client: Client, kind: str
) -> None:
    async with busy_worker(shop, client, kind, "--grace", "10ms") as (running, execution_id):
        running.send(signal.SIGTERM)
        await running.line("stopping: waiting up to ")
        await running.line("a task still blocks the event loop after the grace period")
        done = await running.end()
    assert done.code == 128 + signal.SIGTERM
    state = await client.backend.reads.read_execution_state(execution_id)
    assert state is PublicState.WAITING


@pytest.mark.parametrize("kind", ["blocks", "blocks_in_c"])
async def test_a_second_signal_ends_a_blocked_process_at_once(
    shop: Cli, client: Client, kind: str
) -> None:
    async with busy_worker(shop, client, kind) as (running, _):
        running.send(signal.SIGTERM)
        await running.line("stopping: waiting up to ")
        running.send(signal.SIGINT)
        assert (await running.end()).code == 128 + signal.SIGINT


async def test_signals_end_a_forked_child_and_its_worker_continues(
    shop: Cli, client: Client
) -> None:
    async with shop.start("worker", "shop:app") as running:
        await running.line("Ready.")
        for _ in range(2):
            submitted = await client.submit("has_children")
            outcome = await client.wait(submitted.execution_id, timeout=30)
            assert outcome.result == str(-signal.SIGTERM).encode()
        running.send(signal.SIGTERM)
        done = await running.end()
    assert done.code == 0
    assert "2 completed" in done.lines[-1]


async def test_an_idle_worker_does_not_wait_for_an_unreachable_server(shop: Cli) -> None:
    server = TestServer("--appendonly", "yes")
    url = server.url
    try:
        prepared = await shop("doctor", "--prepare", "--url", url)
        assert prepared.code == 0, prepared.err
        async with shop.start("worker", "shop:app", "--url", url) as running:
            await running.line("this process runs the scanners")
            server.kill()
            asked = time.monotonic()
            running.send(signal.SIGTERM)
            done = await running.end()
            # One call after the other that waits for a connection would be three times as much.
            assert time.monotonic() - asked < 5
    finally:
        server.stop()
    assert done.code == 0
    assert "0 tasks." in done.lines[-1]


async def test_a_task_the_app_does_not_have_waits(shop: Cli, client: Client) -> None:
    execution_id = (await client.submit("of_the_next_version")).execution_id
    async with shop.start("worker", "shop:app", "--no-scanners") as running:
        await running.line('does not know task "of_the_next_version"')
        shown = await shop("show", str(execution_id))
        assert 'no live worker knows task "of_the_next_version" (last offered to ' in shown.out
        running.send(signal.SIGTERM)
        done = await running.end()
    assert done.code == 0
    assert "0 tasks." in done.lines[-1]
    state = await client.backend.reads.read_execution_state(execution_id)
    assert state.value == "waiting"


async def test_it_can_be_failed(shop: Cli, client: Client) -> None:
    submitted = await client.submit("misspelt")
    options = ("worker", "shop:app", "--no-scanners", "--on-unknown", "fail")
    async with shop.start(*options) as running:
        await client.wait(submitted.execution_id, timeout=20)
        running.send(signal.SIGTERM)
        done = await running.end()
    assert done.code == 0
    assert "1 failed." in done.lines[-1]
