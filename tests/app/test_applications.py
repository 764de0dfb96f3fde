"""Applications and versions of one application that share a server and the default lane."""

from __future__ import annotations

import asyncio
import contextlib

import flowfabric as ff
from tests.support.engine import Engine
from tests.support.server import TestServer


def shop(url: str) -> ff.Fabric:
    app = ff.Fabric(url, namespace="shop")

    @app.task(name="ship")
    async def ship(order: int) -> str:
        return f"shipped {order}"

    return app


def shop_with_refunds(url: str) -> ff.Fabric:
    """The next version: it knows one more task."""
    app = shop(url)

    @app.task(name="refund")
    async def refund(order: int) -> str:
        return f"refunded {order}"

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


async def test_a_rolling_deploy_loses_nothing_and_fails_nothing(
    engine: Engine, valkey: TestServer
) -> None:
    async with shop(valkey.url) as old, shop_with_refunds(valkey.url) as new:
        runs: list[ff.Run[object]] = []

        async def submit_some() -> None:
            for n in range(25):
                runs.append(await old.submit("ship", n))
                runs.append(await new.submit("refund", n))

        async with contextlib.AsyncExitStack() as upgraded:
            async with old.worker(scanners=False):
                async with old.worker(scanners=False):
                    # The web process is upgraded before the workers are.
                    await submit_some()
                    await upgraded.enter_async_context(new.worker(scanners=False))
                    await submit_some()
                await upgraded.enter_async_context(new.worker(scanners=False))
                await submit_some()
            await submit_some()
            results = await asyncio.gather(*(run.result(timeout="20s") for run in runs))
            assert {await attempts(run) for run in runs} == {1}
    assert results == [
        f"{what} {n}" for _ in range(4) for n in range(25) for what in ("shipped", "refunded")
    ]


async def test_an_application_may_fail_them_instead(engine: Engine, valkey: TestServer) -> None:
    async with mailer(valkey.url) as app:
        run = await app.submit("misspelt")
        async with app.worker(on_unknown_kind="fail"):
            outcome = await run.wait(timeout="10s")
    assert outcome.state == "failed"
