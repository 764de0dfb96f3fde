"""An outage is two lines in the log of a worker, whatever the worker was doing."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from flowfabric.sdk.task import ClaimedTask
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import serving, submit, until


async def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    engine: Engine,
    make_worker: MakeWorker,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some tasks end during it, and some lose their lease."""
    caplog.set_level(logging.INFO)
    gate = asyncio.Event()

    async def quick(_: ClaimedTask) -> None:
        await gate.wait()

    async def endless(task: ClaimedTask) -> None:
        if task.attempt_index == 0:
            await asyncio.Event().wait()

    for kind in ("quick", "endless"):
        for _ in range(3):
            await submit(engine.backend, kind=kind)
    worker = await make_worker(
        proxy.url, scanners=True, max_concurrent_tasks=8, lease_ttl_ms=1_000, request_timeout=0.3
    )
    async with serving(worker, {"quick": quick, "endless": endless}) as runtime:
        await until(lambda: worker.free == 2, "the start of all")
        await until(lambda: "scanners started" in caplog.text, "the scanners")
        caplog.clear()
        proxy.down()
        gate.set()
        await until(lambda: runtime.summary.abandoned == 6, "the loss of all", 30)
        await until(lambda: bool(said(caplog)), "the first line", 30)
        proxy.up()
        await until(lambda: len(said(caplog)) == 2, "the second line", 30)
    began, ended = said(caplog)
    assert began["message"].startswith("cannot reach Valkey, trying again: ")
    assert ended["message"].startswith("Valkey answers again after ")
    assert {began["levelname"], ended["levelname"]} == {"WARNING"}


def said(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """All that is not routine."""
    return [vars(record) for record in caplog.records if record.levelno > logging.INFO]
