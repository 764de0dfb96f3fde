"""Submitting: what is refused before anything is sent, and what is told when a part was stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.app.submission import SubmitManyError, created
from flowfabric.core.contracts.executions import Created
from flowfabric.core.errors import EngineError, StateError, ValidationError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.state import PublicState
from tests.support.engine import Engine
from tests.support.server import TestServer

COUNT = 2000
"""More than one engine call takes."""


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


async def stored(app: ff.Fabric) -> set[ExecutionId]:
    """The ids of all executions."""
    client = await app.client()
    ids: set[ExecutionId] = set()
    cursor: str | None = ""
    while cursor is not None:
        page = await client.list(cursor=cursor, limit=1000)
        ids |= {each.execution_id for each in page.executions}
        cursor = page.next_cursor
    return ids


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (["x" * 1_100_000], "payload_too_large", r"calls\[1\] has 11000\d\d bytes"),
        ([float("nan")], "invalid_input", r"calls\[1\]: arguments\[0\]: is nan"),
        ([object()], "invalid_input", r"calls\[1\]: arguments: cannot be written as JSON"),
        ({"nam": "Ada"}, "invalid_input", r"calls\[1\]: arguments: greet: "),
        (1, "invalid_input", r"calls\[1\]: must be a list of arguments .*: write \[1\]"),
        ("Ada", "invalid_input", r"calls\[1\]: must be a list of arguments .*: write \['Ada'\]"),
        (None, "invalid_input", r"calls\[1\]: must be a list"),
    ],
)
async def test_one_bad_call_refuses_the_batch(
    app: ff.Fabric, bad: Any, code: str, words: str
) -> None:
    @app.task()
    async def greet(name: str) -> str:
        return name

    with pytest.raises(ValidationError, match=words) as caught:
        await app.submit_many(greet, [["Ada"], bad, ["Grace"]])
    assert caught.value.code == code
    assert await stored(app) == set()


def test_a_batch_that_was_stored_in_part_tells_which() -> None:
    ids = ExecutionId.mint_solo_many("default", PartitionCounts(), 2)
    first, last = (Created(each, PublicState.WAITING) for each in ids)
    draining = StateError("lane_not_accepting", "draining")
    words = r"2 calls were stored; 1 were refused.*calls\[1\]"
    with pytest.raises(SubmitManyError, match=words) as caught:
        created([first, draining, last], lambda outcome: outcome.execution_id)
    assert caught.value.runs == {0: ids[0], 2: ids[1]}
    assert caught.value.errors == {1: draining}
    assert caught.value.unsure == {}
    assert not caught.value.retryable


async def test_a_batch_that_was_refused_as_a_whole_raises_the_refusal(
    app: ff.Fabric, engine: Engine
) -> None:
    await app.submit("greet", "Ada", lane="closed")
    await engine.backend.set_lane_state("closed", "draining")
    with pytest.raises(EngineError, match="lane_not_accepting"):
        await app.submit_many("greet", [["Ada"], ["Grace"]], lane="closed")


async def test_what_a_failed_server_left_open_can_be_looked_up(
    app: ff.Fabric, engine: Engine
) -> None:
    """It runs out of memory between two parts of the batch."""
    info: Any = await engine.backend.transport.call("INFO", "memory")
    used = int(info.partition(b"used_memory:")[2].split()[0])
    await engine.backend.transport.call("CONFIG", "SET", "maxmemory", used + 500_000)
    try:
        with pytest.raises(SubmitManyError, match=f"of {COUNT} it is not known") as caught:
            await app.submit_many("greet", [["x" * 1000]] * COUNT)
    finally:
        await engine.backend.transport.call("CONFIG", "SET", "maxmemory", 0)
    assert isinstance(caught.value.__cause__, ff.TransportError)
    handles = {run.id for run in caught.value.unsure.values()}
    there = await stored(app)
    assert 0 < len(there) < COUNT
    assert there < handles


def test_the_blocking_face_gives_its_own_handles() -> None:
    error = SubmitManyError({0: 1}, {1: StateError("lane_not_accepting")}, {2: 3})
    wrapped = error.with_runs(str)
    assert (wrapped.runs, wrapped.unsure) == ({0: "1"}, {2: "3"})
    assert wrapped.errors == error.errors
