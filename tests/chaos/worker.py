"""A worker of a failure run: `python -m tests.chaos.worker <url> <concurrency> <lanes>`."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time

import uvloop

import flowfabric as ff


def application(url: str) -> ff.Fabric:
    """Handlers of every kind, all harmless."""
    app = ff.Fabric(url)

    @app.task()
    async def quick() -> None: ...

    @app.task()
    async def slow() -> None:
        await asyncio.sleep(random.uniform(0, 0.02))

    @app.task()
    async def flaky(ctx: ff.Context) -> None:
        if ctx.attempt == 1:
            raise ff.RetryableError("not at the first time")

    @app.task()
    def threaded() -> None:
        time.sleep(random.uniform(0, 0.005))

    assert len(app.tasks) == 4
    for task in (quick, slow, flaky, threaded):
        assert task.name in app.tasks
    return app


async def main(url: str, concurrency: int, lanes: list[str]) -> None:
    """Serve until told to stop."""
    app = application(url)
    await app.worker(concurrency=concurrency, lanes=lanes, lease_ttl=1).run(grace_s=5)
    await app.aclose()


if __name__ == "__main__":
    logging.basicConfig(level=logging.CRITICAL)
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")))
