"""`flowfabric ps`: every filter, both forms of output, what a terminal sees, and watching."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from flowfabric.cli.views.screen import Cell, Row, drop_columns
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.text import iso
from tests.support.command import Cli
from tests.support.engine import Engine
from tests.support.terminal import CTRL_C, in_terminal, shown


async def ids(cli: Cli, *arguments: str) -> set[str]:
    done = await cli("ps", "--json", *arguments)
    assert (done.code, done.err) == (0, "")
    return {row["execution_id"] for row in done.objects}


async def test_nothing_yet(cli: Cli) -> None:
    done = await cli("ps")
    assert (done.code, done.out, done.err) == (0, "No executions yet.\n", "")
    assert (await cli("ps", "--json")).out == ""
    assert (await cli("ps", "--lane", "x")).out == "No execution matches.\n"


async def test_the_table_in_a_pipe_is_plain_and_complete(cli: Cli, engine: Engine) -> None:
    running = (await engine.running(execution_kind="resize")).execution_id.compact
    waiting = (await engine.create(execution_kind="k" * 90, lane="mails")).compact
    done = await cli("ps")
    header, *rows = done.lines
    assert header.split() == ["ID", "TASK", "LANE", "STATE", "AGE", "ATTEMPTS", "WORKER"]
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert set(cells) == {running, waiting}
    assert cells[running][:3] == ["resize", "default", "active"]
    assert cells[running][4:] == ["1", "w-1"]
    assert cells[waiting][:3] == ["k" * 90, "mails", "waiting"]
    assert cells[waiting][4:] == ["-", "-"]
    assert "\x1b" not in done.out
    column = header.index("TASK")
    assert {row[column:].split()[0] for row in rows} == {"resize", "k" * 90}


async def test_json_is_one_object_a_line(cli: Cli, engine: Engine) -> None:
    execution_id = (await engine.running(execution_kind="resize", priority=7)).execution_id
    (row,) = (await cli("ps", "--json")).objects
    created = int((await engine.backend.reads.read_execution_info(execution_id)).created_at)
    assert row == {
        "execution_id": execution_id,
        "task": "resize",
        "lane": "default",
        "namespace": "default",
        "state": "active",
        "priority": 7,
        "created_at": created,
        "created_at_iso": iso(created),
        "total_attempt_count": 1,
        "worker_instance_id": "w-1",
    }


async def test_filters(cli: Cli, engine: Engine) -> None:
    plain = await engine.create(execution_kind="a")
    tagged = await engine.create(
        execution_kind="b", tags={"app.team": "x", "app.size": "1"}, namespace="other"
    )
    lane = await engine.create(execution_kind="a", lane="mails")
    ended = await engine.create(execution_kind="a")
    await engine.backend.executions.cancel_execution(ended)
    assert await ids(cli, "--lane", "mails") == {lane}
    assert await ids(cli, "--state", "cancelled") == {ended}
    assert await ids(cli, "--tag", "app.team=x", "--tag", "app.size=1") == {tagged}
    assert await ids(cli, "--tag", "app.team=x", "--tag", "app.size=2") == set()
    assert await ids(cli, "--task", "a", "--state", "waiting", "--lane", "default") == {plain}
    before = await cli("--namespace", "other", "ps")
    assert [line.split()[0] for line in before.lines] == ["ID", tagged.compact]
    assert "NAMESPACE" in before.lines[0]


async def test_by_age(cli: Cli, engine: Engine) -> None:
    old = await engine.create()
    await engine.advance(7_200_000)
    await engine.create()
    assert await ids(cli, "--older-than", "1h") == {old}
    assert await ids(cli, "--older-than", "1h", "--state", "failed") == set()


async def test_newest_first_and_at_most_the_limit(cli: Cli, engine: Engine) -> None:
    made: list[str] = []
    for _ in range(4):
        made.append(await engine.create())
        await engine.advance(1000)
    shown = [row["execution_id"] for row in (await cli("ps", "--json", "--limit", "3")).objects]
    assert shown == made[:0:-1]
    everything = await cli("ps", "--json", "--all", "--limit", "1")
    assert [row["execution_id"] for row in everything.objects] == made[::-1]


async def test_all_walks_over_every_page(cli: Cli, engine: Engine) -> None:
    """More than one page of the listing, over two partitions."""
    expected: set[str] = set()
    for lane, count in (("default", 1100), ("mails", 30)):
        tag = engine.new_id(lane).tag
        await asyncio.gather(*(engine.create(lane=lane) for _ in range(count)))
        page = await engine.backend.listings.find_executions("", 2000)
        expected |= {each for each in page if each.tag == tag}
    assert len(expected) == 1130
    assert await ids(cli, "--all") == expected
    assert len(await ids(cli)) == 50


async def test_a_terminal_gets_colours_short_ids_and_totals(cli: Cli, engine: Engine) -> None:
    ended = await engine.create(execution_kind="resize")
    await engine.backend.executions.cancel_execution(ended)
    await engine.create(execution_kind="resize")
    screen = await shown(cli, "ps")
    assert "\x1b[" in screen
    assert f"{ended.partition}-{ended.uuid[:8]}" in screen
    assert ended.uuid[:9] not in screen
    assert "{fp:" not in screen
    assert "2 executions: " in screen
    assert "1 waiting" in screen
    assert "1 cancelled" in screen
    limited = await shown(cli, "ps", "--limit", "1")
    assert "Showing the newest 1; --all shows all" in limited


async def test_short_ids_grow_until_they_differ(cli: Cli, engine: Engine) -> None:
    first = "11111111-aaaa-4333-8444-555555555555"
    second = "11111111-ab00-4333-8444-555555555555"
    for uuid in (first, second):
        named = ExecutionId.deterministic_solo("default", uuid, PartitionCounts())
        await engine.create(execution_id=named)
    screen = await shown(cli, "ps")
    assert "11111111-aa\x1b" in screen
    assert "11111111-ab\x1b" in screen


async def test_stored_text_cannot_control_the_terminal(cli: Cli, engine: Engine) -> None:
    handle = await engine.running(execution_kind="evil")
    await engine.backend.executions.progress(handle, 10, "a\x1b[2Jb\rc")
    await engine.backend.executions.fail(handle, "boom \x1b]0;title\x07\x9b\u202e", "cat\x1b[31m")
    done = await cli("show", handle.execution_id.uuid)
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\r" not in done.out
    assert "boom \\x1b]0;title\\x07\\x9b\\u202e" in done.out
    (line,) = (await cli("show", handle.execution_id.uuid, "--json")).lines
    assert line.isprintable()
    assert json.loads(line)["execution"]["failure_reason"].endswith("\x9b\u202e")
    screen = await shown(cli, "show", handle.execution_id.uuid)
    assert "\x1b[2J" not in screen
    assert "\x1b]0" not in screen


@pytest.mark.parametrize("form", [(), ("--json",)])
async def test_watch_prints_what_is_new_and_what_changed(
    cli: Cli, engine: Engine, form: tuple[str, ...]
) -> None:
    first = await engine.create()
    async with cli.start("ps", "--watch", *form) as running:
        assert "waiting" in await running.line(first.uuid)
        second = await engine.create()
        assert "waiting" in await running.line(second.uuid)
        await engine.backend.executions.cancel_execution(first)
        changed = await running.line(first.uuid)
        assert "cancelled" in changed
        if form:
            assert json.loads(changed)["state"] == "cancelled"
        running.send(signal.SIGINT)
        done = await running.end()
    assert done.code == 0
    assert sum(second.uuid in line for line in done.lines) == 1
    assert "Traceback" not in done.out


async def test_watch_on_a_terminal_redraws(cli: Cli, engine: Engine) -> None:
    execution_id = await engine.create()
    async with in_terminal(cli, "ps", "--watch", rows=20) as terminal:
        await terminal.until(execution_id.uuid[:8])
        await engine.backend.executions.cancel_execution(execution_id)
        await terminal.until("1 cancelled")
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.end() == 0


async def test_watch_of_nothing(cli: Cli, engine: Engine) -> None:
    await engine.create(lane="mails")
    async with in_terminal(cli, "ps", "--watch", "--lane", "elsewhere", NO_COLOR="1") as terminal:
        await terminal.shows("0 executions · Ctrl-C to stop")
        terminal.type(CTRL_C)
        assert await terminal.end() == 0


def test_a_narrow_terminal_goes_without_what_matters_least() -> None:
    headers = ["ID", "TASK", "LANE", "STATE", "AGE", "ATTEMPTS", "WORKER"]
    cells: list[Cell] = [("0123abcd", "bold"), "send_mail", "default", "waiting", "1m", "1", "h-1"]
    row: Row = dict(zip(headers, cells, strict=True))
    spare = ("ATTEMPTS", "AGE", "LANE", "WORKER")

    def shown(width: int) -> str:
        return " ".join(drop_columns([row], spare, width)[0])

    assert shown(100) == shown(60) == " ".join(headers)
    assert shown(59) == "ID TASK LANE STATE AGE WORKER"
    assert shown(45) == "ID TASK LANE STATE WORKER"
    assert shown(20) == "ID TASK STATE"
    (fitted,) = drop_columns([row], spare, 59)
    assert fitted == {name: cell for name, cell in row.items() if name != "ATTEMPTS"}
