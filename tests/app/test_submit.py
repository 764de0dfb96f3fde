"""Submitting: what is refused before anything is sent, and the error after a partial batch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.app.calls import SubmitManyError, created
from flowfabric.app.run import UnexpectedResult
from flowfabric.core.contracts.executions import NewExecution
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
        ({"nam": "Ada"}, "invalid_input", r"calls\[1\]: arguments: greet\(\) is missing"),
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
    first, last = ids
    draining = StateError("lane_not_accepting", "draining")
    new = NewExecution(execution_id=ids[0], execution_kind="greet")
    words = r"2 calls were stored; 1 were refused.*calls\[1\]"
    with pytest.raises(SubmitManyError, match=words) as caught:
        created(dict.fromkeys(range(3), new), [first, draining, last])
    assert caught.value.runs == {0: ids[0], 2: ids[1]}
    assert caught.value.errors == {1: draining}
    assert caught.value.unsure == {}
    assert not caught.value.retryable


async def test_a_batch_that_was_refused_as_a_whole_raises_the_refusal(
    app: ff.Fabric, engine: Engine
) -> None:
    await app.named("greet", lane="closed").submit("Ada")
    await engine.backend.lanes.set_lane_state("closed", "draining")
    with pytest.raises(EngineError, match="lane_not_accepting"):
        await app.named("greet", lane="closed").submit_many([["Ada"], ["Grace"]])


async def test_what_a_failed_server_left_open_can_be_looked_up(
    app: ff.Fabric, engine: Engine
) -> None:
    """It runs out of memory between two parts of the batch."""
    info: Any = await engine.backend.transport.call("INFO", "memory")
    used = int(info.partition(b"used_memory:")[2].split()[0])
    await engine.backend.transport.call("CONFIG", "SET", "maxmemory", used + 500_000)
    try:
        with pytest.raises(SubmitManyError, match=f"{COUNT} may or may not") as caught:
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


WRONG: list[tuple[str, Any]] = [
    ("lane", 5),
    ("lane", ""),
    ("priority", "high"),
    ("priority", True),
    ("priority", 1.5),
    ("tags", 5),
    ("tags", "a.b"),
    ("tags", ["a.b"]),
    ("tags", {"a.b": 1}),
    ("idempotency_key", 0),
    ("idempotency_key", 17),
    ("delay", "soon"),
    ("delay", [1]),
    ("delay", -1),
]


@pytest.mark.parametrize(("option", "value"), WRONG)
async def test_options_of_a_wrong_type_are_refused_by_name(option: str, value: Any) -> None:
    """Before a connection is made: there is no server."""
    async with ff.Fabric("valkey://127.0.0.1:1") as nowhere:
        with pytest.raises(ValidationError, match=f"invalid_input: {option}: "):
            nowhere.named("greet", **{option: value})


@pytest.mark.parametrize(("argument", "value"), [("url", 5), ("namespace", 5)])
def test_arguments_of_an_application_have_types(argument: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"invalid_input: {argument}: must be text, got int"):
        ff.Fabric(**{argument: value})


async def test_an_option_that_does_not_exist_is_refused() -> None:
    nowhere = ff.Fabric("valkey://127.0.0.1:1")
    wrong: dict[str, Any] = {"prio": 5}
    unknown = r"There is no option 'prio' here\. The options are: lane, "
    with pytest.raises(TypeError, match=unknown + "prio"):
        nowhere.named("greet", **wrong)
    with pytest.raises(TypeError, match=unknown + "time"):
        nowhere.task(**wrong)


async def test_an_option_in_the_wrong_place_is_refused_with_the_right_one() -> None:
    nowhere = ff.Fabric("valkey://127.0.0.1:1")
    of_submissions: dict[str, Any] = {"priority": 5}
    of_tasks: dict[str, Any] = {"timeout": "1m"}
    with pytest.raises(TypeError, match=r"Set it for a submission: task\.options\(priority=…\)"):
        nowhere.task(**of_submissions)
    with pytest.raises(TypeError, match=r"where the task is defined: @app\.task\(timeout=…\)"):
        nowhere.named("greet", **of_tasks)


async def test_one_idempotency_key_does_not_stand_for_a_batch() -> None:
    nowhere = ff.Fabric("valkey://127.0.0.1:1")
    with pytest.raises(ValidationError, match="idempotency_key: A batch cannot share one key"):
        await nowhere.named("greet", idempotency_key="k").submit_many([["Ada"], ["Grace"]])


async def tags_of(app: ff.Fabric, run: ff.Run[Any]) -> dict[str, str]:
    context = await (await app.client()).read_context(run.id)
    assert context is not None
    return dict(context.tags)


async def test_options_of_a_batch_reach_every_execution(app: ff.Fabric) -> None:
    batch = app.named("greet", lane="slow", priority=7, delay="1h", tags={"a.b": "c"})
    for run in await batch.submit_many([["Ada"], {"name": "Grace"}]):
        info = await run.info()
        assert (info.lane_id, info.priority, info.public_state.value) == ("slow", 7, "delayed")
        assert await tags_of(app, run) == {"a.b": "c"}


async def test_options_add_up_and_leave_the_task_as_it_was(app: ff.Fabric) -> None:
    @app.task(lane="mail")
    async def greet(name: str) -> str:
        return name

    urgent = greet.options(priority=9)
    run = await urgent.options(tags={"a.b": "c"}).submit("Ada")
    info = await run.info()
    assert (info.lane_id, info.priority) == ("mail", 9)
    assert await tags_of(app, run) == {"a.b": "c"}
    assert ((await (await greet.submit("Ada")).info()).priority, greet.shared.priority) == (0, None)
    moved = await urgent.options(lane="other").options(lane=None).submit("Ada")
    assert (await moved.info()).lane_id == "mail"


async def test_what_is_no_task_and_what_is_no_batch_is_said() -> None:
    async with ff.Fabric("valkey://127.0.0.1:1") as nowhere:
        wrong: Any = len
        greet = nowhere.named("greet")
        with pytest.raises(ValidationError, match="task: must be a task or its name"):
            await nowhere.submit(wrong, "Ada")
        with pytest.raises(ValidationError, match="calls: must be a list of calls, got builtin"):
            await nowhere.submit_many(greet, wrong)


async def test_a_reason_to_cancel_is_text(app: ff.Fabric) -> None:
    run: ff.Run[Any] = await app.submit("greet", "Ada")
    wrong: Any = 5
    with pytest.raises(ValidationError, match="reason: must be text, got int"):
        await run.cancel(wrong)
    await run.cancel("a typo")
    assert await run.state() is PublicState.CANCELLED


async def test_a_result_that_does_not_fit_the_annotation(app: ff.Fabric) -> None:
    """As when another version of the program wrote it."""

    @app.task()
    async def measure() -> dict[str, int]:
        wrong: Any = {"level": "high", "note": "x" * 300}
        return wrong

    async with app.worker():
        run = await app.submit(measure)
        with pytest.raises(ff.FlowFabricError) as caught:
            await run.result(timeout=20)
    error = caught.value
    assert isinstance(error, UnexpectedResult)
    assert (error.kind, error.execution_id, error.expected) == ("measure", run.id, dict[str, int])
    assert error.stored.startswith(b'{"level":"high"')
    words = str(error)
    assert words.startswith(f'measure {run.id.compact}: the stored result {{"level":"high"')
    assert "does not fit dict[str, int]: Expected `int`, got `str`" in words
    assert len(words) < 600


def test_a_task_of_the_application_keeps_its_options_by_name() -> None:
    """Its limits must not depend on how it is submitted."""
    nowhere = ff.Fabric("valkey://127.0.0.1:1")

    @nowhere.task(quota="maps", budgets=["team"], retry=3, lane="slow", capabilities={"gpu"})
    def geocode(place: str) -> str:
        return place

    at = ExecutionId.parse("{fp:0}:00000000-0000-4000-8000-000000000001")
    by_name = nowhere.named("geocode", priority=7).new_execution(at, b"[]")
    assert by_name == geocode.options(priority=7).new_execution(at, b"[]")
    with pytest.raises(ValidationError, match="is missing the argument 'place'"):
        nowhere.named("geocode").encode((), {})
