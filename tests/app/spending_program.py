"""A worker process for tests: `python -m tests.app.spending_program <url>`; tells what it holds."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import flowfabric as ff

HELD, SPENT = 10, 7


def tell(text: str) -> None:
    """One line for the test that started this process."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def application(url: str) -> tuple[ff.Fabric, ff.Task[..., Any]]:
    """An application with one task that holds more than it spends."""
    app = ff.Fabric(url)

    @app.task(lane="agents")
    async def agent(ctx: ff.Context, steps: int) -> int:
        async with ctx.reserve("fleet", tokens=HELD) as hold:
            tell("holding")
            for _ in range(steps):
                # Long enough that a kill finds it holding.
                await asyncio.sleep(0.02)
            await hold.settle(tokens=SPENT)
        return ctx.attempt

    return app, agent


async def main(url: str) -> None:
    """Serve until killed."""
    app, _ = application(url)
    await app.worker(lease_ttl=1, concurrency=4).run(ready=lambda: tell("ready"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
