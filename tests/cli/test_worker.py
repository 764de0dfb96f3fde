"""`flowfabric worker`: serving, draining, dying, and everything that can be wrong at its start."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from flowfabric.core.state import PublicState
from flowfabric.sdk.client import Client
from tests.support.command import Cli, busy_worker
from tests.support.server import TestServer, free_port

APP = """
import asyncio, os
import flowfabric as ff

app = ff.Fabric()
empty = ff.Fabric()
number = 7


@app.task()
async def greet(name: str) -> str:
    return f"Hello, {name}!"


@app.task(lane="mails", retry=ff.Retry(0))
def mail(to: str) -> None:
    raise ValueError(to)


@app.task()
async def until_stopped(ctx: ff.Context) -> str:
    print("handler started")
    while not ctx.shutting_down:
        await asyncio.sleep(0.01)
    print("handler sees the end")
    return "finished"


@app.task()
async def forever() -> str:
    print("handler started")
    if os.environ.get("ROLE") == "second":
        return "done by another"
    await asyncio.Event().wait()
    return ""
"""


@pytest.fixture
def shop(cli: Cli) -> Cli:
    """A project folder with an application in `shop.py`."""
    (cli.folder / "shop.py").write_text(APP)
    return cli


async def test_it_serves_every_lane_of_its_tasks(shop: Cli, client: Client) -> None:
    async with shop.start("worker", "shop:app", "--concurrency", "3") as running:
        await running.line("Ready.")
        banner = "\n".join(running.seen)
        for text in ("worker", "deployment", "unix:/", "default, mails", "forever, greet, mail"):
            assert text in banner
        assert "concurrency  3" in banner
        greeted = await client.submit("greet", b'["Ada"]')
        mailed = await client.submit("mail", b'["x"]', lane="mails")
        assert await client.result(greeted.execution_id, 20) == b'"Hello, Ada!"'
        outcome = await client.wait(mailed.execution_id, 20)
        assert outcome.state is PublicState.FAILED
        running.send(signal.SIGINT)
        done = await running.end()
    assert done.code == 0
    assert "1 completed, 1 failed." in done.lines[-1]
    assert done.lines[-1].startswith("Stopped after ")


async def test_settings_come_from_a_file_and_flags(
    shop: Cli, client: Client, valkey: TestServer
) -> None:
    file = shop.folder / "ff.toml"
    file.write_text(f'FF_URL = "{valkey.url}"\nFF_LOG_FORMAT = "json"\nFF_LOG_LEVEL = "error"\n')
    other = Cli(shop.folder)
    for given, variables in (
        (("--config", "ff.toml"), {}),
        ((), {"FF_CONFIG_FILE": "ff.toml"}),
    ):
        options = ("worker", "shop:app", *given, "--set", "FF_LOG_LEVEL=info")
        async with other.start(*options, **variables) as running:
            greeted = await client.submit("greet", b'["Ada"]')
            assert await client.result(greeted.execution_id, 20) == b'"Hello, Ada!"'
            running.send(signal.SIGTERM)
            done = await running.end()
        assert done.code == 0
        assert all(json.loads(line) for line in done.lines)
        assert done.lines
    refused = await other("worker", "shop:app", "--set", "FF_LANE=a")
    assert refused.code == 1
    assert "did you mean FF_LANES?" in refused.err


async def test_sigterm_lets_a_running_handler_finish(shop: Cli, client: Client) -> None:
    async with busy_worker(shop, client, "until_stopped", "--no-scanners") as (
        running,
        execution_id,
    ):
        running.send(signal.SIGTERM)
        await running.line("handler sees the end")
        done = await running.end()
    assert done.code == 0
    assert any("for 1 task (until_stopped ×1)" in line for line in done.lines)
    assert "1 completed." in done.lines[-1]
    assert await client.result_now(execution_id) == b'"finished"'
    assert await client.backend.workers.list_workers() == []


async def test_what_outlasts_the_grace_is_given_back(shop: Cli, client: Client) -> None:
    async with busy_worker(shop, client, "forever", "--grace", "10ms") as (running, execution_id):
        running.send(signal.SIGTERM)
        done = await running.end()
    assert done.code == 0
    assert "1 released." in done.lines[-1]
    state = await client.backend.reads.read_execution_state(execution_id)
    assert state is PublicState.WAITING


async def test_the_second_signal_ends_at_once(shop: Cli, client: Client) -> None:
    async with busy_worker(shop, client, "forever", "--grace", "1h") as (running, _):
        running.send(signal.SIGINT)
        await running.line("stopping: waiting up to 1h for 1 task (forever ×1)")
        running.send(signal.SIGINT)
        done = await running.end()
    assert done.code == 130
    assert "Traceback" not in done.out


async def test_the_work_of_a_killed_worker_is_done_by_another(shop: Cli, client: Client) -> None:
    submitted = await client.submit("forever")
    options = ("worker", "shop:app", "--lease-ttl", "1s")
    async with shop.start(*options) as first:
        await first.line("handler started")
        first.send(signal.SIGKILL)
        assert (await first.end()).code == -signal.SIGKILL
    async with shop.start(*options, ROLE="second") as second:
        assert await client.result(submitted.execution_id, 40) == b'"done by another"'
        second.send(signal.SIGTERM)
        done = await second.end()
    assert done.code == 0
    attempts = await client.backend.reads.read_attempts(submitted.execution_id)
    assert [a.attempt_type for a in attempts] == ["initial", "reclaim"]
    shown = await shop("show", submitted.execution_id)
    assert "interrupted_reclaimed" in shown.out
    assert "reclaimed" in shown.out.partition("History")[2]


async def test_json_logs_are_all_there_is(shop: Cli, client: Client) -> None:
    async with shop.start(
        "worker", "shop:app", "--json", "--lanes", "mails", "--capabilities", "gpu,eu"
    ) as running:
        await running.line("worker_ready")
        running.send(signal.SIGTERM)
        done = await running.end()
    assert done.code == 0
    records = {record["action"]: record for record in map(json.loads, done.lines)}
    ready = records["worker_ready"]
    assert (ready["lanes"], ready["capabilities"]) == (["mails"], ["eu", "gpu"])
    assert ready["level"] == "info"
    assert ready["tasks"] == ["forever", "greet", "mail", "until_stopped"]
    assert records["lane_not_served"]["level"] == "warning"
    assert records["worker_stopped"]["completed"] == 0


async def test_url_and_namespace_win_over_the_application(shop: Cli, client: Client) -> None:
    (shop.folder / "fixed.py").write_text(
        f"import flowfabric as ff\napp = ff.Fabric('valkey://127.0.0.1:{free_port()}')\n"
        "@app.task()\ndef noop() -> None: ...\n"
    )
    url = shop.environment["FF_URL"]
    async with shop.start("--namespace", "tenant", "worker", "fixed:app", "--url", url) as running:
        await running.line("Ready.")
        (entry,) = await client.backend.workers.list_workers("tenant")
        assert entry.lanes == ("default",)
        running.send(signal.SIGTERM)
        assert (await running.end()).code == 0


@pytest.mark.parametrize(
    ("given", "served"), [("tenant,acme", ("tenant", "acme")), ("*", ("*",))], ids=["two", "all"]
)
async def test_it_serves_the_namespaces_that_it_is_given(
    shop: Cli, client: Client, given: str, served: tuple[str, ...]
) -> None:
    """It stays registered in the application's own."""
    async with shop.start("worker", "shop:app", "--namespace", given) as running:
        await running.line("Ready.")
        (entry,) = await client.backend.workers.list_workers("default")
        assert entry.namespaces == served
        assert any(", ".join(served) in line for line in running.seen)
        running.send(signal.SIGTERM)
        assert (await running.end()).code == 0


