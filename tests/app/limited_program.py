"""A worker process for tests: `python -m tests.app.limited_program <url>`; its task has a quota."""

from __future__ import annotations

import asyncio
import sys

import flowfabric as ff
from tests.app.spending_program import tell

QUOTA = "calls"


def application(url: str) -> tuple[ff.Fabric, ff.Task[[int], int]]:
    """An application with one task that fails now and then."""
    app = ff.Fabric(url)

    @app.task(quota=QUOTA, retry=ff.Retry(5, "500ms"))
    async def call(ctx: ff.Context, number: int) -> int:
        tell("started")
        await asyncio.sleep(0.03)
        if ctx.attempt == 1 and number % 4 == 0:
            raise ConnectionError
        return number

    return app, call


async def main(url: str) -> None:
    """Serve until killed."""
    app, _ = application(url)
    await app.worker(lease_ttl=1, concurrency=4).run(ready=lambda: tell("ready"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
