from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from flowfabric.valkey.embedded_guard import signal_server
from tests.unit.valkey_embedded.support import User, wait_settled


def files(root: Path, name: str) -> list[Path]:
    """The files with this name; a link may lead nowhere."""
    return [path for path in root.rglob(name) if path.exists()]


@pytest.fixture
def root() -> Generator[Path]:
    """A folder with a short path; whatever server was started below it must end with the test."""
    path = Path(tempfile.mkdtemp(prefix="ffe-"))
    yield path
    try:
        for lock in files(path, "guard.lock"):
            wait_settled(lock.parent)
    finally:
        for lock in files(path, "server.lock"):
            with lock.open("r+b") as file:
                signal_server(file.fileno(), signal.SIGKILL)
        shutil.rmtree(path)


@pytest.fixture
def folder(root: Path) -> Path:
    """A data folder that does not exist yet."""
    return root / "data"


@pytest.fixture
def start(root: Path) -> Generator[Callable[..., User]]:
    """Starts user processes; those still running are killed at the end."""
    users: list[User] = []

    def launch(folder: Path, *, uid: int = -1, **environment: str) -> User:
        users.append(User(folder, uid=uid, **environment))
        return users[-1]

    yield launch
    for user in users:
        user.end()