async def test_the_embedded_server_starts_with_the_worker(tmp_path: Path) -> None:
    project = Cli(tmp_path)
    (tmp_path / "shop.py").write_text(APP)
    async with project.start("worker", "shop:app") as running:
        await running.line("Ready.")
        assert any(f"embedded Valkey in {tmp_path}/.flowfabric" in line for line in running.seen)
        examined = await project("doctor", "--json")
        found = {check["name"]: check for check in examined.objects[0]["checks"]}
        assert found["workers"]["detail"] == "1 live worker"
        running.send(signal.SIGTERM)
        assert (await running.end()).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said", "hint"),
    [
        (("sohp:app",), 1, "import: no module named 'sohp'", "did you mean 'shop'?"),
        (("web.taks:app",), 1, "import: no module named 'web.taks'", "did you mean 'web.tasks'?"),
        (("time:app",), 1, "import: module 'time' has no attribute 'app'", "rename time.py"),
        (("shop.inner:app",), 1, "import: no module named 'shop.inner'", ""),
        (("shop:ap",), 1, "import: module 'shop' has no attribute 'ap'", "shop:app or shop:empty"),
        (
            ("shop:number",),
            1,
            "import: shop:number is not a Fabric; its type is int",
            "did you mean",
        ),
        (("json:tool",), 1, "import: module 'json' has no attribute 'tool'", "has no Fabric"),
        (("shop:empty",), 1, "config: The app has no tasks", ""),
        (
            ("shop:app", "--lanes", "x" * 300),
            2,
            "usage: Invalid value for '--lanes': the limit is 64 bytes",
            "",
        ),
        (("shop",), 2, "usage: Invalid value for 'MODULE:APP'", "flowfabric worker --help"),
        (("./shop.py:app",), 2, "usage: Invalid value for 'MODULE:APP'", ""),
        (("shop:app", "--concurrency", "0"), 2, "usage: Invalid value for '--concurrency'", ""),
        (("shop:app", "--grace", "soon"), 2, "usage: Invalid value for '--grace'", ""),
        (("shop:app", "--concurrency", "1000000"), 2, "usage: Invalid value for '--concurr", ""),
        (
            ("shop:app", "--lease-ttl", "10ms"),
            2,
            "usage: Invalid value for '--lease-ttl': must",
            "",
        ),
        (("shop:app", "--lease-ttl", "8d"), 2, "usage: Invalid value for '--lease-ttl': must", ""),
        (("shop:app", "--block-limit", "9ms"), 2, "usage: Invalid value for '--block-limit'", ""),
        (("shop:app", "--lanes", ","), 2, "usage: Invalid value for '--lanes'", ""),
        (("shop:app", "--lanes", "ü"), 2, "usage: Invalid value for '--lanes': use printable", ""),
        (("shop:app", "--capabilities", "a b"), 2, "usage: Invalid value for '--capabilities'", ""),
        (("shop:app", "--log-level", "loud"), 2, "usage: Invalid value for '--log-level'", ""),
        ((), 2, "usage: Missing argument 'MODULE:APP'", ""),
    ],
)
async def test_what_can_be_wrong_at_the_start(
    shop: Cli, arguments: tuple[str, ...], code: int, said: str, hint: str
) -> None:
    (shop.folder / "web").mkdir()
    for name in ("web/__init__.py", "web/tasks.py", "time.py"):
        (shop.folder / name).write_text(APP)
    done = await shop("worker", *arguments)
    assert (done.code, done.out) == (code, "")
    assert f"error: {said}" in done.err
    assert hint in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import flowfabric\nraise RuntimeError('no luck')\n", "RuntimeError: no luck"),
        ("import missing_library\n", "ModuleNotFoundError: No module named 'missing_library'"),
        ("def broken(:\n", "SyntaxError: "),
    ],
)
async def test_a_module_that_fails_shows_its_own_traceback(
    shop: Cli, source: str, said: str
) -> None:
    (shop.folder / "broken.py").write_text(source)
    done = await shop("worker", "broken:app")
    assert (done.code, done.out) == (1, "")
    assert f"error: import: importing 'broken' failed: {said}" in done.err
    assert "broken.py" in done.err
    assert "importlib" not in done.err
    assert "loader.py" not in done.err


