"""Idempotency keys belong to their task: a repeat finds its run, another call never does."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.errors import ConflictError, ValidationError
from flowfabric.core.partition import PartitionCounts, solo_partition
from tests.support.engine import Engine, untouched
from tests.support.server import TestServer


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


async def test_two_tasks_may_use_the_same_key(app: ff.Fabric) -> None:
    ship, bill = (app.named(name, idempotency_key="order-1") for name in ("ship", "bill"))
    shipped, billed = await ship.submit(1), await bill.submit(1)
    assert shipped.id != billed.id
    assert not billed.duplicate
    assert (await ship.submit(1)).id == shipped.id


async def test_another_call_with_the_same_key_is_refused(app: ff.Fabric, engine: Engine) -> None:
    ship = app.named("ship", idempotency_key="order-1")
    first = await ship.submit("cat.png", 300)
    async with untouched(engine):
        with pytest.raises(ff.IdempotencyConflict) as caught:
            await ship.submit("dog.png", 300)
    error = caught.value
    assert isinstance(error, ConflictError)
    assert (error.code, error.details) == ("idempotency_conflict", ("order-1", first.id))
    assert (error.kind, error.key, error.existing_id) == ("ship", "order-1", first.id)
    assert error.refused_id != first.id
    assert str(error) == (
        f"idempotency_conflict: the key 'order-1' of task ship belongs to execution "
        f"{first.id.compact}, which was submitted with other arguments or to another lane. "
        "The new call was not stored. "
        "This key was used for another request; use a new key."
    )
    # The key as the engine knows it appears nowhere, not even in a chained error.
    assert error.__suppress_context__
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert (await app.get_run(error.existing_id).info()).execution_kind == "ship"


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"sizes": {0, 8}}, {"sizes": {8, 0}}),
        ({"mixed": {0, 8, None}}, {"mixed": {8, 0, None}}),
        ({"nested": [{"x": 1, "y": {0, 8}}]}, {"nested": [{"y": {8, 0}, "x": 1}]}),
    ],
    ids=["names", "a set", "a set without an order", "inside"],
)
async def test_the_order_of_names_and_sets_does_not_matter(
    app: ff.Fabric, first: dict[str, Any], again: dict[str, Any]
) -> None:
    resize = app.named("resize", idempotency_key="k")
    run = await resize.submit(**first)
    repeat = await resize.submit(**again)
    assert (repeat.id, repeat.duplicate) == (run.id, True)
    with pytest.raises(ff.IdempotencyConflict):
        await resize.submit(**again, more=1)


async def test_it_does_not_matter_which_arguments_have_names(app: ff.Fabric) -> None:
    @app.task
    async def resize(ctx: ff.Context, name: str, width: int, height: int = 0) -> None: ...

    keyed = resize.options(idempotency_key="k")
    run = await keyed.submit("cat.png", width=300)
    assert (await keyed.submit(width=300, name="cat.png")).id == run.id
    assert (await keyed.submit("cat.png", 300)).id == run.id
    # A program that knows only the name of the task passes them by position.
    named = app.named("resize", idempotency_key="k")
    assert (await named.submit("cat.png", 300)).id == run.id
    with pytest.raises(ff.IdempotencyConflict):
        await keyed.submit("cat.png", 301)


async def test_a_repeat_may_have_another_priority_delay_and_tags(app: ff.Fabric) -> None:
    run = await app.named("ship", idempotency_key="k").submit(1)
    later = app.named("ship", idempotency_key="k", priority=7, delay="1h", tags={"a.b": "c"})
    assert (await later.submit(1)).id == run.id


async def test_a_run_of_another_lane_is_not_handed_back(app: ff.Fabric) -> None:
    counts = PartitionCounts()
    home = solo_partition("default", counts)
    neighbour = next(
        lane for n in range(10_000) if solo_partition(lane := f"lane-{n}", counts) == home
    )
    await app.named("ship", idempotency_key="k").submit(1)
    with pytest.raises(ff.IdempotencyConflict):
        await app.named("ship", idempotency_key="k", lane=neighbour).submit(1)


async def test_a_batch_has_a_key_per_call(app: ff.Fabric) -> None:
    @app.task
    async def ship(order: int) -> None: ...

    first, second, third = await ship.submit_many([[1], [2], [3]], ["one", "two", ""])
    lazy: Any = iter([iter([1]), [2], [3]])
    again = await app.submit_many("ship", lazy, ["one", "two", ""])
    assert [run.id for run in again[:2]] == [first.id, second.id]
    assert [run.duplicate for run in again] == [True, True, False]
    assert again[2].id != third.id
    single = await ship.options(idempotency_key="one").submit(1)
    assert single.id == first.id


async def test_a_conflict_in_a_batch_names_its_call(app: ff.Fabric) -> None:
    ship = app.named("ship")
    (run,) = await ship.submit_many([[1]], ["one"])
    with pytest.raises(ff.SubmitManyError, match=r"calls\[1\]: .* key 'one' of task ship"):
        await ship.submit_many([[5], [6]], ["five", "one"])
    with pytest.raises(ff.IdempotencyConflict) as caught:
        await ship.submit_many([[7]], ["one"])
    assert caught.value.existing_id == run.id


async def test_without_an_event_loop(app: ff.Fabric) -> None:
    def submit() -> None:
        with ff.SyncFabric(app) as sync:
            first = sync.submit(sync.named("ship", idempotency_key="k"), 1)
            (again,) = sync.submit_many("ship", [[1]], ["k"])
            assert again.id == first.id
            with pytest.raises(ff.IdempotencyConflict, match="key 'k' of task ship"):
                sync.submit(sync.named("ship", idempotency_key="k"), 2)

    await asyncio.to_thread(submit)


async def test_a_key_leaves_room_for_the_name_of_its_task(app: ff.Fabric) -> None:
    run = await app.named("ship", idempotency_key="k" * 1019).submit()
    assert not run.duplicate
    with pytest.raises(ValidationError, match="idempotency_key: must be at most 1019 bytes"):
        app.named("ship", idempotency_key="k" * 1020)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["a"], "has 1 key for 2 calls; pass one per call"),
        ("ab", "must be a list of keys, one per call, got str"),
        (["a", 5], "idempotency_key: must be text"),
    ],
)
async def test_keys_of_a_batch_that_do_not_fit(app: ff.Fabric, keys: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        await app.named("ship").submit_many([[1], [2]], keys)
