"""`summary`, `revoke-lease`, `close-waitpoint`, `secrets`, `rotate-secret`, and all of `replay`."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest

from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import EngineError
from flowfabric.core.state import OwnershipState, PublicState
from tests.support.command import Cli
from tests.support.engine import Engine, refused
from tests.support.suspension import SECRET, Waits
from tests.support.terminal import in_terminal

NEW_SECRET = "cd" * 32


@pytest.fixture
async def waits(engine: Engine) -> Waits:
    return await Waits.open(engine)


async def test_summary(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    missing = await cli("summary", handle.execution_id)
    assert (missing.code, missing.out) == (1, "")
    assert missing.err.startswith(
        f"error: no_summary: attempt 1 of {handle.execution_id.compact} has no "
    )
    frame = Frame(payload=b'{"step":"load","done":3}')
    await engine.backend.streams.append_frame(handle, frame, mode="summary")
    plain = await cli("summary", handle.execution_id)
    assert json.loads(plain.out) == {"step": "load", "done": 3}
    (found,) = (await cli("summary", handle.execution_id, "--attempt", "1", "--json")).objects
    assert (found["attempt"], found["version"]) == (1, 1)
    assert found["document"] == {"step": "load", "done": 3}
    assert (await cli("summary", handle.execution_id, "--attempt", "7")).code == 1


async def test_revoke_lease(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    execution_id = handle.execution_id
    stale = await cli("revoke-lease", execution_id, "--lease", "0" * 8, "--yes")
    assert (stale.code, stale.out) == (1, "")
    assert stale.err.startswith("error: stale_lease: ")
    done = await cli("revoke-lease", execution_id, "--yes", "--as", "ada", "--reason", "stuck")
    assert done.out.startswith(f"{execution_id.compact}  lease ")
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.state_vector.ownership_state is OwnershipState.LEASE_REVOKED
    (event,) = [
        event
        for event in await engine.backend.reads.read_execution_history(execution_id)
        if event.type == "revoked"
    ]
    assert (event.get("revoked_by"), event.get("reason")) == ("ada", "stuck")
    (again,) = (await cli("revoke-lease", execution_id, "--yes", "--json")).objects
    assert (again["outcome"], again["reason"]) == ("already_satisfied", "already_revoked")


async def test_close_waitpoint(cli: Cli, waits: Waits) -> None:
    parked = await waits.park()
    execution_id = parked.handle.execution_id
    done = await cli("close-waitpoint", execution_id, "k", "--yes")
    assert (done.code, done.out) == (0, f"{execution_id.compact}  k: closed\n")
    with pytest.raises(EngineError, match="waitpoint_closed"):
        await waits.send(parked)
    assert await waits.backend.reads.read_execution_state(execution_id) is PublicState.SUSPENDED
    unknown = await cli("close-waitpoint", execution_id, "k", "--yes", "--json")
    assert unknown.error["code"] == "nothing_waiting"


async def test_replay_takes_all_its_inputs(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    done = await cli(
        *("replay", handle.execution_id, "--as", "ada", "--reason", "again", "--keep-steps")
    )
    assert done.code == 0
    await engine.claim()
    attempt = (await engine.backend.reads.read_attempts(handle.execution_id))[1]
    assert (attempt.replay_reason, attempt.replay_requested_by) == ("again", "ada")


async def test_secrets_and_their_rotation(cli: Cli, waits: Waits, tmp_path: Path) -> None:
    parked = await waits.park()
    partitions = waits.backend.counts.flow
    listed = await cli("secrets")
    assert listed.lines[1].split() == ["k1", "-", str(partitions)]
    given = tmp_path / "given"
    given.write_text(NEW_SECRET)
    done = await cli("rotate-secret", "k2", "--yes", "--secret-file", str(given))
    assert done.out == f"k2 signs new tokens on {partitions} partitions.\n"
    (keys,) = (await cli("secrets", "--json")).objects
    assert (keys["current_kid"], keys["partitions"]) == ("k2", partitions)
    assert [key["kid"] for key in keys["verifying"]] == ["k1"]
    assert (await waits.park()).details.waitpoint_token.kid == "k2"
    await waits.send(parked)
    file = tmp_path / "secret"
    file.write_text(f"{'ef' * 32}\n")
    from_file = ("--secret-file", str(file), "--grace", "0s", "--yes", "--json")
    (third,) = (await cli("rotate-secret", "k3", *from_file)).objects
    assert third == {"new_kid": "k3", "rotated": partitions, "failed": []}
    for done in (listed, await cli("secrets"), await cli("secrets", "--json")):
        assert all(secret not in done.out + done.err for secret in (SECRET, NEW_SECRET, "ef" * 32))


async def test_a_secret_is_generated_and_kept_in_a_file(
    cli: Cli, waits: Waits, tmp_path: Path
) -> None:
    file, parked = tmp_path / "new", await waits.park()
    command = ("rotate-secret", "--secret-file", str(file), "--yes", "--json")
    (first,) = (await cli(*command)).objects
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}\n", file.read_text())
    assert re.fullmatch(r"k-[0-9a-f]{8}", first["new_kid"])
    assert first["failed"] == []
    # A repeat reads the file and changes nothing.
    again = await cli(*command)
    assert again.objects == [first]
    assert file.read_text().strip() not in again.out + again.err
    await waits.send(parked)


async def test_the_grace_comes_from_the_environment(cli: Cli, waits: Waits, tmp_path: Path) -> None:
    parked = await waits.park()
    command = ("rotate-secret", "--secret-file", str(tmp_path / "new"), "--yes")
    assert (await cli(*command, FF_WAITPOINT_HMAC_GRACE_MS="x")).code == 1
    assert (await cli(*command, FF_WAITPOINT_HMAC_GRACE_MS="0")).code == 0
    await waits.engine.advance(1)
    await refused(waits.send(parked), "token_expired")


async def test_a_rotation_that_did_not_finish(cli: Cli, waits: Waits, tmp_path: Path) -> None:
    await waits.backend.secrets.rotate_waitpoint_hmac_secret(3, "k2", "ef" * 32)
    groups = (await cli("secrets", "--json")).objects
    assert [(group["current_kid"], group["partitions"]) for group in groups] == [
        ("k1", waits.backend.counts.flow - 1),
        ("k2", 1),
    ]
    (tmp_path / "new").write_text(NEW_SECRET)
    done = await cli("rotate-secret", "k2", "--yes", "--secret-file", str(tmp_path / "new"))
    assert done.code == 1
    assert done.err.startswith("error: rotation_incomplete: 1 partition not rotated (3): ")
    assert "run the same command again, which is safe" in done.err
    assert NEW_SECRET not in done.out + done.err


@pytest.mark.parametrize(
    ("kid", "secret", "said"),
    [
        ("k2", None, "error: missing_secret: --secret-file is required unless the Valkey is"),
        ("k2", " ", "error: missing_secret: "),
        ("k2", "xyz", "error: invalid_secret_hex: "),
        ("no kid", NEW_SECRET, "error: invalid_kid: "),
    ],
)
async def test_rotation_mistakes(
    cli: Cli, engine: Engine, kid: str, secret: str | None, said: str
) -> None:
    options: tuple[str, ...] = ()
    if secret is not None:
        (cli.folder / "new").write_text(secret)
        options = ("--secret-file", "new")
    done = await cli("rotate-secret", kid, *options, "--yes")
    assert done.code in (1, 2)
    assert done.err.startswith(said)


@pytest.mark.parametrize(
    "command",
    [
        ("revoke-lease", "abcd"),
        ("close-waitpoint", "abcd", "k"),
        ("rotate-secret", "--secret-file", "new"),
    ],
)
async def test_what_cannot_be_undone_needs_a_yes(
    cli: Cli, engine: Engine, command: tuple[str, ...]
) -> None:
    done = await cli(*command, FF_WAITPOINT_HMAC_SECRET=NEW_SECRET)
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: not_confirmed: this cannot be undone",
        "hint: pass --yes to run it without a terminal",
    ]


async def test_ctrl_c_at_the_question_changes_nothing(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    before = await engine.dump()
    async with in_terminal(cli, "revoke-lease", handle.execution_id) as terminal:
        await terminal.until("[y/N]")
        await terminal.interrupt()
        assert await terminal.end() == 130
    assert await engine.dump() == before