async def test_our_own_errors_in_a_module_need_no_traceback(shop: Cli) -> None:
    (shop.folder / "twice.py").write_text(
        "import flowfabric as ff\napp = ff.Fabric()\n"
        "app.task('a')(lambda: None)\napp.task('a')(lambda: None)\n"
    )
    done = await shop("worker", "twice:app")
    assert done.code == 1
    assert done.err.startswith('error: config: task.name: A task named "a" is already')


@pytest.mark.parametrize(
    ("variable", "value"), [("FF_LOG_LEVEL", "loud"), ("FF_LOG_FORMAT", "xml")]
)
async def test_bad_log_settings_name_their_variable(shop: Cli, variable: str, value: str) -> None:
    done = await shop("worker", "shop:app", **{variable: value})
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: config: invalid value for {variable}: must be one of")


async def test_no_server_to_work_for(shop: Cli) -> None:
    done = await shop("worker", "shop:app", "--url", f"valkey://127.0.0.1:{free_port()}")
    assert (done.code, done.out) == (1, "")
    waiting, error, _ = done.err.splitlines()
    assert "WARNING waiting for Valkey at 127.0.0.1:" in waiting
    assert error.startswith("error: transport: no connection to 127.0.0.1:")


async def test_it_warns_of_a_server_that_somebody_else_prepared(tmp_path: Path) -> None:
    """Which deletes work when memory is short, and writes no log."""
    (tmp_path / "shop.py").write_text(APP)
    server = TestServer("--maxmemory-policy", "allkeys-lru")
    try:
        cli = Cli(tmp_path, FF_URL=server.url)
        await cli("doctor", "--prepare")
        async with cli.start("worker", "shop:app") as running:
            await running.line("Ready.")
            told = [line for line in running.seen if "WARNING" in line]
            running.send(signal.SIGTERM)
            await running.end()
        assert [line.split()[2] for line in told] == ["eviction:", "persistence:"]
        assert "maxmemory-policy is allkeys-lru" in told[0]
        assert (await cli("ps")).err == ""
    finally:
        server.stop()


