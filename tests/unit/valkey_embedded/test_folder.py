"""The private folder: settings, permissions, socket placement, and what is refused."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.embedded import EmbeddedServer, locate_binary
from tests.unit.valkey_embedded.support import (
    User,
    command,
    config,
    script,
    store,
    wait_gone,
    wait_settled,
)

Start = Callable[..., User]
NOBODY = 65534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_settings_are_in_force(folder: Path) -> None:
    expected = {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "save": "",
        "port": "0",
        "dir": str(folder),
        "hash-max-listpack-value": "512",
        "hash-max-listpack-entries": "512",
        "aof-use-rdb-preamble": "yes",
        "aof-load-truncated": "yes",
    }
    with EmbeddedServer.acquire(folder) as server:
        assert {name: config(server.url, name) for name in expected} == expected


@pytest.mark.parametrize("chosen", [None, "glibc.malloc.tcache_count=7"])
def test_the_allocator_is_tuned_unless_the_user_did(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    if chosen is None:
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    else:
        monkeypatch.setenv("GLIBC_TUNABLES", chosen)
    # A server may write its title over the environment that /proc shows.
    given = root / "given"
    noting = script(
        root / "noting", f'echo "$GLIBC_TUNABLES" > {given}; exec {locate_binary()} "$@"'
    )
    with EmbeddedServer.acquire(folder, binary=str(noting)):
        assert given.read_text().strip() == (chosen or "glibc.malloc.tcache_count=1000")


def test_everything_is_private(folder: Path) -> None:
    with EmbeddedServer.acquire(folder):
        assert mode(folder) == 0o700
        files = [path for path in folder.rglob("*") if path.name != ".gitignore"]
        open_to_others = [path.name for path in files if mode(path) & 0o077]
        assert open_to_others == []
        assert (folder / ".gitignore").read_text() == "*\n"


def test_always_flushes_each_write(folder: Path) -> None:
    with EmbeddedServer.acquire(folder, aof="always") as server:
        assert config(server.url, "appendfsync") == "always"


def test_without_a_log_nothing_is_kept(folder: Path) -> None:
    with EmbeddedServer.acquire(folder, aof="no") as server:
        command(server.url, "SET", "k", "v")
    wait_settled(folder)
    with EmbeddedServer.acquire(folder, aof="no") as server:
        assert command(server.url, "GET", "k") == "$-1"


def test_data_is_not_ignored_by_a_server_without_a_log(folder: Path) -> None:
    EmbeddedServer.acquire(folder).release()
    wait_settled(folder)
    with pytest.raises(ConfigError, match="holds data"):
        EmbeddedServer.acquire(folder, aof="no")


def test_folder_comes_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_DATA_DIR", str(folder))
    with EmbeddedServer.acquire() as server:
        assert server.data_dir == folder


def test_folder_defaults_to_the_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FF_DATA_DIR", raising=False)
    monkeypatch.chdir(root)
    with EmbeddedServer.acquire() as server:
        assert server.data_dir == root / ".flowfabric"


def test_unusual_names(root: Path, start: Start) -> None:
    folder = root / "a \"b\" 'c' 50% ü?#"
    with EmbeddedServer.acquire(folder) as server:
        assert command(server.url, "PING") == "+PONG"
        assert start(folder).hear()["pid"] == server.pid


@pytest.mark.skipif(sys.platform != "linux", reason="macOS cannot name a socket that far down")
def test_long_path(root: Path, start: Start) -> None:
    folder = root / ("long" * 30)
    user = start(folder)
    known = user.hear()
    with EmbeddedServer.acquire(folder) as server:
        assert server.pid == known["pid"]
        store(server.url, "k", "v")
        os.kill(known["pid"], signal.SIGKILL)
        wait_gone(known["pid"])
        assert server.ensure_running() is True
        assert user.ask("ensure") == {"restarted": False, "pid": server.pid, "url": known["url"]}
        assert command(server.url, "GET", "k") == "v"


def test_long_log_is_rotated(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "valkey.log").write_bytes(b"x" * (1 << 20) + b"old")
    EmbeddedServer.acquire(folder).release()
    wait_settled(folder)
    assert (folder / "valkey.log.1").read_bytes().endswith(b"old")
    assert b"Ready to accept" in (folder / "valkey.log").read_bytes()


@pytest.mark.parametrize("below", ["", "data"])
def test_file_in_the_way(folder: Path, below: str) -> None:
    folder.write_text("mine")
    with pytest.raises(ConfigError, match="is not a folder; move that file away"):
        EmbeddedServer.acquire(folder / below)
    assert folder.read_text() == "mine"


def test_folder_open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match=r"chmod 700"):
        EmbeddedServer.acquire(folder)
    assert mode(folder) == 0o770


def unprivileged(start: Start, folder: Path) -> str:
    """What a user without special rights is told."""
    return start(folder, uid=NOBODY if os.geteuid() == 0 else -1).hear()["error"]


def test_folder_not_writable(root: Path, start: Start) -> None:
    locked = root / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    root.chmod(0o755)
    assert "give this user write access" in unprivileged(start, locked / "data")
