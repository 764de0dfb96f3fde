"""`cancel`, `replay` and `purge` of everything that options select."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from tests.support.command import Cli
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer
from tests.support.terminal import in_terminal

HOUR = 3_600_000


async def states(engine: Engine, *ids: ExecutionId) -> list[str]:
    return [(await engine.backend.reads.read_execution_state(each)).value for each in ids]


async def failed(engine: Engine, **fields: object) -> ExecutionId:
    handle = await engine.running(**fields)
    await engine.backend.executions.fail(handle, "boom", "permanent")
    return handle.execution_id


async def test_cancel_what_matches_every_option(cli: Cli, engine: Engine) -> None:
    chosen = await engine.create(lane="mails", execution_kind="send", tags={"app.team": "x"})
    others = [
        await engine.create(lane="mails", execution_kind="send"),
        await engine.create(lane="mails", execution_kind="other", tags={"app.team": "x"}),
        await engine.create(execution_kind="send", tags={"app.team": "x"}),
    ]
    where = ("--lane", "mails", "--task", "send", "--state", "waiting", "--tag", "app.team=x")
    done = await cli("cancel", *where, "--yes", "--reason", "not needed")
    assert (done.code, done.err) == (0, "")
    assert done.out == "Cancelled 1 of 1 execution.\n"
    info = await engine.backend.reads.read_execution_info(chosen)
    assert (info.public_state, info.cancellation_reason) == (PublicState.CANCELLED, "not needed")
    assert await states(engine, *others) == ["waiting"] * 3
    # What is done no longer matches, so a repeat continues with the rest.
    assert (await cli("cancel", *where, "--yes")).out == "No execution matches.\n"


async def test_without_a_terminal_it_counts_and_refuses(cli: Cli, engine: Engine) -> None:
    await engine.create()
    await engine.running()
    before = await engine.dump()
    done = await cli("cancel", "--older-than", "0s")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "error: not_confirmed: this would cancel 2 executions (1 active, 1 waiting)",
        "hint: pass --yes to run it without a terminal",
    ]
    assert (await engine.dump()) == before


async def test_a_dry_run_only_counts(cli: Cli, engine: Engine) -> None:
    await failed(engine)
    await engine.create()
    before = await engine.dump()
    for verb in ("replay", "purge"):
        done = await cli(verb, "--task", "job", "--dry-run")
        assert (done.code, done.out) == (0, f"Would {verb} 1 execution (1 failed).\n")
    (said,) = (await cli("cancel", "--task", "job", "--dry-run", "--json")).objects
    assert said == {"action": "cancel", "dry_run": True, "matched": 1, "states": {"waiting": 1}}
    assert (await cli("cancel", "--lane", "nope", "--dry-run")).out == "No execution matches.\n"
    assert await engine.dump() == before


async def test_the_age_is_that_of_the_end_or_of_the_creation(cli: Cli, engine: Engine) -> None:
    old = await failed(engine)
    late = await engine.create()
    await engine.advance(2 * HOUR)
    await engine.backend.executions.cancel_execution(late)
    waiting = await engine.create()
    done = await cli("purge", "--older-than", "1h", "--yes")
    assert done.out == "Purged 1 of 1 execution.\n"
    assert await engine.backend.reads.describe_execution(old) is None
    assert await states(engine, late, waiting) == ["cancelled", "waiting"]


async def test_replay_says_what_was_refused_and_why(cli: Cli, engine: Engine) -> None:
    good = await failed(engine)
    spent = await failed(engine, policy={"max_replay_count": 0})
    done = await cli("replay", "--state", "failed", "--yes", "--as", "ada")
    assert done.code == 1
    head, refused, listed = done.lines
    assert head == "Replayed 1 of 2 executions."
    assert refused.startswith("1 refused: max_replays_exhausted: Submit a new execution, or ")
    assert listed.strip() in (spent, spent.compact)
    assert await states(engine, good, spent) == ["waiting", "failed"]
    (said,) = (await cli("replay", "--state", "failed", "--yes", "--json")).objects
    assert (said["matched"], said["changed"], said["skipped"]) == (1, 0, 0)
    (why,) = said["refused"]
    assert (why["code"], why["count"]) == ("max_replays_exhausted", 1)


async def test_purge_by_id(cli: Cli, engine: Engine) -> None:
    ended, running = await failed(engine), (await engine.running()).execution_id
    asked = await cli("purge", ended)
    assert asked.err.startswith("error: not_confirmed: this would purge 1 execution\n")
    done = await cli("purge", ended.uuid[:12], running, "--yes")
    assert done.code == 1
    assert done.lines[0] == "Purged 1 of 2 executions."
    assert done.lines[1].startswith("1 refused: execution_not_terminal: it has not finished;")
    assert await engine.backend.reads.describe_execution(ended) is None
    assert await states(engine, running) == ["active"]


async def test_more_than_one_page(cli: Cli, engine: Engine) -> None:
    await asyncio.gather(*(engine.create(lane="bulk") for _ in range(1100)))
    keep = await engine.create()
    (said,) = (await cli("cancel", "--lane", "bulk", "--yes", "--json")).objects
    assert said == {
        "action": "cancel",
        "dry_run": False,
        "matched": 1100,
        "states": {"waiting": 1100},
        "changed": 1100,
        "skipped": 0,
        "refused": [],
    }
    assert await states(engine, keep) == ["waiting"]


async def test_a_terminal_asks_and_shows_progress(cli: Cli, engine: Engine) -> None:
    ids = [await engine.create() for _ in range(3)]
    async with in_terminal(cli, "cancel", "--lane", "default") as terminal:
        await terminal.until("Cancel 3 executions (3 waiting)? [y/N]: ")
        # It changed while the question was open.
        await engine.claim()
        await engine.backend.executions.cancel_execution(ids[0])
        terminal.type("y\n")
        await terminal.until("no longer matching.")
        assert await terminal.end() == 0
    assert "3/3" in terminal.text
    assert "Cancelled 2 of 3 executions." in terminal.text
    assert await states(engine, *ids) == ["cancelled"] * 3


@pytest.mark.parametrize(("answer", "code"), [("n\n", 130), ("", 130)])
async def test_no_and_ctrl_c_change_nothing(
    cli: Cli, engine: Engine, answer: str, code: int
) -> None:
    await failed(engine)
    before = await engine.dump()
    async with in_terminal(cli, "purge", "--state", "failed") as terminal:
        await terminal.until("This deletes payloads, results and output. Purge 1 execution")
        await terminal.until("[y/N]: ")
        if answer:
            terminal.type(answer)
        else:
            await terminal.interrupt()
        assert await terminal.end() == code
    assert await engine.dump() == before


@pytest.mark.parametrize("ending", ["outage", "ctrl-c"])
async def test_what_stops_it_says_how_to_continue(
    cli: Cli, engine: Engine, valkey: TestServer, ending: str
) -> None:
    ids = [await engine.create() for _ in range(3)]
    with FaultProxy(valkey.socket_path) as proxy:
        cli.environment["FF_URL"] = proxy.url
        async with in_terminal(cli, "cancel", "--lane", "default") as terminal:
            await terminal.until("[y/N]: ")
            if ending == "outage":
                proxy.down()
                terminal.type("y\n")
                await terminal.until("run the same command again; it continues")
                assert await terminal.end() == 1
            else:
                proxy.pause()
                terminal.type("y\n")
                await terminal.until("0/3")
                await terminal.interrupt()
                await terminal.until("to continue.")
                assert await terminal.end() == 130
                proxy.resume()
    assert "Cancelled 0 of 3 executions." in terminal.text
    assert "3 left. Run the same command again to continue." in terminal.text
    again = await cli("cancel", "--lane", "default", "--yes", FF_URL=valkey.url)
    assert again.out == "Cancelled 3 of 3 executions.\n"
    assert await states(engine, *ids) == ["cancelled"] * 3
