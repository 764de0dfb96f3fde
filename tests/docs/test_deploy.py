"""The steps of docs/how-to/deploy-on-valkey.md, on a server that is not ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connection import dial
from tests.docs.markdown import blocks
from tests.docs.scratch import run_python
from tests.support.acl import PAGE, documented_users, login
from tests.support.server import TestServer, free_port

COMMAND_LINE = "from flowfabric.cli.main import main; main()"
PROGRAM = """
import asyncio
import flowfabric as ff

app = ff.Fabric()

@app.task(retry=ff.Retry(2, backoff="50ms"))
async def flaky(ctx: ff.Context) -> int:
    if ctx.attempt == 1:
        raise ConnectionError
    return ctx.attempt

async def main() -> None:
    async with app, app.worker():
        print(await (await app.submit(flaky)).result(timeout=20))

asyncio.run(main())
"""


@pytest.fixture
def server() -> Iterator[TestServer]:
    external = TestServer("--appendonly", "yes", port=free_port())
    yield external
    external.stop()


async def test_the_documented_users_are_enough(server: TestServer, tmp_path: Path) -> None:
    admin = await dial(parse_url(server.url))
    for rule in documented_users().values():
        await admin.call(*rule)
    await admin.aclose()
    operator, worker = (
        login(f"valkey://127.0.0.1:{server.port}", user) for user in ("ff-operator", "ff-worker")
    )
    printed = run_python(tmp_path, "-c", COMMAND_LINE, "doctor", "--prepare", FF_URL=operator)
    assert "No check failed" in printed
    assert run_python(tmp_path, "-c", PROGRAM, FF_URL=worker) == "2\n"
    assert not (tmp_path / ".flowfabric").exists()


async def test_a_server_must_be_prepared(server: TestServer, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"flowfabric doctor --prepare"):
        run_python(tmp_path, "-c", PROGRAM, FF_URL=server.url)


async def test_the_recommended_settings_satisfy_doctor(tmp_path: Path) -> None:
    (settings,) = [b.text for b in blocks(PAGE) if b.text.startswith("maxmemory-policy")]
    options = [word for line in settings.splitlines() for word in f"--{line}".split()]
    server = TestServer(*options)
    try:
        printed = run_python(tmp_path, "-c", COMMAND_LINE, "doctor", "--prepare", FF_URL=server.url)
    finally:
        server.stop()
    assert re.search(r"✓ eviction .*noeviction", printed)
    assert re.search(r"✓ persistence .*everysec", printed)
