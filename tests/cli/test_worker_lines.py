"""What the log of `flowfabric worker` says to people, and to machines."""

from __future__ import annotations

import json
import re
import signal

import pytest

from flowfabric.core.policy import parse_policy
from flowfabric.sdk.client import Client
from tests.support.command import Cli, Running, busy_worker

APP = """
import asyncio
import flowfabric as ff

app = ff.Fabric()


@app.task()
async def resize(ctx: ff.Context, width: int) -> int:
    if width > 100:
        ctx.log.warning("very wide", extra={"width": width})
    return width


@app.task()
async def call() -> None:
    raise ConnectionError("no route to host")


@app.task()
async def forever() -> None:
    print("handler started")
    await asyncio.Event().wait()


@app.task()
async def slow() -> None:
    await asyncio.Event().wait()
"""
RETRIED = parse_policy(
    {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 50}}}
)
LIMITED = parse_policy({"timeout_policy": {"attempt_timeout_ms": 50}})


@pytest.fixture
def shop(cli: Cli) -> Cli:
    (cli.folder / "shop.py").write_text(APP)
    return cli


async def stopped(running: Running) -> list[str]:
    """Stop the worker; the lines that it logged, without time and banner."""
    running.send(signal.SIGTERM)
    done = await running.end()
    assert done.code == 0
    return [line[13:] for line in done.lines if re.match(r"\d\d:\d\d:\d\d\.\d{3} ", line)]


def about(lines: list[str], part: str) -> list[str]:
    return [line for line in lines if part in line]


async def test_a_failed_attempt_is_one_line_and_the_last_one_has_a_traceback(
    shop: Cli, client: Client
) -> None:
    async with shop.start("worker", "shop:app") as running:
        await running.line("Ready.")
        failed = (await client.submit("call", policy=RETRIED)).execution_id
        await client.wait(failed, 20)
        await running.line("(attempt 2")
        lines = await stopped(running)
    first, last = about(lines, f"call {failed.short} ")
    assert re.fullmatch(
        r"WARNING call \S+ failed: ConnectionError: no route to host "
        r"\(attempt 1, \d+ ms, retrying in \d+ ms\)",
        first,
    )
    assert re.fullmatch(r"ERROR   call \S+ failed: .* \(attempt 2, \d+ ms\)", last)
    assert len(re.findall("Traceback", "\n".join(running.seen))) == 1


async def test_successes_are_counted_every_second(shop: Cli, client: Client) -> None:
    async with shop.start("worker", "shop:app") as running:
        await running.line("Ready.")
        for _ in range(5):
            await client.submit("resize", b"[80]")
        wide = (await client.submit("resize", b"[800]")).execution_id
        assert await client.result(wide, 20) == b"800"
        counts = [await running.line(" in the last second")]
        while sum(int(re.findall(r"(\d+) completed", line)[0]) for line in counts) < 6:
            counts.append(await running.line(" in the last second"))
        lines = await stopped(running)
    assert about(lines, "succeeded") == []
    assert about(lines, "resize") == [
        f"WARNING resize {wide.short}: very wide (attempt 1)  width=800"
    ]


async def test_at_debug_every_success_has_its_line(shop: Cli, client: Client) -> None:
    async with shop.start("worker", "shop:app", "--log-level", "debug") as running:
        await running.line("Ready.")
        done = (await client.submit("resize", b"[80]")).execution_id
        line = await running.line("succeeded")
        await stopped(running)
    assert re.search(rf"DEBUG   resize {done.short} succeeded \(attempt 1, \d+ ms\)$", line)


async def test_a_cancellation_and_a_timeout_say_what_they_are(shop: Cli, client: Client) -> None:
    async with busy_worker(shop, client, "forever", "--lease-ttl", "1s") as (running, cancelled):
        await client.cancel(cancelled, "no longer needed")
        line = await running.line("forever ")
        assert re.search(r"INFO .* stopped: the execution was cancelled \(attempt 1, [\d.]+ ", line)
        await client.submit("slow", policy=LIMITED)
        assert re.search(r"ERROR .* timed out \(attempt 1, \d+ ms\)", await running.line("slow "))
        lines = await stopped(running)
    assert "1 failed, 1 cancelled." in running.seen[-1]
    assert about(lines, "ERROR") == about(lines, "slow ")


async def test_json_keeps_every_field(shop: Cli, client: Client) -> None:
    async with shop.start("worker", "shop:app", "--json", "--capabilities", "gpu,cuda") as one:
        await one.line("worker_ready")
        failed = (await client.submit("call", policy=RETRIED)).execution_id
        await client.wait(failed, 20)
        one.send(signal.SIGTERM)
        done = await one.end()
    records = [json.loads(line) for line in done.lines]
    (connected,) = [r for r in records if r["action"] == "worker_connected"]
    assert connected["capabilities"] == "cuda,gpu"
    attempts = [r for r in records if r["action"] == "task_failed"]
    for index, record in enumerate(attempts):
        expected = {"execution_id": failed, "attempt_index": index, "kind": "call"}
        expected |= {"lane": "default", "worker_caps_hash": "c952a6c4"}
        assert record | expected == record
        assert record["duration_ms"] >= 0
        assert "ConnectionError: no route to host" in record["exception"]
    assert len(attempts) == 2
    (ended,) = [r for r in records if r["action"] == "execution_ended"]
    assert (ended["execution_id"], ended["outcome"]) == (failed, "failed")


@pytest.mark.parametrize("level", ["debug", "error"])
async def test_stopping_is_announced_at_every_level(shop: Cli, client: Client, level: str) -> None:
    options = ("--log-level", level, "--grace", "300ms")
    async with busy_worker(shop, client, "forever", *options) as (running, _):
        lines = await stopped(running)
    said = about(lines, "stopping: ")
    assert said[0] == "INFO    stopping: waiting up to 300 ms for 1 task (forever ×1)"
    assert said[1] == ("WARNING stopping: the grace period is over, cancelling 1 task (forever ×1)")
    assert re.fullmatch(r"INFO +stopping: no task is running after \d+ ms \(1 released\)", said[2])
    assert "1 released." in running.seen[-1]
