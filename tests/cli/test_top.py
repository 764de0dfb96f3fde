"""`flowfabric top`: one frame, JSON, and live in a pseudo-terminal."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowfabric.cli.views.screen import Screen
from flowfabric.cli.views.top import TopFrame, render
from flowfabric.core.conditions import Single
from flowfabric.engine import live_overview
from flowfabric.engine.lane_overview import LaneOverview
from flowfabric.engine.live_overview import LiveOverview, LiveReader, read_live
from flowfabric.scanners import ScannerSupervisor
from flowfabric.scanners.board import read_board
from tests.support.budgets import new_budget, spend
from tests.support.command import Cli, Done
from tests.support.engine import Engine
from tests.support.sdk import until
from tests.support.server import TestServer
from tests.support.suspension import Waits
from tests.support.terminal import CTRL_C, in_terminal, plain

QUICK = ("--interval", "100ms")


@pytest.fixture
async def busy(engine: Engine) -> Engine:
    """A deployment with something of everything."""
    waits = await Waits.open(engine)
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["default"]
    )
    await waits.park(Single("release", "approved"), prompt="Ship 1.4?")
    await engine.running()
    await engine.create()
    await engine.create(lane="mails")
    await engine.create(lane="mails", delay_until=await engine.now() + 3_600_000)
    budget = await new_budget(engine.backend, {"tokens": 100}, scope_type="name", scope_id="team")
    await spend(engine.backend.budgets, budget, tokens=90)
    return engine


def section(done: Done, title: str) -> list[list[str]]:
    """The words of the lines below a title."""
    start = next(n for n, line in enumerate(done.lines) if line.startswith(title))
    below = done.lines[start + 1 :]
    return [line.split() for line in below[: below.index("") if "" in below else None]]


async def test_one_frame(cli: Cli, busy: Engine) -> None:
    done = await cli("top", "--once", *QUICK)
    assert (done.code, done.err) == (0, "")
    assert re.match(r"submitted \d+\.\d/s  finished 0\.0/s  failed 0\.0/s$", done.lines[1])
    assert done.lines[2] == "waiting 2  active 1  delayed 1  suspended 1  blocked 0"
    header, default, mails = section(done, "Lanes")
    rows = [dict(zip(header, row, strict=True)) for row in (default, mails)]
    assert (rows[0]["LANE"], rows[0]["WAITING"], rows[0]["ACTIVE"]) == ("default", "1", "1")
    assert (rows[1]["LANE"], rows[1]["DELAYED"], rows[1]["WORKERS"]) == ("mails", "1", "0")
    assert rows[0]["OLDEST"].endswith("s")
    assert section(done, "Workers (1)")[1][:3] == ["w-1", "1", "active"]
    assert " ".join(section(done, "Waiting for an answer (1)")[1]).endswith("release Ship 1.4?")
    assert section(done, "Budgets")[1] == ["team", "tokens", "90%", "100"]
    assert section(done, "Scanners")[0][:2] == ["No", "process"]


async def test_json_is_one_object_and_one_per_interval_if_asked(cli: Cli, busy: Engine) -> None:
    (frame,) = (await cli("top", "--json")).objects
    assert {lane["lane"]: lane["waiting"] for lane in frame["lanes"]} == {"default": 1, "mails": 1}
    assert [(each["worker"], each["leases"]) for each in frame["workers"]] == [("w-1", 1)]
    assert [(each["budget"], each["used"]) for each in frame["budgets"]] == [("team", 90)]
    assert [each["prompt"] for each in frame["waits"]] == ["Ship 1.4?"]
    assert frame["rates"].keys() == {"submitted", "finished", "failed"}
    assert (frame["leaders"], frame["scanners"]) == ([], None)
    async with cli.start("top", "--json", *QUICK) as running:
        first, second = [await running.line('"now_ms":') for _ in range(2)]
        assert '"rates":null' in first
        assert '"rates":{' in second


async def test_an_empty_deployment(cli: Cli) -> None:
    done = await cli("top", "--once", *QUICK)
    assert done.code == 0
    assert section(done, "Workers") == [["No", "worker", "is", "running."]]
    assert section(done, "Budgets") == [["None."]]


async def test_rates_are_those_between_two_looks(engine: Engine) -> None:
    executions = engine.backend.executions
    async with LiveReader(engine.backend) as reader:
        await until(lambda: reader._from is not None, "the feed")
        assert (await reader.read()).rates is None
        for outcome in ("success", "success", "failed"):
            handle = await engine.running()
            if outcome == "failed":
                await executions.fail(handle, "no", "permanent")
            else:
                await executions.complete(handle)
        await engine.create()
        await until(lambda: reader._ended.total() == 3, "the completions")
        rates = (await reader.read()).rates
        assert rates is not None
        assert rates.finished > 0
        assert rates.failed == pytest.approx(rates.finished / 3, abs=0.11)
        assert rates.submitted > rates.finished


async def test_a_busy_deployment_is_sampled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_overview, "_SAMPLE", 3)
    async with LiveReader(engine.backend) as reader:
        await until(lambda: reader._from is not None, "the feed")
        await reader.read()
        for _ in range(2):
            for _ in range(10):
                await engine.backend.executions.complete(await engine.running())
            await until(lambda: reader._until is not None, "the end of the sample")
            assert reader._ended.total() == 3
            rates = (await reader.read()).rates
            assert rates is not None
            assert rates.finished > 0
            await until(lambda: reader._from is not None and not reader._until, "the next sample")


async def test_a_look_costs_the_same_with_more_executions(engine: Engine) -> None:
    async def cost() -> int:
        before = (await engine.backend.meta.usage()).commands
        await read_live(engine.backend)
        return (await engine.backend.meta.usage()).commands - before

    for _ in range(3):
        await engine.create()
    few = await cost()
    for _ in range(300):
        await engine.create()
    # Between the two numbers are also those that ask for the numbers.
    assert await cost() <= few + 5


async def test_the_leader_says_how_its_scanners_do(cli: Cli, engine: Engine) -> None:
    scanners = ScannerSupervisor(engine.backend)
    scanners.start()
    try:

        async def written() -> bool:
            return await read_board(engine.backend) is not None

        await until(written, "the board")
        done = await cli("top", "--once", *QUICK)
        (frame,) = (await cli("top", "--json", "--once", *QUICK)).objects
    finally:
        await scanners.stop()
    (line,) = section(done, "Scanners")
    assert re.match(r"22 scanners on \S+:\d+, last cycle \S+ ago, no errors\.", " ".join(line))
    by_name: dict[str, Any] = {each["name"]: each for each in frame["scanners"]}
    assert by_name["lease_expiry"]["interval_ms"] == 1500
    assert (by_name["lease_expiry"]["errors"], by_name["lease_expiry"]["stuck"]) == (0, False)


@pytest.mark.parametrize(("key", "columns"), [("q", 100), (CTRL_C, 60)])
async def test_live_until_a_key(cli: Cli, busy: Engine, key: str, columns: int) -> None:
    cli.environment["NO_COLOR"] = "1"
    async with in_terminal(cli, "top", *QUICK, columns=columns, rows=30) as terminal:
        await terminal.shows("submitted -")
        await terminal.shows("Budgets near their limit")
        await terminal.shows("submitted 0.0/s")
        await busy.create(lane="later")
        await terminal.shows("later")
        await terminal.shows("tokens     90%   100")
        terminal.type(key)
        assert await terminal.end() == 0
    # The alternate screen is left, and nothing has a colour.
    assert "\x1b[?1049h" in terminal.raw
    assert terminal.raw.rstrip().endswith("\x1b[?1049l")
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.raw) is None
    # Each frame starts at the top.
    frames = plain(terminal.raw.replace("\x1b[H", "\n")).splitlines()
    assert max(len(line.rstrip()) for line in frames) <= columns
    assert "…" not in "".join(line for line in frames if "WAITING" in line)


def lane(name: str, **counts: int) -> LaneOverview:
    """A lane with these counts."""
    names = ("waiting", "delayed", "active", "suspended", "blocked", "finished", "workers")
    zero = dict.fromkeys((*names, "no_worker"), 0)
    return LaneOverview(lane=name, state="active", reason="", oldest_ms=None, **(zero | counts))


@pytest.mark.parametrize("width", [36, 60, 200])
def test_a_frame_fits_and_starts_with_the_busiest_lanes(width: int) -> None:
    """A narrow terminal wraps the texts around the tables, too."""
    lanes = [lane(f"lane-{number:02}") for number in range(40)]
    lanes += [lane("later", delayed=9), lane("stuck", blocked=2), lane("busy", active=3)]
    overview = LiveOverview(now_ms=0, lanes=lanes, workers=[], waits=[], budgets=[])
    screen, written = Screen(), StringIO()
    screen.console = Console(width=width, height=32, file=written, color_system=None)
    frame = TopFrame(overview=overview, leaders=[], board=None)
    screen.console.print(render(frame, "http://flows.example:9090", screen))
    lines = written.getvalue().splitlines()
    assert 31 <= len(lines) <= 32
    assert lines[-2].rstrip() == "Budgets near their limit"
    first = next(n for n, line in enumerate(lines) if line.startswith("busy"))
    assert [line.split()[0] for line in lines[first : first + 4]] == [
        "busy",
        "stuck",
        "later",
        "lane-00",
    ]


async def test_an_outage_is_shown(tmp_path: Path) -> None:
    server = TestServer()
    try:
        cli = Cli(tmp_path, FF_URL=server.url)
        assert (await cli("doctor", "--prepare")).code == 0
        async with in_terminal(cli, "top", *QUICK) as terminal:
            await terminal.shows("submitted 0.0/s")
            server.stop()
            await terminal.shows("cannot read the deployment: ")
            terminal.type("q")
            assert await terminal.end() == 0
    finally:
        server.stop()
