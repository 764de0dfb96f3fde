"""`flowfabric waiting`, and what `show` says of a suspended execution."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flowfabric.core.conditions import AllOf, OperatorOnly, Single, TimeoutOnly
from flowfabric.core.contracts.suspension import SuspensionDetails
from tests.support.command import Cli, Done
from tests.support.engine import Engine
from tests.support.suspension import Waits

HOUR = 3_600_000


@pytest.fixture
async def waits(engine: Engine) -> Waits:
    return await Waits.open(engine)


def assert_no_token(done: Done, details: SuspensionDetails) -> None:
    for one in details.waitpoints:
        secret = one.waitpoint_token.reveal().rpartition(":")[2]
        assert secret not in done.out + done.err


async def test_no_execution_waits(cli: Cli, engine: Engine) -> None:
    await engine.running()
    done = await cli("waiting")
    assert (done.code, done.out, done.err) == (0, "No execution waits for an answer.\n", "")
    assert (await cli("waiting", "--json")).out == ""


async def test_who_waits_for_what_the_soonest_first(cli: Cli, waits: Waits) -> None:
    engine = waits.engine
    now = await engine.now()
    later = await waits.park(
        AllOf((Single("legal", ("yes", "no")), Single("boss"))),
        handle=await engine.running(execution_kind="contract", lane="office"),
    )
    sooner = await waits.park(Single("release", "approved"), timeout_at=now + HOUR + 60_000)
    done = await cli("waiting")
    assert (done.code, done.err) == (0, "")
    header, first, *rest = done.lines
    assert header.split()[:5] == ["ID", "TASK", "LANE", "WAITS", "FOR"]
    token = sooner.details.waitpoint_token
    pattern = (
        rf"{sooner.handle.execution_id.compact} +job +default +release +approved +\d+s +in 1h +"
        rf"{sooner.details.waitpoint_id}  {token.kid} {token.fingerprint}"
    )
    assert re.fullmatch(pattern, first), first
    assert len(rest) == 2
    found = {row.split()[3]: row for row in rest}
    assert re.search(r"contract  office +legal +yes, no +\d+s +- ", found["legal"])
    assert "any signal" in found["boss"]
    assert_no_token(done, later.details)
    assert_no_token(done, sooner.details)


async def test_json_lane_limit_and_namespace(cli: Cli, waits: Waits) -> None:
    parked = await waits.park(handle=await waits.engine.running(lane="office", namespace="a"))
    await waits.park()
    done = await cli("waiting", "--json", "--lane", "office")
    (row,) = done.objects
    assert row["execution_id"] == parked.handle.execution_id
    assert (row["state"], row["namespace"], row["until"]) == ("suspended", "a", None)
    (waitpoint,) = row["waitpoints"]
    assert waitpoint["waitpoint_key"] == "k"
    assert waitpoint["required_signal_names"] == ["go"]
    assert waitpoint["token_fingerprint"] == parked.details.waitpoint_token.fingerprint
    assert not any(name.endswith("_token") for name in waitpoint)
    assert_no_token(done, parked.details)
    assert (await cli("waiting", "--json", "--namespace", "a")).objects == [row]
    assert len((await cli("waiting", "--json", "--limit", "1")).objects) == 1
    assert len((await cli("waiting", "--json")).objects) == 2


async def test_one_execution_in_any_state(cli: Cli, waits: Waits) -> None:
    handle = await waits.engine.running()
    execution_id = handle.execution_id
    early = await waits.backend.waitpoints.create_waitpoint(handle, "early", HOUR)
    done = await cli("waiting", execution_id.uuid)
    assert re.search(rf"early +not waiting yet +\d+s +in 59m  {early.waitpoint_id}", done.out)
    parked = await waits.park(Single("k", "go"), handle=handle)
    assert len((await cli("waiting", execution_id)).lines) == 3
    await waits.send(parked, source_identity="ada")
    await waits.backend.waitpoints.close_waitpoint(execution_id, early.waitpoint_id)
    done = await cli("waiting", execution_id)
    first, second = done.lines
    assert first == f"{execution_id.compact} is waiting and waits for no answer."
    assert re.fullmatch(r"Its last wait was answered \d+s ago: go by ada\.", second)


async def test_a_folder_without_data_has_no_waits(cli: Cli) -> None:
    del cli.environment["FF_URL"]
    done = await cli("waiting")
    assert (done.code, done.out) == (0, "No execution waits for an answer.\n")
    assert not (cli.folder / ".flowfabric").exists()


async def test_show_tells_what_it_waits_for(cli: Cli, waits: Waits) -> None:
    now = await waits.engine.now()
    parked = await waits.park(Single("release", "approved"), timeout_at=now + HOUR)
    execution_id = parked.handle.execution_id
    done = await cli("show", execution_id)
    assert re.search(
        r"Why it is not running: it waits for release \(approved\), until .* \(in (59m|1h).*\)\. "
        rf"Answer with `flowfabric approve {execution_id.compact}`\n",
        done.out,
    )
    token = parked.details.waitpoint_token
    assert re.search(
        rf"release +active +approved +\d+s +in \d+\w +{parked.details.waitpoint_id} +"
        rf"{token.kid} {token.fingerprint}\n",
        done.out,
    )
    assert_no_token(done, parked.details)
    (detail,) = (await cli("show", execution_id, "--json")).objects
    assert [one["waitpoint_key"] for one in detail["waitpoints"]] == ["release"]
    assert detail["wait"]["until"] == now + HOUR


async def test_show_tells_of_pauses_without_signals(cli: Cli, waits: Waits) -> None:
    by_hand = await waits.park(OperatorOnly())
    done = await cli("show", by_hand.handle.execution_id)
    assert "it waits for an operator. Resume it with `flowfabric approve " in done.out
    timed = await waits.park(TimeoutOnly(), timeout_at=await waits.engine.now() + HOUR)
    done = await cli("show", timed.handle.execution_id)
    assert "Why it is not running: it sleeps, until " in done.out


QUESTION: dict[str, Any] = {"prompt": "Deploy v2?\nTo production.", "details": {"version": 2}}


async def test_waiting_shows_what_is_asked(cli: Cli, waits: Waits) -> None:
    asked = await waits.park(**QUESTION)
    await waits.park()
    header, *rows = (await cli("waiting")).lines
    assert header.split()[:3] == ["ID", "TASK", "PROMPT"]
    assert sorted("Deploy v2?\\nTo production." in row for row in rows) == [False, True]
    one = await cli("waiting", asked.handle.execution_id)
    assert one.out.endswith(
        'Question\n  Deploy v2?\n  To production.\n  {\n    "version": 2\n  }\n'
    )
    (row,) = (await cli("waiting", "--json", asked.handle.execution_id)).objects
    assert {name: row[name] for name in QUESTION} == QUESTION
    assert {name: row["waitpoints"][0][name] for name in QUESTION} == QUESTION


async def test_show_tells_what_is_asked_and_afterwards_who_answered(cli: Cli, waits: Waits) -> None:
    legal = await waits.park(Single("legal", "approved"), **QUESTION)
    execution_id = legal.handle.execution_id
    done = await cli("show", execution_id)
    assert 'Question\n  Deploy v2?\n  To production.\n  {\n    "version": 2\n  }\n' in done.out
    await waits.backend.signals.deliver_approval_signal(
        execution_id, legal.details.waitpoint_id, "approved", decided_by="ada"
    )
    handle = (await waits.engine.claim()).handle
    payment = await waits.park(Single("payment", "paid"), handle=handle)
    await waits.send(payment, "paid", source_identity="bank")
    await waits.backend.executions.complete((await waits.engine.claim()).handle)
    done = await cli("show", execution_id)
    assert "Question" not in done.out
    assert re.search(r"last wait +was answered \d+s ago: paid by bank\n", done.out)
    signals = done.out.partition("Signals\n")[2]
    assert re.search(r"^AT +WAITPOINT +SIGNAL +BY\n", signals)
    assert re.search(r" legal +approved +ada\n.* payment +paid +bank \(external\)\n", signals)
    (detail,) = (await cli("show", execution_id, "--json")).objects
    assert [one["source_identity"] for one in detail["signals"]] == ["ada", "bank"]
