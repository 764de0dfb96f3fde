"""A folder that cannot be used, an output that takes nothing: one sentence, never a traceback."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.command import COMMAND, Cli, Done

_PR_CAPBSET_DROP = 24
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


@pytest.fixture
def bare(tmp_path: Path) -> Cli:
    """The command in an empty folder without any setting."""
    return Cli(tmp_path)


def _as_anybody() -> None:
    """Permissions mean nothing to root unless it gives these two up."""
    if os.geteuid() == 0:
        for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
            assert ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability) == 0


async def run(cli: Cli, *arguments: str, **options: Any) -> Done:
    """Like `cli(…)`, with streams or privileges of the caller's choice."""
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    variables: dict[str, str] = settings.pop("variables", {})
    done = await asyncio.to_thread(
        subprocess.run,
        [COMMAND, *arguments],
        env=cli.environment | variables,
        cwd=cli.folder,
        text=True,
        check=False,
        timeout=40,
        **settings,
    )
    return Done(done.returncode, done.stdout or "", done.stderr or "")


def is_a_sentence(done: Done, said: str) -> None:
    """One line (and a hint), and no traceback."""
    assert done.err.startswith("error: ")
    assert said in done.err.splitlines()[0]
    assert "Traceback" not in done.err
    assert done.code == 1


# --- the folder -------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="gives capabilities up")
@pytest.mark.parametrize("inside", ["", "data"])
async def test_a_folder_of_somebody_else(bare: Cli, inside: str) -> None:
    """Of the folder itself, and of the one above it."""
    closed = bare.folder / "closed"
    closed.mkdir()
    closed.chmod(0)
    chosen = {"FF_DATA_DIR": str(closed / inside)}
    try:
        for command in (("ps",), ("show", "abcd"), ("cancel", "abcd"), ("waiting",)):
            done = await run(bare, *command, preexec_fn=_as_anybody, variables=chosen)
            is_a_sentence(done, f"cannot write to {closed / inside} (Permission denied)")
        done = await run(bare, "ps", "--json", preexec_fn=_as_anybody, variables=chosen)
        assert (done.code, done.error["code"]) == (1, "config")
        done = await run(bare, "doctor", "--json", preexec_fn=_as_anybody, variables=chosen)
        assert (done.code, done.err) == (1, "")
        (check,) = done.objects[0]["checks"]
        assert (check["name"], check["grade"]) == ("folder", "broken")
    finally:
        closed.chmod(0o700)


async def test_a_path_that_no_system_takes(bare: Cli) -> None:
    done = await bare("ps", FF_DATA_DIR="a" * 300)
    is_a_sentence(done, "is too long; shorten it, or set FF_DATA_DIR")


async def test_a_file_where_the_folder_should_be(bare: Cli) -> None:
    (bare.folder / "file").touch()
    for chosen in ("file", "file/below"):
        is_a_sentence(await bare("ps", FF_DATA_DIR=chosen), "is not a folder")
        done = await bare("doctor", "--json", FF_DATA_DIR=chosen)
        assert (done.code, done.objects[0]["ok"]) == (1, False)


# --- what doctor says where no worker could start ----------------------------------------------


def _grades(done: Done) -> dict[str, str]:
    return {check["name"]: check["grade"] for check in done.objects[0]["checks"]}


async def test_doctor_tries_the_folder_and_the_server_before_the_first_start(bare: Cli) -> None:
    done = await bare("doctor", "--json", FF_DATA_DIR=str(bare.folder / "a" / "b"))
    assert done.code == 0
    assert _grades(done) == {"data": "warning", "folder": "ok", "server": "ok"}
    assert list(bare.folder.iterdir()) == []
    empty = bare.folder / "empty"
    empty.mkdir()
    done = await bare("doctor", "--json", FF_DATA_DIR=str(empty))
    assert _grades(done) == {"data": "warning", "folder": "ok", "server": "ok"}
    assert list(empty.iterdir()) == []


