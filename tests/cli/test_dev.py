"""`flowfabric dev` in a pseudo-terminal, on its own embedded Valkey."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from base64 import b64encode
from pathlib import Path

import pytest

from flowfabric.cli.watching import ProjectFiles
from tests.support.command import Cli
from tests.support.http import Http
from tests.support.server import TestServer
from tests.support.terminal import CTRL_C, Terminal, in_terminal, nothing_left

APP = """
import asyncio
import flowfabric as ff

app = ff.Fabric()


@app.task()
async def greet(name: str) -> str:
    return f"hello {name}"


@app.task()
async def endless() -> None:
    print("handler started")
    await asyncio.Event().wait()
"""
READY = "Ready. Ctrl-C stops everything"


@pytest.fixture
def project(tmp_path: Path) -> Cli:
    (tmp_path / "shop.py").write_text(APP)
    return Cli(tmp_path)


async def api(terminal: Terminal) -> Http:
    """The API of a `dev` that is ready."""
    await terminal.shows(READY)
    found = re.search(r"API +http://127\.0\.0\.1:(\d+)", terminal.text)
    assert found is not None
    return Http(("127.0.0.1", int(found[1])))


async def submit(http: Http, task: str, payload: bytes = b"") -> str:
    encoded = b64encode(payload).decode()
    body = {"namespace": "default", "execution_kind": task, "input_payload_b64": encoded}
    return (await http.post("/v1/executions", body)).json["Created"]["execution_id"]


async def greeting(http: Http) -> str:
    """What the handler returns now."""
    made = await submit(http, "greet", b'["bob"]')
    answer = await http.get(f"/v1/executions/{made}/result?wait_ms=30000")
    assert answer.status == 200, answer.body
    return answer.body.decode()


async def test_it_serves_reloads_and_ends_with_one_ctrl_c(project: Cli) -> None:
    shop = project.folder / "shop.py"
    async with in_terminal(project, "dev", "shop:app", "--port", "0") as terminal:
        http = await api(terminal)
        shown = [line.rstrip() for line in terminal.text.splitlines()]
        banner = {line.split()[0]: line for line in shown if line.split()}
        assert banner["docs"].endswith(f":{http.address[1]}/docs")
        assert "embedded Valkey in" in banner["deployment"]
        assert banner["tasks"].split() == ["tasks", "endless,", "greet"]
        assert "open to this machine" in banner["tokens"]
        assert (await http.get("/docs")).status == 200
        assert "hello bob" in await greeting(http)

        shop.write_text(APP.replace("hello", "howdy"))
        await terminal.shows("shop.py changed: restarting the worker")
        await terminal.shows("serving endless, greet")
        assert "howdy bob" in await greeting(http)

        shop.write_text(APP + "def (\n")
        await terminal.shows("SyntaxError: invalid syntax")
        await terminal.shows("the worker did not start; waiting for a file to change")
        assert (await http.get("/v1/workers")).json["workers"] == []
        shop.write_text(APP)
        await terminal.shows("serving endless, greet")
        assert "hello bob" in await greeting(http)

        terminal.type(CTRL_C)
        assert await terminal.end() == 0
    assert "Traceback (most" not in terminal.text
    await nothing_left(project.folder)
    with socket.socket() as probe:
        assert probe.connect_ex(http.address) != 0


async def test_a_second_ctrl_c_ends_all_at_once(project: Cli) -> None:
    command = ("dev", "shop:app", "--port", "0", "--grace", "1h", "--processes", "2")
    async with in_terminal(project, *command) as terminal:
        await submit(await api(terminal), "endless")
        await terminal.shows("handler started")
        terminal.type(CTRL_C)
        await terminal.shows("for 1 task (endless ×1)")
        terminal.type(CTRL_C)
        assert await terminal.end() == 130
    await nothing_left(project.folder)


async def test_without_reload_an_application_that_fails_ends_it(project: Cli) -> None:
    (project.folder / "shop.py").write_text("import nothing_of_that_name\n")
    done = await project("dev", "shop:app", "--port", "0", "--no-reload")
    assert done.code == 1
    assert "nothing_of_that_name" in done.err
    await nothing_left(project.folder)


async def test_an_application_that_fails_at_first_is_served_once_it_is_fixed(project: Cli) -> None:
    (project.folder / "shop.py").write_text("import parts\n")
    async with in_terminal(project, "dev", "shop:app", "--port", "0") as terminal:
        await terminal.shows("none yet: the application cannot be loaded")
        await terminal.shows("waiting for a file to change")
        (project.folder / "parts.py").touch()
        (project.folder / "shop.py").write_text(f"import parts\n{APP}")
        await terminal.shows("shop.py changed")
        await terminal.shows("serving endless, greet")
        terminal.type(CTRL_C)
        assert await terminal.end() == 0


async def test_a_port_in_use_is_an_error(project: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = await project("dev", "shop:app", "--port", str(port))
    assert done.code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.err
    assert "another process uses this port" in done.err
    assert "Traceback" not in done.err
    await nothing_left(project.folder)


async def test_a_deployment_of_the_application_s_own_is_said(cli: Cli, project: Cli) -> None:
    url = cli.environment["FF_URL"]
    # Its own: this one is prepared, and other tests need one that is not.
    other = TestServer()
    project.environment |= {"FF_URL": other.url, "FF_WAITPOINT_HMAC_SECRET": "ab" * 32}
    (project.folder / "shop.py").write_text(APP.replace("Fabric()", f"Fabric({url!r})"))
    try:
        async with in_terminal(project, "dev", "shop:app", "--port", "0") as terminal:
            await terminal.shows("set --url or FF_URL for both")
            terminal.type(CTRL_C)
            assert await terminal.end() == 0
    finally:
        other.stop()


async def test_with_json_every_line_is_an_object(project: Cli) -> None:
    async with project.start("dev", "shop:app", "--port", "0", "--json") as running:
        ready = json.loads(await running.line('"action":"dev_ready"'))
        assert ready["API"].startswith("http://127.0.0.1:")
        assert ready["tasks"] == "endless, greet"
        running.send(signal.SIGTERM)
        done = await running.end()
    assert done.code == 0, done.out
    assert all(json.loads(line)["level"] for line in done.out.splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "1", "--listen", "127.0.0.1:1"), "--port and --listen both set the port"),
        (("--port", "70000"), "must be at most 65535"),
        (("--watch", "nowhere"), "nowhere"),
    ],
)
async def test_wrong_options(project: Cli, options: tuple[str, ...], message: str) -> None:
    done = await project("dev", "shop:app", *options)
    assert done.code == 2
    assert message in done.err


async def test_files_that_change_appear_or_vanish_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    old, new = tmp_path / "old.py", tmp_path / "package" / "new.py"
    old.touch()
    files = ProjectFiles([tmp_path])
    new.touch()
    assert await files.changed() == [str(new)]
    new.write_text("x = 1")
    old.unlink()
    assert await files.changed() == [str(old), str(new)]


async def test_files_that_are_not_the_project_s_do_not_count(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    for folder in (tmp_path / ".hidden", tmp_path / "node_modules", environment):
        folder.mkdir()
    (environment / "pyvenv.cfg").touch()
    files = ProjectFiles([tmp_path])
    for folder in (tmp_path / ".hidden", tmp_path / "node_modules", environment):
        (folder / "new.py").touch()
    (tmp_path / "notes.txt").touch()
    changed = asyncio.create_task(files.changed())
    # Noticed after the others would have been.
    (tmp_path / "app.py").touch()
    assert await changed == [str(tmp_path / "app.py")]
