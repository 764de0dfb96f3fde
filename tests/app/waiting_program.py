"""A worker process for tests: `python -m tests.app.waiting_program <url>`; tells what it does."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import flowfabric as ff


def tell(text: str) -> None:
    """One line for the test that started this process."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def application(url: str) -> tuple[ff.Fabric, ff.Task[..., Any]]:
    """An application with one task that asks twice and works in between."""
    app = ff.Fabric(url)

    @app.task()
    async def ask(ctx: ff.Context) -> list[Any]:
        tell(f"start {ctx.attempt} {ctx.lease_epoch}")
        await ctx.stream(f"start of {os.getpid()}")
        first = await ctx.wait_for("a")
        tell("between")
        if ctx.attempt == 1 and first.payload == "hold":
            await asyncio.Event().wait()
        second = await ctx.wait_for("b")
        return [first.name, second.name, ctx.attempt]

    return app, ask


async def main(url: str) -> None:
    """Serve until killed."""
    app, _ = application(url)
    await app.worker(lease_ttl=1).run(ready=lambda: tell("ready"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