async def test_doctor_refuses_a_folder_others_can_write_in(bare: Cli) -> None:
    shared = bare.folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    done = await bare("doctor", "--json", FF_DATA_DIR=str(shared))
    assert (done.code, _grades(done)["folder"]) == (1, "broken")
    assert "other users can write" in done.out


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place where nobody makes folders")
async def test_doctor_refuses_a_place_where_no_folder_can_be_made(bare: Cli) -> None:
    done = await bare("doctor", "--json", FF_DATA_DIR="/proc/nope")
    assert (done.code, _grades(done)["folder"]) == (1, "broken")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 1", "is not a Valkey server"),
        ("echo Redis server v=7.2.4 sha=0", "is not a Valkey server"),
        ("echo Valkey server v=7.2.9 sha=0", "is Valkey 7.2; 8.0 or newer is needed"),
    ],
)
async def test_doctor_refuses_another_program(bare: Cli, script: str, said: str) -> None:
    program = bare.folder / "server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    chosen = {"FF_VALKEY_BINARY": str(program), "FF_DATA_DIR": str(bare.folder / "new")}
    done = await bare("doctor", **chosen)
    assert done.code == 1
    assert f"✗ server  {program} {said}" in done.out
    assert "→ correct FF_VALKEY_BINARY" in done.out


async def test_a_program_that_cannot_be_run(bare: Cli) -> None:
    program = bare.folder / "server"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    done = await bare("doctor", FF_VALKEY_BINARY=str(program))
    assert done.code == 1
    assert f"✗ server  {program} cannot be run: Exec format error" in done.out


async def test_a_first_start_that_was_interrupted(bare: Cli) -> None:
    """All it left is the socket; whoever comes next finishes it."""
    (bare.folder / ".flowfabric").mkdir(mode=0o700)
    (bare.folder / ".flowfabric" / "valkey.sock").touch()
    done = await bare("doctor", "--json")
    assert (done.code, _grades(done)["partitions"]) == (0, "warning")
    listed = await bare("ps")
    assert (listed.code, listed.out, listed.err) == (0, "No executions yet.\n", "")
    assert _grades(await bare("doctor", "--json"))["partitions"] == "ok"


# --- the output -------------------------------------------------------------------------------


@pytest.fixture
def full() -> Iterator[IO[str]]:
    """A file on a disk without room."""
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("no device that is always full")
    with device.open("w") as opened:
        yield opened


@pytest.mark.parametrize("command", [("ps",), ("doctor",), ("--help",), ("ps", "--help")])
async def test_a_full_disk_behind_the_output(
    bare: Cli, full: IO[str], command: tuple[str, ...]
) -> None:
    done = await run(bare, *command, stdout=full)
    is_a_sentence(done, "cannot write to standard output: No space left on device")


async def test_a_full_disk_as_json(bare: Cli, full: IO[str]) -> None:
    done = await run(bare, "doctor", "--json", stdout=full)
    assert (done.code, done.error["code"]) == (1, "output")
    # Neither can the error be written then: the code is what is left.
    assert (await run(bare, "show", "abcd", stderr=full)).code == 1


@pytest.mark.parametrize("command", [("ps",), ("doctor", "--json"), ("--help",)])
async def test_a_closed_output(bare: Cli, command: tuple[str, ...]) -> None:
    done = await run(bare, *command, stdout=None, preexec_fn=lambda: os.close(1))
    assert done.code == 1
    assert "cannot write to standard output: Bad file descriptor" in done.err
    assert "Traceback" not in done.err


async def test_a_closed_error_stream(bare: Cli) -> None:
    assert (await run(bare, "ps", stderr=None, preexec_fn=lambda: os.close(2))).code == 0
    assert (await run(bare, "pss", stderr=None, preexec_fn=lambda: os.close(2))).code == 2


@pytest.mark.parametrize("command", [("ps",), ("doctor",), ("doctor", "--json"), ("--help",)])
async def test_a_closed_output_pipe(bare: Cli, command: tuple[str, ...]) -> None:
    """Not the code of something broken: a pipe that ended is how `head` says enough."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = await run(bare, *command, stdout=write)
    finally:
        os.close(write)
    assert (done.code, done.err) == (141, "")
