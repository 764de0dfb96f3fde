"""`flowfabric approve`: an operator's answer and its effect."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flowfabric.core.conditions import (
    AllOf,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
)
from flowfabric.core.contracts.suspension import Suspended
from flowfabric.core.state import PublicState
from tests.support.command import Cli
from tests.support.engine import Engine
from tests.support.suspension import Waits

HOUR = 3_600_000
RELEASE = Single("release", ("approved", "rejected"))
BOTH = AllOf((Single("legal", "approved"), Single("boss", "approved")))


@pytest.fixture
async def waits(engine: Engine) -> Waits:
    return await Waits.open(engine)


async def answers(waits: Waits, parked: Suspended) -> list[tuple[str, str, bytes | None]]:
    """Name, sender and payload of what ended the wait."""
    claim = await waits.engine.claim()
    assert claim.handle.execution_id == parked.handle.execution_id
    signals = await waits.backend.waitpoints.observe_signals(claim.handle)
    return [(one.signal_name, one.source_identity, one.payload) for one in signals]


async def test_the_only_waitpoint_needs_no_name(cli: Cli, waits: Waits) -> None:
    parked = await waits.park(RELEASE)
    execution_id = parked.handle.execution_id
    done = await cli("approve", execution_id.uuid[:12], "--as", "ada", "--payload", '{"ok": 1}')
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{execution_id.compact}  release  approved: the execution resumes\n"
    assert await answers(waits, parked) == [("approved", "ada", b'{"ok": 1}')]


async def test_reject_and_json(cli: Cli, waits: Waits) -> None:
    parked = await waits.park(RELEASE)
    done = await cli("approve", parked.handle.execution_id, "--reject", "--json", USER="grace")
    (said,) = done.objects
    assert re.fullmatch(r"[0-9a-f-]{36}", said.pop("signal_id"))
    assert said == {
        "execution_id": parked.handle.execution_id,
        "waitpoint_id": parked.details.waitpoint_id,
        "waitpoint_key": "release",
        "signal_name": "rejected",
        "outcome": "accepted",
        "effect": "resume_condition_satisfied",
        "resumed": True,
    }
    assert (await answers(waits, parked))[0][:2] == ("rejected", "grace")


async def test_two_distinct_people(cli: Cli, waits: Waits) -> None:
    pair = Count(n=2, waitpoints=("release",), count_kind=CountKind.DISTINCT_SOURCES)
    parked = await waits.park(pair)
    execution_id = parked.handle.execution_id
    assert "more signals are needed" in (await cli("approve", execution_id, "--as", "ada")).out
    again = await cli("approve", execution_id, "--as", "ada")
    assert again.code == 0
    assert again.out.endswith("approved: no change: the same signal was sent before\n")
    other = await cli("approve", execution_id, "--as", "ada", "--name", "sure")
    assert "not counted" in other.out
    assert await waits.backend.reads.read_execution_state(execution_id) is PublicState.SUSPENDED
    assert (await cli("approve", execution_id, "--as", "bob")).out.endswith(
        "the execution resumes\n"
    )


async def test_a_late_answer_gets_the_earlier_one(cli: Cli, waits: Waits) -> None:
    parked = await waits.park(RELEASE)
    execution_id = parked.handle.execution_id
    assert (await cli("approve", execution_id, "--as", "ada")).code == 0
    before = await waits.engine.dump()
    late = await cli("approve", execution_id, "--as", "bob", "--json")
    assert (late.code, late.out) == (1, "")
    assert late.error["code"] == "already_answered"
    assert re.search(
        r"is waiting; its wait was answered \d+s ago: approved by ada$", late.error["message"]
    )
    assert await waits.engine.dump() == before


@pytest.mark.parametrize("given", ["boss", "id"])
async def test_several_open_waitpoints(cli: Cli, waits: Waits, given: str) -> None:
    parked = await waits.park(BOTH)
    execution_id = parked.handle.execution_id
    legal, boss = parked.details.waitpoints
    unclear = await cli("approve", execution_id)
    assert unclear.code == 1
    assert "ambiguous_waitpoint: " in unclear.err
    for one in (legal, boss):
        assert f"\n  {one.waitpoint_id}  {one.waitpoint_key}  (approved)" in unclear.err
    named = boss.waitpoint_id[:8] if given == "id" else "boss"
    assert "more signals are needed" in (await cli("approve", execution_id, named)).out
    unknown = await cli("approve", execution_id, "nobody")
    assert unknown.err.startswith("error: waitpoint_not_found: 'nobody' is not an open waitpoint")
    assert (await cli("approve", execution_id, "legal")).out.endswith("the execution resumes\n")


@pytest.mark.parametrize(
    ("condition", "arguments", "said"),
    [
        (Single("k", ("yes", "no")), (), "k does not accept 'approved', only yes, no"),
        (Single("k", "approved"), ("--reject",), "k does not accept 'rejected', only approved"),
        (TimeoutOnly(), (), "only waits for its timeout"),
        (OperatorOnly(), ("--reject",), "accepts no signal or payload"),
    ],
)
async def test_an_answer_that_the_wait_does_not_accept_is_not_sent(
    cli: Cli, waits: Waits, condition: Condition, arguments: tuple[str, ...], said: str
) -> None:
    parked = await waits.park(condition, timeout_at=await waits.engine.now() + HOUR)
    before = await waits.engine.dump()
    done = await cli("approve", parked.handle.execution_id, *arguments)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: not_asked: ")
    assert said in done.err
    assert "\nhint: " in done.err
    assert await waits.engine.dump() == before


async def test_a_name_that_was_typed_is_sent(cli: Cli, waits: Waits) -> None:
    parked = await waits.park(Single("k", ("yes", "no")))
    execution_id = parked.handle.execution_id
    useless = await cli("approve", execution_id, "--name", "perhaps")
    assert useless.out.endswith("perhaps: stored, but this wait only accepts yes, no\n")
    assert (await cli("approve", execution_id, "--name", "no")).out.endswith(
        "the execution resumes\n"
    )


async def test_a_pause_for_an_operator_is_ended(cli: Cli, waits: Waits) -> None:
    parked = await waits.park(OperatorOnly())
    execution_id = parked.handle.execution_id
    done = await cli("approve", execution_id, "--json")
    assert done.objects == [
        {
            "execution_id": execution_id,
            "outcome": "resumed",
            "state": "waiting",
            "resumed": True,
        }
    ]
    again = await cli("approve", execution_id)
    assert "nothing_waiting: " in again.err
    assert "its wait was resumed by an operator" in again.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("deadbeef",),
            "error: execution_not_found: no execution has an id that starts with 'deadbeef'",
        ),
        (("RUNNING",), "error: nothing_waiting: "),
        (("PARKED", "--payload", "{oops"), "error: invalid_input: --payload: not JSON"),
        (("PARKED", "--payload", "@nowhere.json"), "error: invalid_input: --payload: No such file"),
        (("PARKED", "--reject", "--name", "x"), "error: usage: "),
    ],
)
async def test_mistakes(cli: Cli, waits: Waits, arguments: tuple[str, ...], said: str) -> None:
    ids: dict[str, Any] = {
        "PARKED": (await waits.park(RELEASE)).handle.execution_id,
        "RUNNING": (await waits.engine.running()).execution_id,
    }
    before = await waits.engine.dump()
    done = await cli("approve", *(ids.get(each, each) for each in arguments))
    assert done.code != 0
    assert done.out == ""
    assert done.err.startswith(said)
    assert await waits.engine.dump() == before
