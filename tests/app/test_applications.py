"""Applications and versions of one application that share a server and the default lane."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import flowfabric as ff
from tests.support.command import Cli, Running
from tests.support.engine import Engine
from tests.support.server import TestServer


def shop(url: str) -> ff.Fabric:
    app = ff.Fabric(url, namespace="shop")

    @app.task(name="ship")
    async def ship(order: int) -> str:
        return f"shipped {order}"

    return app


def mailer(url: str) -> ff.Fabric:
    app = ff.Fabric(url, namespace="mailer")

    @app.task(name="mail")
    async def mail(number: int) -> str:
        return f"sent {number}"

    return app


async def attempts(run: ff.Run[object]) -> int:
    return (await run.info()).total_attempt_count


async def test_an_application_ignores_the_backlog_of_another(
    engine: Engine, valkey: TestServer
) -> None:
    async with shop(valkey.url) as ours, mailer(valkey.url) as theirs:
        backlog = await ours.submit_many("ship", [[n] for n in range(1200)])
        async with theirs.worker(scanners=False):
            letter = await theirs.submit("mail", 1)
            assert await letter.result(timeout="5s") == "sent 1"
            assert {await run.state() for run in backlog[::100]} == {"waiting"}
            assert [await attempts(run) for run in backlog[::100]] == [0] * 12
            # And with both at work.
            async with ours.worker(scanners=False):
                letters = await theirs.submit_many("mail", [[n] for n in range(200)])
                sent = await asyncio.gather(*(run.result(timeout="20s") for run in letters))
                shipped = await asyncio.gather(*(run.result(timeout="20s") for run in backlog))
        some = [letter, *letters[::10], *backlog[::100]]
        assert {await attempts(run) for run in some} == {1}
    assert sent == [f"sent {n}" for n in range(200)]
    assert shipped == [f"shipped {n}" for n in range(1200)]


SHOP = """
import flowfabric as ff

app = ff.Fabric()


@app.task
async def ship(order: int) -> str:
    return f"shipped {order} by version 1"
"""
SHOP_WITH_REFUNDS = """
import flowfabric as ff

app = ff.Fabric()


@app.task
async def ship(order: int, express: bool = False) -> str:
    return f"shipped {order} by version 2"


@app.task
async def refund(order: int) -> str:
    return f"refunded {order}"
"""


@contextlib.asynccontextmanager
async def customers(app: ff.Fabric) -> AsyncGenerator[list[ff.Run[str]]]:
    """They order and ask for refunds until the block ends; each order must be shipped at once.

    The web process knows the new version before any worker does.
    """
    runs: list[ff.Run[str]] = []
    closing = asyncio.Event()

    async def order() -> None:
        while not closing.is_set():
            number = len(runs) // 2
            runs.append(await app.submit("ship", number))
            runs.append(await app.submit("refund", number))
            await runs[-2].result(timeout="20s")

    ordering = asyncio.create_task(order())
    try:
        yield runs
    finally:
        closing.set()
        await ordering


async def test_a_rolling_deploy_loses_nothing_and_fails_nothing(
    engine: Engine, valkey: TestServer, tmp_path: Path
) -> None:
    """Two worker processes of one version of `shop.py` are replaced by two of the next."""
    async with ff.Fabric(valkey.url) as app, contextlib.AsyncExitStack() as machines:

        async def start(source: str, number: int) -> Running:
            folder = tmp_path / f"machine-{number}"
            folder.mkdir()
            (folder / "shop.py").write_text(source)
            cli = Cli(folder, FF_URL=valkey.url)
            worker = await machines.enter_async_context(cli.start("worker", "shop:app"))
            await worker.line("Ready.")
            return worker

        old = [await start(SHOP, number) for number in (1, 2)]
        async with customers(app) as runs:
            for number, leaving in enumerate(old, 3):
                await start(SHOP_WITH_REFUNDS, number)
                leaving.send(signal.SIGTERM)
                assert (await leaving.end()).code == 0
        results = await asyncio.gather(*(run.result(timeout="20s") for run in runs))
        assert set(await asyncio.gather(*map(attempts, runs))) == {1}
    shipped, refunded = results[::2], results[1::2]
    assert refunded == [f"refunded {number}" for number in range(len(refunded))]
    orders, versions = zip(*(text.split(" by ") for text in shipped), strict=True)
    assert list(orders) == [f"shipped {number}" for number in range(len(shipped))]
    assert {versions[0], versions[-1]} == {"version 1", "version 2"}


async def test_an_application_may_fail_them_instead(engine: Engine, valkey: TestServer) -> None:
    async with mailer(valkey.url) as app:
        run = await app.submit("misspelt")
        async with app.worker(on_unknown_kind="fail"):
            outcome = await run.wait(timeout="10s")
    assert outcome.state == "failed"
