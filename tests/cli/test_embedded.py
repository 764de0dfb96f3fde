"""The project's own Valkey: looking never creates it, working does, and all commands share it."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flowfabric.app.fabric import Fabric
from flowfabric.app.run import Run
from tests.support.command import Cli


@pytest.fixture
def project(tmp_path: Path) -> Cli:
    """The command in an empty project folder."""
    return Cli(tmp_path)


async def test_looking_at_nothing_leaves_nothing(project: Cli) -> None:
    listed = await project("ps")
    assert (listed.code, listed.err) == (0, "")
    assert listed.out.startswith("No executions: there is no data in ")
    assert "flowfabric worker module:app" in listed.out
    as_json = await project("ps", "--json")
    assert (as_json.code, as_json.out, as_json.err) == (0, "", "")
    examined = await project("doctor")
    assert examined.code == 0
    assert "⚠ data" in examined.out
    for command in ("show", "cancel", "replay"):
        done = await project(command, "deadbeef")
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("error: no_data: there is no data in ")
    assert list(project.folder.iterdir()) == []


@pytest.mark.parametrize("noun", ["budget", "quota"])
async def test_limits_may_come_before_the_first_work(project: Cli, noun: str) -> None:
    """They are often created before any program runs."""
    made = await project(noun, "create", "team", FF_DATA_DIR=str(project.folder / "data"))
    assert (made.code, made.out) == (0, "team  created\n")
    shown = await project(noun, "show", "team", FF_DATA_DIR=str(project.folder / "data"))
    assert (shown.code, shown.err) == (0, "")


async def test_commands_find_what_a_program_submitted(
    project: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FF_URL", "FF_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FF_DATA_DIR", str(project.folder / ".flowfabric"))
    async with Fabric() as app:
        run: Run[str] = await app.submit("greet", "Ada")
        joined = await project("ps", "--json")
        assert [row["execution_id"] for row in joined.objects] == [run.id]
        below = project.folder / "notebooks"
        below.mkdir()
        assert (await Cli(below)("ps", "--json")).objects == joined.objects
    # The program is gone, and with it the server: the command starts it again on its data.
    shown = await project("show", run.id.uuid[:8])
    assert shown.code == 0
    assert '["Ada"]' in shown.out
    assert (await project("cancel", run.id)).out == f"{run.id.compact}  cancelled\n"
    elsewhere = await project("ps", "--json", FF_DATA_DIR=str(project.folder / "other"))
    assert (elsewhere.code, elsewhere.out) == (0, "")
    examined = await project("doctor")
    assert examined.code == 0
    assert f"embedded Valkey in {project.folder}/.flowfabric" in examined.out
    assert "append-only file, fsync everysec" in examined.out
    assert "✓ secret file" in examined.out
    (project.folder / ".flowfabric/waitpoint_secret").chmod(0o644)
    examined = await project("doctor")
    assert examined.code == 0
    assert "⚠ secret file" in examined.out


async def test_a_worker_with_a_wrong_setting_starts_nothing(project: Cli) -> None:
    (project.folder / "shop.py").write_text(
        "import flowfabric as ff\napp = ff.Fabric()\napp.task('a')(lambda: None)\n"
    )
    done = await project("worker", "shop:app", FF_LEASE_EXPIRY_INTERVAL_MS="soon")
    assert (done.code, done.out) == (1, "")
    assert "invalid value for FF_LEASE_EXPIRY_INTERVAL_MS" in done.err
    assert not (project.folder / ".flowfabric").exists()


async def test_prepare_creates_the_folder_when_asked(project: Cli) -> None:
    done = await project("doctor", "--prepare")
    assert done.code == 0
    assert "✓ prepare" in done.out
    assert (await project("ps")).out == "No executions yet.\n"


async def test_a_rotation_updates_the_secret_of_the_folder(project: Cli) -> None:
    await project("doctor", "--prepare")
    folder = project.folder / ".flowfabric"
    file = folder / "waitpoint_secret"
    before = file.read_text()
    file.chmod(0o644)
    assert (await project("rotate-secret", "--yes")).code == 0
    assert re.fullmatch(r"[0-9a-f]{64}\n", generated := file.read_text())
    assert generated != before
    given = project.folder / "given"
    given.write_text("AB" * 32)
    command = ("rotate-secret", "k2", "--yes", "--secret-file", "given")
    assert (await project(*command)).code == 0
    assert file.read_text() == "ab" * 32 + "\n" != before
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not [each.name for each in folder.iterdir() if each.name.startswith(".waitpoint")]
    # Rotating to the same key again repairs the file.
    file.write_text(before)
    assert (await project(*command)).code == 0
    assert file.read_text() == "ab" * 32 + "\n"
    given.write_text("ef" * 32)
    refused = await project(*command)
    assert refused.code == 1
    assert file.read_text() == "ab" * 32 + "\n"


async def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """A name is bytes to the system; how it is shown must not stop anything."""
    folder = tmp_path / os.fsdecode(b"pr\xff%41 j")
    folder.mkdir()
    project = Cli(folder)
    nothing = await project("show", "deadbeef", "--json")
    assert (nothing.code, nothing.error["code"]) == (1, "no_data")
    assert "pr\\xff%41 j" in nothing.error["message"]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=project.environment,
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"27\n"
    listed = await project("ps", "--json")
    assert [row["state"] for row in listed.objects] == ["completed"]
    examined = await project("doctor", "--json")
    assert (examined.code, examined.err) == (0, "")
    assert "pr\\xff%41 j" in examined.objects[0]["address"]


PROGRAM = """
import asyncio
import flowfabric as ff

app = ff.Fabric()

@app.task()
async def cube(n: int) -> int:
    return n**3

async def main():
    async with app, app.worker():
        print(await (await app.submit(cube, 3)).result(timeout=30))

asyncio.run(main())
"""
