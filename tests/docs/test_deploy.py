"""The steps of docs/how-to/deploy-on-valkey.md, on a server that is not ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connect import connect
from tests.docs.markdown import ROOT, blocks
from tests.docs.scratch import run_python
from tests.support.server import TestServer, free_port

PAGE = ROOT / "docs" / "how-to" / "deploy-on-valkey.md"
COMMAND_LINE = "from flowfabric.cli.main import main; main()"
PROGRAM = """
import asyncio
import flowfabric as ff

app = ff.Fabric()

@app.task(retry=ff.Retry(2, backoff="50ms"))
async def flaky(ctx: ff.Context) -> int:
    if ctx.attempt == 0:
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


def acl_rule() -> list[str]:
    """The user that the page recommends."""
    (rule,) = [b.text for b in blocks(PAGE) if b.text.startswith("ACL SETUSER")]
    return rule.split()


async def test_a_restricted_user_is_enough(server: TestServer, tmp_path: Path) -> None:
    rule = acl_rule()
    operator = await connect(parse_url(server.url))
    await operator.call(*rule, key="")
    await operator.aclose()
    user, password = rule[2], rule[4].removeprefix(">")
    url = f"valkey://{user}:{password}@127.0.0.1:{server.port}/0"
    printed = run_python(tmp_path, "-c", COMMAND_LINE, "doctor", "--prepare", FF_URL=url)
    assert "Nothing is broken" in printed
    assert run_python(tmp_path, "-c", PROGRAM, FF_URL=url) == "1\n"
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
