"""Killed users, servers and guards: the data stays, and nothing is left running."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.embedded import EmbeddedServer, locate_binary
from tests.unit.valkey_embedded.support import (
    User,
    command,
    guard_of,
    is_alive,
    store,
    wait_gone,
    wait_settled,
    wait_until,
)

Start = Callable[..., User]


def server_pid(server: EmbeddedServer) -> int:
    assert server.pid is not None
    return server.pid


def kill(pid: int) -> None:
    """kill -9, done when it has taken effect."""
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)


def test_killed_owner_leaves_the_server_to_the_others(folder: Path, start: Start) -> None:
    owner = start(folder)
    known = owner.hear()
    command(known["url"], "SET", "k", "v")
    with EmbeddedServer.acquire(folder) as server:
        owner.signal_group(signal.SIGKILL)
        assert server.ensure_running() is False
        assert server.pid == known["pid"]
        assert command(server.url, "GET", "k") == "v"


def test_killed_sole_owner_takes_the_server_along(folder: Path, start: Start) -> None:
    owner = start(folder)
    known = owner.hear()
    for number in range(100):
        command(known["url"], "SET", f"k{number}", "v")
    owner.signal_group(signal.SIGKILL)
    wait_gone(known["pid"])
    with EmbeddedServer.acquire(folder) as server:
        assert server.owner
        assert command(server.url, "DBSIZE") == ":100"


def test_killed_server_is_restarted_on_its_data(folder: Path, start: Start) -> None:
    other = start(folder)
    known = other.hear()
    with EmbeddedServer.acquire(folder) as server:
        store(server.url, "k", "v")
        kill(known["pid"])
        assert server.ensure_running() is True
        assert server.owner
        assert server.pid not in (None, known["pid"])
        assert command(known["url"], "GET", "k") == "v"
        assert other.ask("ensure") == {"restarted": False, "pid": server.pid, "url": known["url"]}


def test_newcomer_restarts_a_killed_server(folder: Path, start: Start) -> None:
    with EmbeddedServer.acquire(folder) as server:
        store(server.url, "k", "v")
        kill(server_pid(server))
        fresh = start(folder).hear()
        assert fresh["owner"]
        assert server.ensure_running() is False
        assert command(server.url, "GET", "k") == "v"


@pytest.mark.skipif(sys.platform != "linux", reason="parent death signal")
def test_killed_guard_takes_the_server_along(folder: Path) -> None:
    with EmbeddedServer.acquire(folder) as server:
        command(server.url, "SET", "k", "v")
        pid = server_pid(server)
        kill(guard_of(pid))
        wait_gone(pid)
        assert server.ensure_running() is True
        assert command(server.url, "GET", "k") == "v"


def test_server_without_a_guard_is_replaced(folder: Path) -> None:
    server = EmbeddedServer.acquire(folder)
    server.release()
    wait_settled(folder)
    with (folder / "server.lock").open("a") as lock:
        orphan = subprocess.Popen(
            [str(locate_binary()), "--port", "0", "--unixsocket", "valkey.sock"],
            cwd=folder,
            pass_fds=(lock.fileno(),),
            preexec_fn=lambda: fcntl.lockf(lock, fcntl.LOCK_EX),  # noqa: PLW1509
        )
    wait_until((folder / "valkey.sock").exists)
    with EmbeddedServer.acquire(folder) as server:
        assert orphan.wait(1) == 0
        assert server.owner
        assert command(server.url, "PING") == "+PONG"


def test_removed_socket_leads_to_a_restart(folder: Path) -> None:
    with EmbeddedServer.acquire(folder) as server:
        command(server.url, "SET", "k", "v")
        pid = server_pid(server)
        (folder / "valkey.sock").unlink()
        assert server.ensure_running() is True
        assert not is_alive(pid)
        assert command(server.url, "GET", "k") == "v"


def test_stale_files_of_a_machine_crash(folder: Path) -> None:
    EmbeddedServer.acquire(folder).release()
    wait_settled(folder)
    (folder / "temp-rewriteaof-bg-77.aof").write_text("half")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "valkey.sock"))
    with EmbeddedServer.acquire(folder) as server:
        assert command(server.url, "PING") == "+PONG"
        assert not list(folder.glob("temp-*"))


def aof_with(folder: Path, *keys: str) -> Path:
    """Write the keys, crash the server, and give the file they are in."""
    with EmbeddedServer.acquire(folder) as server:
        for key in keys[:-1]:
            command(server.url, "SET", key, "value")
        store(server.url, keys[-1], "value")
        kill(server_pid(server))
    wait_settled(folder)
    return next((folder / "appendonlydir").glob("*.incr.aof"))


def test_truncated_log_loses_only_its_tail(folder: Path) -> None:
    aof = aof_with(folder, "whole", "cut")
    os.truncate(aof, aof.stat().st_size - 3)
    with EmbeddedServer.acquire(folder) as server:
        assert command(server.url, "GET", "whole") == "value"
        assert command(server.url, "GET", "cut") == "$-1"
        assert command(server.url, "SET", "cut", "again") == "+OK"


def test_damaged_log_is_refused_with_advice_that_works(folder: Path) -> None:
    aof = aof_with(folder, "whole")
    with aof.open("ab") as file:
        file.write(b"not a command\r\n")
    with pytest.raises(ConfigError) as caught:
        EmbeddedServer.acquire(folder)
    advice, line, said = caught.value.message.split("\n", 2)
    assert f"its append-only file {aof.resolve()} is damaged: back up {folder.resolve()}" in advice
    assert "Bad file format" in said
    # Only what matters of the log: neither what every start says, nor advice about the host.
    assert len(said.splitlines()) <= 3
    assert "overcommit" not in said
    assert aof.read_bytes().endswith(b"not a command\r\n")
    assert line.startswith("  bash -c ")
    subprocess.run(shlex.split(line), input=b"y\n", check=True, capture_output=True)
    with EmbeddedServer.acquire(folder) as server:
        assert command(server.url, "GET", "whole") == "value"


def test_a_program_that_prints_nothing_is_not_a_server(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"printed nothing \(exit 0\)"):
        EmbeddedServer.acquire(folder, binary="true")


def test_starter_killed_before_the_server_answers(folder: Path, root: Path, start: Start) -> None:
    begun = root / "begun"
    os.mkfifo(begun)
    slow = root / "slow-server"
    slow.write_text(f"#!/bin/sh\necho $$ > '{begun}'\nread forever < '{begun}'\n")
    slow.chmod(0o700)
    starter = start(folder, FF_VALKEY_BINARY=str(slow))
    stuck = int(begun.read_text())
    starter.signal_group(signal.SIGKILL)
    wait_gone(stuck)
    wait_settled(folder)
    with EmbeddedServer.acquire(folder) as server:
        assert server.owner


def test_folder_replaced_under_a_user(folder: Path, root: Path) -> None:
    with EmbeddedServer.acquire(folder) as server:
        first = server_pid(server)
        moved = folder.rename(root / "moved")
        with EmbeddedServer.acquire(folder) as successor:
            assert successor.owner
            kill(first)
            wait_settled(moved)
            assert command(successor.url, "PING") == "+PONG"
            kill(server_pid(successor))
            with pytest.raises(ConfigError, match="deleted or replaced"):
                server.ensure_running()


def test_moved_server_spares_the_files_of_its_successor(folder: Path, root: Path) -> None:
    server = EmbeddedServer.acquire(folder)
    moved = folder.rename(root / "moved")
    with EmbeddedServer.acquire(folder) as successor:
        server.release()
        wait_settled(moved)
        assert successor.ensure_running() is False
        assert successor.pid is not None
