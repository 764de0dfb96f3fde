"""Another user of the machine, or files they planted, cannot make us act for them."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from flowfabric.core.errors import ConfigError, TransportError
from flowfabric.valkey.address import Address
from flowfabric.valkey.connection import dial
from flowfabric.valkey.embedded import EmbeddedServer
from flowfabric.valkey.embedded_folder import folder_secret
from tests.unit.valkey_embedded.support import User, command, is_locked, wait_settled

Start = Callable[..., User]
NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can create files that belong to another user"
)

# Listens on a socket as another user and answers as a server would.
IMPOSTOR = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.setuid(int(sys.argv[2]))
listener.listen()
print(flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(b"+PONG\\r\\n")
"""


@contextlib.contextmanager
def child(program: str, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
    """A Python process that has printed its first line."""
    words = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def foreign(root: Path) -> Path:
    """A folder of another user: for root a new one, for others one of root's."""
    if os.geteuid():
        return Path("/usr")
    folder = root / "foreign"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    return folder


def test_a_foreign_folder_is_refused(foreign: Path) -> None:
    before = sorted(foreign.iterdir())
    message = (
        rf"{foreign} belongs to another user \(uid {foreign.stat().st_uid}; this process runs as "
        rf"uid {os.geteuid()}\); run as that user, or set FF_DATA_DIR to a folder of your own"
    )
    with pytest.raises(ConfigError, match=message):
        EmbeddedServer.acquire(foreign)
    with pytest.raises(ConfigError, match=message):
        folder_secret(foreign)
    assert sorted(foreign.iterdir()) == before


@needs_root
def test_a_foreign_link_is_refused(root: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    link = root / "link"
    link.symlink_to(folder)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match="link belongs to another user"):
        EmbeddedServer.acquire(link)
    assert list(folder.iterdir()) == []


@needs_root
@pytest.mark.parametrize("below", ["", "appendonlydir"])
def test_foreign_files_in_an_own_folder_are_refused(folder: Path, below: str) -> None:
    (folder / below).mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    planted = folder / below / "valkey.log"
    planted.touch()
    os.chown(planted, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=r"valkey\.log belongs to another user"):
        EmbeddedServer.acquire(folder)


@pytest.mark.parametrize(
    "name",
    ["valkey.log", "guard.lock", "server.lock", "start.lock", "valkey.conf", "waitpoint_secret"],
)
@pytest.mark.parametrize("exists", [True, False])
def test_links_are_not_followed(root: Path, folder: Path, name: str, *, exists: bool) -> None:
    victim = root / "victim"
    if exists:
        victim.write_text("precious")
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(victim)
    for use in (EmbeddedServer.acquire, folder_secret):
        with contextlib.suppress(ConfigError):
            used = use(folder)
            if isinstance(used, EmbeddedServer):
                used.release()
    assert victim.exists() == exists
    assert not exists or victim.read_text() == "precious"


def test_a_link_is_named_in_the_error(root: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "valkey.log").symlink_to(root / "victim")
    with pytest.raises(ConfigError, match=r"a file in .* is a symbolic link.*; remove the link"):
        EmbeddedServer.acquire(folder)


def test_the_configuration_is_not_a_file(folder: Path) -> None:
    with EmbeddedServer.acquire(folder) as server:
        assert "\r\nconfig_file:\r\n" in command(server.url, "INFO", "server")


def test_a_forged_pid_file_is_not_believed(folder: Path) -> None:
    """The process that holds the server's lock is ended, whatever a file says."""
    EmbeddedServer.acquire(folder).release()
    wait_settled(folder)
    hold = (
        "import fcntl, sys, signal; lock = open(sys.argv[1], 'r+')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX); fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print(flush=True); signal.pause()"
    )
    wait = "import signal; print(flush=True); signal.pause()"
    with child(hold, str(folder / "server.lock")) as holder, child(wait) as bystander:
        (folder / "valkey.pid").write_text(f"{bystander.pid}\n")
        with EmbeddedServer.acquire(folder) as server:
            assert server.pid not in (holder.pid, bystander.pid)
        assert holder.poll() is not None
        assert bystander.poll() is None


def test_all_is_private_whatever_the_umask(root: Path) -> None:
    folder = root / "new" / "data"
    before = os.umask(0)
    try:
        with EmbeddedServer.acquire(folder):
            folder_secret(folder)
            modes = {path: path.lstat().st_mode for path in (folder, *folder.rglob("*"))}
    finally:
        os.umask(before)
    assert (folder / "valkey.sock") in modes
    assert [path.name for path, mode in modes.items() if mode & 0o077] == []
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o755


async def test_a_connection_refuses_a_server_of_another_user(folder: Path) -> None:
    with EmbeddedServer.acquire(folder) as server:
        assert server.address.socket_owner == os.geteuid()
        await (await dial(server.address)).aclose()
        stranger = Address(socket_path=server.address.socket_path, socket_owner=os.geteuid() + 1)
        with pytest.raises(TransportError, match=f"runs as uid {os.geteuid()}") as caught:
            await dial(stranger)
        assert caught.value.kind == "auth"


@needs_root
def test_an_impostor_is_not_joined(folder: Path, start: Start) -> None:
    """A server of another user answers behind our socket's name."""
    owner = start(folder)
    owner.hear()
    (folder / "valkey.sock").unlink()
    with child(IMPOSTOR, str(folder / "valkey.sock"), str(NOBODY)):
        assert is_locked(folder / "guard.lock")
        with pytest.raises(ConfigError, match=f"runs as uid {NOBODY}; it should be uid 0"):
            EmbeddedServer.acquire(folder)
