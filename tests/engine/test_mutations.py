"""Each guard of the Lua library, removed on purpose, must turn a named test red.

A mutant is one textual change of one file. It is loaded on a private server, and the scenario that
probes the guard, a test of this folder, must fail there. A replacement that no longer applies fails
too: then the guard has moved and the mutant must follow it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from importlib.resources import files

import pytest

from flowfabric.core.errors import EngineError
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.backend import Backend
from flowfabric.engine.calls import Limits
from flowfabric.valkey import library
from flowfabric.valkey.address import parse_url
from tests.engine.mutants import (
    MUTANTS,
    Scenario,
    promotes_nothing_early,
    promotes_only_what_is_delayed,
    trims_nothing_early,
)
from tests.support.engine import Engine
from tests.support.server import TestServer

OWN_SCENARIOS: list[Scenario] = [
    trims_nothing_early,
    promotes_nothing_early,
    promotes_only_what_is_delayed,
]


@pytest.mark.parametrize("scenario", OWN_SCENARIOS)
async def test_the_scenarios_of_this_file_hold(engine: Engine, scenario: Scenario) -> None:
    await scenario(engine)


@pytest.fixture(scope="module")
def private_server() -> Iterator[TestServer]:
    """A server whose library may be replaced."""
    server = TestServer()
    yield server
    server.stop()


@pytest.fixture
async def private_engine(private_server: TestServer) -> AsyncIterator[Engine]:
    backend = await Backend.connect(
        parse_url(private_server.url),
        prepare_with=PartitionCounts(),
        limits=Limits(),
        testing=True,
    )
    await backend.transport.call("FLUSHALL")
    await backend.prepare()
    yield Engine(backend)
    await backend.aclose()


def mutated(path: str, guard: str, replacement: str) -> str:
    """The whole library with one change in one file."""
    original = (files("flowfabric") / "lua" / path).read_text(encoding="utf-8")
    assert original.count(guard) == 1, (
        f"{path}: the guard stands there {original.count(guard)} times"
    )
    whole = library._assemble(library._Settings(cluster=False, events_maxlen=10_000, testing=True))
    assert whole.count(original) == 1
    return whole.replace(original, original.replace(guard, replacement))


@pytest.mark.parametrize(
    ("path", "guard", "replacement", "scenario"),
    [row[1:] for row in MUTANTS],
    ids=[row[0] for row in MUTANTS],
)
async def test_a_removed_guard_is_noticed(
    private_engine: Engine, path: str, guard: str, replacement: str, scenario: Scenario
) -> None:
    code = mutated(path, guard, replacement)
    await private_engine.backend.transport.call("FUNCTION", "LOAD", "REPLACE", code)
    with pytest.raises((AssertionError, EngineError, pytest.fail.Exception)) as caught:
        await scenario(private_engine)
    # A mutant that merely crashes shows nothing about the guard.
    assert "user_function" not in str(caught.value), caught.value
