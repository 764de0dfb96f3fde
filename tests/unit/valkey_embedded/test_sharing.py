"""One server per folder: started by its first user, shared by all, stopped after the last."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.embedded import EmbeddedServer
from tests.unit.valkey_embedded.support import (
    User,
    command,
    is_alive,
    is_in_use,
    is_locked,
    wait_gone,
    wait_settled,
)

Start = Callable[..., User]


def test_first_starts_and_second_joins(folder: Path, start: Start) -> None:
    with EmbeddedServer.acquire(folder) as server:
        assert server.owner
        assert command(server.url, "PING") == "+PONG"
        joined = start(folder).hear()
        assert joined == {"pid": server.pid, "owner": False, "url": server.url}


def test_two_holds_in_one_process(folder: Path) -> None:
    first = EmbeddedServer.acquire(folder)
    second = EmbeddedServer.acquire(folder)
    assert (first.owner, second.owner) == (True, False)
    pid = second.pid
    assert pid is not None
    first.release()
    assert is_in_use(folder)
    assert not is_locked(folder / "start.lock")
    assert second.ensure_running() is False
    assert second.pid == pid
    second.release()
    wait_gone(pid)


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_server_ends_with_the_last_user(folder: Path, start: Start, order: tuple[str, str]) -> None:
    users = {"first": start(folder)}
    known = users["first"].hear()
    users["second"] = start(folder)
    assert users["second"].hear()["pid"] == known["pid"]
    users[order[0]].leave()
    assert command(known["url"], "PING") == "+PONG"
    assert users[order[1]].ask("ensure") == {
        "restarted": False,
        "pid": known["pid"],
        "url": known["url"],
    }
    users[order[1]].leave()
    wait_gone(known["pid"])


def test_nothing_but_data_stays_behind(folder: Path) -> None:
    EmbeddedServer.acquire(folder).release()
    wait_settled(folder)
    left = {entry.name for entry in folder.iterdir()}
    assert "appendonlydir" in left
    assert "valkey.sock" not in left


def test_simultaneous_starts_give_one_server(folder: Path, root: Path, start: Start) -> None:
    gate = root / "gate"
    os.mkfifo(gate)
    users = [start(folder, TEST_GATE=str(gate)) for _ in range(4)]
    with gate.open("wb"):
        seen = [user.hear() for user in users]
    assert len({facts["pid"] for facts in seen}) == 1
    assert sorted(facts["owner"] for facts in seen) == [False, False, False, True]


def test_newcomer_during_shutdown_gets_a_fresh_server(folder: Path, start: Start) -> None:
    server = EmbeddedServer.acquire(folder)
    old = server.pid
    assert old is not None
    command(server.url, "SET", "kept", "yes")
    os.kill(old, signal.SIGSTOP)
    try:
        server.release()
        newcomer = start(folder)
    finally:
        os.kill(old, signal.SIGCONT)
    fresh = newcomer.hear()
    assert fresh["owner"]
    assert fresh["pid"] != old
    assert not is_alive(old)
    assert command(fresh["url"], "GET", "kept") == "yes"


def test_interrupt_of_the_owner_spares_the_server(folder: Path, start: Start) -> None:
    owner = start(folder)
    known = owner.hear()
    with EmbeddedServer.acquire(folder) as server:
        owner.signal_group(signal.SIGINT)
        assert server.ensure_running() is False
        assert server.pid == known["pid"]


def test_forked_child_keeps_the_server(folder: Path, start: Start) -> None:
    parent = start(folder)
    known = parent.hear()
    child = parent.ask("fork")["child"]
    # Parent and child read the same input; the parent alone is ended.
    parent.process.kill()
    parent.process.wait()
    assert is_alive(child)
    assert is_in_use(folder)
    assert command(known["url"], "PING") == "+PONG"
    assert parent.process.stdin is not None
    parent.process.stdin.close()
    wait_gone(child)
    wait_gone(known["pid"])


def test_release_in_a_forked_child_is_its_own(folder: Path, start: Start) -> None:
    parent = start(folder)
    known = parent.hear()
    wait_gone(parent.ask("fork-release")["child"])
    assert is_in_use(folder)
    assert parent.ask("ensure")["restarted"] is False
    assert parent.ask("release") == {"released": True}
    wait_gone(known["pid"])


def test_released_hold_cannot_restart(folder: Path) -> None:
    server = EmbeddedServer.acquire(folder)
    server.release()
    server.release()
    with pytest.raises(ConfigError, match="acquire a new one"):
        server.ensure_running()
