"""`flowfabric signal`: an answer proved by the waitpoint's token, which nothing prints."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.suspension import Suspended
from tests.support.command import COMMAND, Cli
from tests.support.engine import Engine
from tests.support.suspension import Waits


@pytest.fixture
async def waits(engine: Engine) -> Waits:
    return await Waits.open(engine)


def token_of(parked: Suspended) -> str:
    return parked.details.waitpoint_token.reveal()


async def received(waits: Waits) -> tuple[str, str, bytes | None]:
    """Name, sender and payload of what ended the only wait there was."""
    claim = await waits.engine.claim()
    (signal,) = await waits.backend.waitpoints.observe_signals(claim.handle)
    return signal.signal_name, signal.source_identity, signal.payload


async def test_with_the_variable_and_the_key(cli: Cli, waits: Waits, tmp_path: Path) -> None:
    parked = await waits.park(Single("paid", "done"))
    execution_id = parked.handle.execution_id
    (tmp_path / "receipt.json").write_text('{"amount": 12}')
    done = await cli(
        *("signal", execution_id, "paid", "done", "--payload", "@receipt.json"),
        *("--source", "bank"),
        FF_WAITPOINT_TOKEN=token_of(parked),
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{execution_id.compact}  paid  done: the execution resumes\n"
    assert await received(waits) == ("done", "bank", b'{"amount": 12}')


async def test_with_the_option_and_the_id(cli: Cli, waits: Waits) -> None:
    parked = await waits.park()
    execution_id, token = parked.handle.execution_id, token_of(parked)
    wrong = await cli("signal", execution_id, "k", "go", "--token", token[:-1] + "x")
    assert (wrong.code, wrong.out) == (1, "")
    assert wrong.err.startswith("error: invalid_token: the token was refused\nhint: ")
    arguments = ("signal", execution_id, parked.details.waitpoint_id, "wait", "--token", token)
    for outcome, effect in (("accepted", "no_op"), ("duplicate", None)):
        done = await cli(*arguments, "--json", "--idempotency-key", "once")
        (said,) = done.objects
        assert (said["outcome"], said["effect"], said["resumed"]) == (outcome, effect, False)
        assert token not in done.out + done.err
    done = await cli(*arguments[:3], "go", *arguments[4:])
    assert done.out.endswith("go: the execution resumes\n")
    late = await cli(*arguments[:3], "go", *arguments[4:])
    answered = f"error: already_answered: {execution_id.compact} is waiting; its wait was"
    assert late.err.startswith(answered)
    assert token not in late.err + wrong.err


async def test_a_payload_from_standard_input(cli: Cli, waits: Waits) -> None:
    parked = await waits.park()
    environment = cli.environment | {"FF_WAITPOINT_TOKEN": token_of(parked)}
    done = await asyncio.to_thread(
        subprocess.run,
        [COMMAND, "signal", parked.handle.execution_id, "k", "go", "--payload", "-"],
        env=environment,
        cwd=cli.folder,
        input=b'"from a pipe"',
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    assert await received(waits) == ("go", "", b'"from a pipe"')


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, "error: missing_token: a signal needs the waitpoint's token\nhint: set FF_WAIT"),
        ("nonsense", "error: invalid_token: the token was refused\nhint: "),
        ("other", "error: invalid_token: the token was refused\nhint: "),
    ],
)
async def test_refused_tokens_change_nothing(
    cli: Cli, waits: Waits, token: str | None, said: str
) -> None:
    parked, other = await waits.park(), await waits.park()
    given = token_of(other) if token == "other" else token
    variables = {} if given is None else {"FF_WAITPOINT_TOKEN": given}
    done = await cli("signal", parked.handle.execution_id, "k", "go", **variables)
    assert (done.code, done.out) == (2 if given is None else 1, "")
    assert done.err.startswith(said)
    assert given is None or given not in done.err
    assert len((await cli("waiting", "--json")).objects) == 2


async def test_unknown_places(cli: Cli, waits: Waits) -> None:
    parked = await waits.park()
    variables = {"FF_WAITPOINT_TOKEN": token_of(parked)}
    nobody = await cli("signal", "deadbeef", "k", "go", **variables)
    assert nobody.err.startswith(
        "error: execution_not_found: no execution has an id that starts with 'deadbeef'"
    )
    nowhere = await cli("signal", parked.handle.execution_id, "q", "go", **variables)
    assert nowhere.err.startswith(
        "error: waitpoint_not_found: 'q' is not an open waitpoint; open on "
    )
    usage = await cli("signal", parked.handle.execution_id, "k", **variables)
    assert (usage.code, "Missing argument 'NAME'" in usage.err) == (2, True)
    assert token_of(parked) not in nobody.err + nowhere.err + usage.err
