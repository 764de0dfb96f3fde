"""Worker processes for tests: `python -m tests.support.programs <what> <url> <folder>`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import flowfabric as ff


def note(folder: str, text: str) -> None:
    """Append a line that the test reads; one write, so lines of several processes stay whole."""
    with (Path(folder) / "notes").open("a") as file:
        file.write(f"{text}\n")


def application(url: str, folder: str) -> ff.Fabric:
    """Tasks that say what happens to them."""
    app = ff.Fabric(url)

    @app.task()
    async def quick(number: int) -> int:
        note(folder, f"quick {number} {os.getpid()}")
        return number

    @app.task()
    async def patient(ctx: ff.Context) -> str:
        """Ends when it is told that the worker stops."""
        note(folder, f"started {ctx.attempt} {ctx.lease_epoch}")
        while not ctx.shutting_down:  # noqa: ASYNC110 - the context has no event
            await asyncio.sleep(0.005)
        note(folder, "told")
        return "finished in time"

    @app.task()
    async def endless(ctx: ff.Context) -> None:
        note(folder, f"started {ctx.attempt} {ctx.lease_epoch}")
        if ctx.lease_epoch == 1:
            await asyncio.Event().wait()

    @app.task()
    async def blocking(ctx: ff.Context) -> None:
        note(folder, f"started {ctx.attempt} {ctx.lease_epoch}")
        time.sleep(60)  # noqa: ASYNC251 - the point of the test

    @app.task()
    def stubborn(ctx: ff.SyncContext) -> None:
        note(folder, f"started {ctx.attempt} {ctx.lease_epoch}")
        time.sleep(60)

    for task in (quick, patient, endless, blocking, stubborn):
        assert task.name
    return app


def run(url: str, folder: str, **options: Any) -> None:
    """Serve until a signal; the summary is the last line."""
    app = application(url, folder)

    async def main() -> None:
        worker = app.worker(concurrency=2, lease_ttl=1)
        try:
            summary = await worker.run(ready=lambda: note(folder, "ready"), **options)
        finally:
            await app.aclose()
        note(folder, f"summary {summary!r}")

    asyncio.run(main())


if __name__ == "__main__":
    given: dict[str, Any] = {}
    for option in sys.argv[3:]:
        name, _, value = option.partition("=")
        given[name] = float(value) if name == "grace_s" else value
    run(sys.argv[1], sys.argv[2], **given)
