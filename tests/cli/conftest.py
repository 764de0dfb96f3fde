"""The command against the test process's own Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric.sdk.client import Client
from tests.support.command import Cli
from tests.support.engine import Engine
from tests.support.server import TestServer


@pytest.fixture
def cli(valkey: TestServer, tmp_path: Path, engine: Engine) -> Cli:
    """The command in an empty folder, with FF_URL naming a prepared and empty deployment."""
    return Cli(tmp_path, FF_URL=valkey.url)


@pytest.fixture
def client(engine: Engine) -> Client:
    return Client(engine.backend)


@pytest.fixture(scope="session")
def unprepared() -> Iterator[str]:
    """The address of a Valkey that nobody has set up for us."""
    server = TestServer()
    yield server.url
    server.stop()