async def test_it_serves_metrics_on_a_port(shop: Cli, client: Client) -> None:
    port = free_port()
    async with shop.start("worker", "shop:app", "--metrics-port", str(port)) as running:
        await running.line("Ready.")
        greeted = await client.submit("greet", b'["Ada"]')
        await client.result(greeted.execution_id, 20)
        page = await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")
        running.send(signal.SIGTERM)
        assert (await running.end()).code == 0
    assert 'ff_attempt_outcome_total{lane="default",outcome="ok"} 1.0' in page
    assert 'ff_workers_alive{namespace="default"} 1.0' in page
    assert "process_cpu_seconds_total" in page


async def test_each_process_serves_metrics_on_a_port_of_its_own(shop: Cli) -> None:
    port = free_port()
    options = ("--metrics-port", str(port), "--processes", "2", "--no-scanners")
    async with shop.start("worker", "shop:app", *options) as running:
        await running.line("All 2 processes are ready.")
        for each in (port, port + 1):
            page = await asyncio.to_thread(_get, f"http://127.0.0.1:{each}/metrics")
            assert 'ff_workers_alive{namespace="default"} 2.0' in page
        running.send(signal.SIGTERM)
        assert (await running.end()).code == 0


async def test_a_metrics_port_in_use_is_refused(shop: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = await shop("worker", "shop:app", "--metrics-port", str(port))
    assert done.code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.err


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()
