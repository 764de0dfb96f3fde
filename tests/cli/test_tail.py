"""`flowfabric tail`: output as it comes, from attempt to attempt, safe to look at."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flowfabric.cli.views.tail import readable
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support.command import COMMAND, PATIENCE_S, Cli
from tests.support.engine import Engine
from tests.support.executions import promote
from tests.support.sdk import until
from tests.support.server import TestServer
from tests.support.suspension import Waits
from tests.support.terminal import shown

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
HOUR = 3_600_000


async def write(
    engine: Engine, handle: Handle, payload: bytes | str, frame_type: str = "delta", **more: Any
) -> str:
    raw = payload.encode() if isinstance(payload, str) else payload
    frame = Frame(payload=raw, frame_type=frame_type, **more)
    return (await engine.backend.streams.append_frame(handle, frame)).stream_id


async def test_a_finished_execution(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    await write(engine, handle, "two ")
    await write(engine, handle, "words\n")
    await engine.backend.executions.complete(handle)
    done = await cli("tail", handle.execution_id.uuid)
    assert (done.code, done.out) == (0, "two words\n")
    assert done.err == "── attempt 1 succeeded\n── completed\n"


async def test_live_over_a_retry_to_the_end(cli: Cli, engine: Engine) -> None:
    first = await engine.running(policy=RETRY)
    async with cli.start("tail", first.execution_id) as tail:
        await write(engine, first, "one\n")
        await tail.line("one")
        await engine.backend.executions.fail(first, "ValueError: no\ntraceback", "handler_error")
        await tail.line("── attempt 1 failed: ValueError: no")
        await promote(engine, first.execution_id)
        second = (await engine.claim()).handle
        await write(engine, second, "two\n")
        await tail.line("── attempt 2 (retry) on w-1")
        await tail.line("two")
        await engine.backend.executions.complete(second)
        done = await tail.end()
    assert done.code == 0
    assert done.lines[-2:] == ["── attempt 2 succeeded", "── completed"]
    newest = await cli("tail", first.execution_id)
    assert newest.out == "two\n"
    assert newest.err.startswith("── attempt 2 (retry) on w-1; --attempt 1 starts with the first")
    assert (await cli("tail", first.execution_id, "--attempt", "1")).out == "one\ntwo\n"


async def test_a_suspension_is_announced(cli: Cli, engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await write(engine, handle, "before\n")
    async with cli.start("tail", handle.execution_id) as tail:
        await tail.line("before")
        now = await engine.now()
        parked = await waits.park(handle=handle, timeout_at=now + HOUR)
        await tail.line("── suspended: waits for k (go) until ")
        await waits.send(parked)
        again = (await engine.claim()).handle
        await write(engine, again, "after\n")
        await tail.line("── resumed: the wait was answered: go")
        await tail.line("after")
        await engine.backend.executions.complete(again)
        assert (await tail.end()).code == 0


async def test_a_question_and_its_answer_are_printed(cli: Cli, engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(prompt="Deploy v2?", details={"version": 2})
    execution_id = parked.handle.execution_id
    now = await cli("tail", execution_id, "--no-follow")
    assert "── asks: Deploy v2?" in now.err
    async with cli.start("tail", execution_id) as tail:
        await tail.line("── suspended: waits for k (go)")
        await tail.line("── asks: Deploy v2?")
        await tail.line('── {"version":2}')
        await waits.backend.signals.deliver_approval_signal(
            execution_id, parked.details.waitpoint_id, "go", decided_by="ada"
        )
        await tail.line("── resumed: the wait was answered: go by ada")
        await engine.backend.executions.complete((await engine.claim()).handle)
        assert (await tail.end()).code == 0


async def test_json_and_going_on_from_a_frame(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    first = await write(engine, handle, "text")
    await write(engine, handle, b"\xff\x00", "blob", encoding="binary")
    await engine.backend.executions.complete(handle)
    done = await cli("tail", handle.execution_id, "--json")
    assert done.err == ""
    text, blob, closed, end = done.objects
    assert (text["type"], text["id"], text["payload"]) == ("frame", first, "text")
    assert (text["frame_type"], text["payload_form"], text["encoding"]) == ("delta", "text", "utf8")
    assert base64.b64decode(blob["payload"]) == b"\xff\x00"
    assert (blob["payload_form"], blob["encoding"]) == ("base64", "binary")
    assert (closed["type"], closed["reason"]) == ("closed", "attempt_success")
    assert end == {"type": "end", "attempt": 1, "state": "completed"}
    rest = await cli("tail", handle.execution_id, "--json", "--from", first)
    assert rest.objects == [blob, closed, end]
    assert (await cli("tail", handle.execution_id, "--from", "end")).out == ""


async def test_what_there_is_now(cli: Cli, engine: Engine) -> None:
    handle = await engine.running(policy=RETRY)
    await write(engine, handle, "so far")
    done = await cli("tail", handle.execution_id, "--no-follow")
    assert (done.code, done.out, done.err) == (0, "so far", "")
    await engine.backend.executions.fail(handle, "no", "handler_error")
    done = await cli("tail", handle.execution_id, "--no-follow")
    assert (done.out, done.err) == ("so far", "\n── attempt 1 failed: no\n")


async def test_it_ends_with_an_execution_that_never_ran(cli: Cli, engine: Engine) -> None:
    waiting = await engine.create()
    async with cli.start("tail", waiting, "--json") as tail:
        await engine.backend.executions.cancel_execution(waiting, "not needed")
        await tail.line('"state":"cancelled"')
        assert (await tail.end()).code == 0


async def test_a_lost_worker_and_its_successor(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    await write(engine, handle, "cut o")
    async with cli.start("tail", handle.execution_id) as tail:
        await engine.backend.leases.revoke_lease(handle.execution_id, reason="test")
        await tail.line("── attempt 1 stopped: its lease was revoked")
        successor = (await engine.claim()).handle
        await engine.backend.executions.complete(successor)
        await tail.line("── attempt 2 (reclaim)")
        assert (await tail.end()).lines[-1] == "── completed"


async def test_a_terminal_gets_colours_but_no_tricks(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    await write(engine, handle, "plain\x1b]0;title\x07\n", "stdout")
    await write(engine, handle, "bad\n", "stderr")
    await write(engine, handle, '{"pct":5}', "progress", encoding="json")
    await write(engine, handle, bytes(range(64)), "blob", encoding="binary")
    await write(engine, handle, "no line end")
    await engine.backend.executions.complete(handle)
    seen = (await shown(cli, "tail", handle.execution_id)).replace("\r\n", "\n")
    assert "plain\\x1b]0;title\\x07\n" in seen
    assert "\x1b[31mbad" in seen
    assert '\x1b[33mprogress {"pct":5}' in seen
    assert "blob <64 bytes: 0001 0203" in seen
    assert "\x07" not in seen
    assert "no line end\n" in seen
    assert "\x1b[32mcompleted" in seen


def test_text_that_cannot_move_the_cursor() -> None:
    assert readable("a\x1b[1;31mb\x1b[0m\tc\r\nd\re\n") == "ab\tc\nd\ne\n"
    assert readable("\x1b[2Jx\x08\x9b") == "\\x1b[2Jx\\x08\\x9b"


async def test_a_character_may_be_split_between_frames(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    await write(engine, handle, "na\u00efve".encode()[:3])
    await write(engine, handle, "na\u00efve".encode()[3:])
    await engine.backend.executions.complete(handle)
    assert (await cli("tail", handle.execution_id)).out == "na\u00efve"


async def test_a_reader_that_leaves_and_ctrl_c(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    await write(engine, handle, "one\n")
    async with cli.start("tail", handle.execution_id) as tail:
        await tail.line("one")
        tail.send(signal.SIGINT)
        done = await tail.end()
    assert (done.code, done.out) == (0, "one")
    await engine.backend.executions.complete(handle)
    read, pipe = os.pipe()
    os.close(read)
    try:
        gone = await asyncio.to_thread(
            subprocess.run,
            [COMMAND, "tail", handle.execution_id],
            env=cli.environment,
            cwd=cli.folder,
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(pipe)
    assert (gone.returncode, "Broken" in gone.stderr, "Traceback" in gone.stderr) == (
        0,
        False,
        False,
    )


async def test_a_server_that_is_away_for_a_moment(tmp_path: Path) -> None:
    server = TestServer("--appendonly", "yes", "--appendfsync", "always")
    try:
        address = parse_url(server.url)
        backend = await ValkeyBackend.connect(address, prepare_with=PartitionCounts())
        engine = Engine(backend)
        handle = await engine.running()
        await write(engine, handle, "before\n")
        async with Cli(tmp_path, FF_URL=server.url).start("tail", handle.execution_id) as tail:
            await tail.line("before")
            server.kill()
            await tail.line("── no answer from the server, retrying: ")
            server.start()
            await write(engine, handle, "after\n")
            await tail.line("after")
            await backend.executions.complete(handle)
            done = await tail.end()
        await backend.aclose()
    finally:
        server.stop()
    assert (done.code, done.lines[-1]) == (0, "── completed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("deadbeef",),
            "error: execution_not_found: no execution has an id that starts with 'deadbeef'",
        ),
        (("ID", "--attempt", "3"), "error: attempt_not_found: "),
        (("ID", "--from", "yesterday"), "error: usage: Invalid value for '--from': Malformed"),
        (("ID", "--attempt", "0"), "error: usage: "),
    ],
)
async def test_mistakes(cli: Cli, engine: Engine, arguments: tuple[str, ...], said: str) -> None:
    handle = await engine.running()
    done = await cli("tail", *(handle.execution_id if a == "ID" else a for a in arguments))
    assert done.code != 0
    assert done.out == ""
    assert done.err.startswith(said)
    assert "\nhint: " in done.err


async def test_a_test_that_gives_a_command_up_ends_it(cli: Cli, engine: Engine) -> None:
    """And only this one: the next test starts commands as before."""

    async def tails() -> bool:
        clients: Any = await engine.backend.transport.call("CLIENT", "LIST")
        return b"cmd=xread" in clients

    async def ended() -> bool:
        return not await tails()

    handle = await engine.running()
    tail = asyncio.create_task(cli("tail", handle.execution_id))
    await until(tails, "a tail", PATIENCE_S)
    tail.cancel()
    await asyncio.wait([tail])
    await until(ended, "its end", PATIENCE_S)
    assert (await cli("version")).code == 0
