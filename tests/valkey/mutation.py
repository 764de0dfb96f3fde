"""Loads a library with one guard removed, on a separate server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from importlib.resources import files

import pytest

from flowfabric.engine.valkey import library
from tests.support.engine import Engine, prepared_backend
from tests.support.server import TestServer
from tests.valkey.mutants import Scenario

__all__ = ["crashed", "failure_of", "mutated", "private_engine", "private_server"]


@pytest.fixture(scope="module")
def private_server() -> Iterator[TestServer]:
    """A server whose library may be replaced."""
    server = TestServer()
    yield server
    server.stop()


@pytest.fixture
async def private_engine(private_server: TestServer) -> AsyncIterator[Engine]:
    async with prepared_backend(private_server.url) as backend:
        yield Engine(backend)


def mutated(path: str, guard: str, replacement: str) -> str:
    """The whole library with one change in one file."""
    original = (files("flowfabric") / "lua" / path).read_text(encoding="utf-8")
    assert original.count(guard) == 1, (
        f"{path}: the guard stands there {original.count(guard)} times"
    )
    whole = library._assemble(cluster=False, events_maxlen=10_000)
    assert whole.count(original) == 1
    return whole.replace(original, original.replace(guard, replacement))


def crashed(failure: str) -> bool:
    """Whether a function stopped with an error of its own instead of answering."""
    return "user_function" in failure or ": stored keys: " in failure


async def failure_of(
    engine: Engine, path: str, guard: str, replacement: str, scenario: Scenario
) -> str:
    """How the scenario fails without the guard; that it does not fail is the failure here."""
    code = mutated(path, guard, replacement)
    await engine.backend.transport.call("FUNCTION", "LOAD", "REPLACE", code)
    with pytest.raises((Exception, pytest.fail.Exception)) as caught:
        await scenario(engine)
    return str(caught.value)
