"""Listings: pages without gaps or repeats, filters, cursors."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from flowfabric.core.contracts.executions import ExecutionPage, NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.reads import Filter
from tests.support.engine import LANE, Engine, refused
from tests.support.executions import Case

# The same in every process: test ids are made from it.
OTHER = "11111111-2222-4333-8444-555555555555"


async def many(engine: Engine, count: int, **fields: Any) -> list[ExecutionId]:
    lane = fields.pop("lane", LANE)
    items = [
        NewExecution(execution_id=engine.new_id(lane), execution_kind="job", lane_id=lane, **fields)
        for _ in range(count)
    ]
    await engine.backend.executions.create_many(items)
    return [item.execution_id for item in items]


def ids(page: ExecutionPage) -> list[ExecutionId]:
    return [row.execution_id for row in page.executions]


async def walk(engine: Engine, limit: int, **options: Any) -> list[list[ExecutionId]]:
    pages: list[list[ExecutionId]] = []
    cursor = ""
    while True:
        page = await engine.backend.listings.list_executions(cursor=cursor, limit=limit, **options)
        pages.append(ids(page))
        if page.next_cursor is None:
            return pages
        cursor = page.next_cursor


async def test_three_pages(engine: Engine) -> None:
    created = await many(engine, 15)
    partition = created[0].partition
    page = await engine.backend.listings.list_executions(partition=partition, limit=5)
    assert page.next_cursor == page.executions[-1].execution_id
    pages = await walk(engine, 5, partition=partition)
    assert [len(page) for page in pages] == [5, 5, 5]
    assert [each for page in pages for each in page] == sorted(created)


@pytest.mark.parametrize("limit", [1, 2, 4, 7, 100, 5000])
async def test_across_partitions(engine: Engine, limit: int) -> None:
    created = [
        *await many(engine, 3),
        *await many(engine, 4, lane="elsewhere"),
        *await many(engine, 2, lane="third"),
    ]
    pages = await walk(engine, limit)
    listed = [each for page in pages for each in page]
    assert listed == sorted(created, key=lambda each: (each.partition, each))
    assert all(len(page) == limit for page in pages[:-1])
    assert 0 < len(pages[-1]) <= limit


async def test_pages_larger_than_a_read(engine: Engine) -> None:
    created = await many(engine, 450)
    pages = await walk(engine, 400)
    assert [len(page) for page in pages] == [400, 50]
    assert sorted(each for page in pages for each in page) == sorted(created)


async def test_limits(engine: Engine) -> None:
    await many(engine, 3)
    for limit in (0, -1):
        page = await engine.backend.listings.list_executions(limit=limit)
        assert page == ExecutionPage(())
    assert len((await engine.backend.listings.list_executions(limit=10**9)).executions) == 3


async def test_an_empty_deployment(engine: Engine) -> None:
    assert await engine.backend.listings.list_executions() == ExecutionPage(())
    assert await engine.backend.listings.list_executions(partition=3) == ExecutionPage(())


async def test_the_row(engine: Engine) -> None:
    execution_id = await engine.create(
        lane="x", namespace="tenant", execution_kind="mail", priority=4
    )
    (row,) = (await engine.backend.listings.list_executions()).executions
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (row.execution_id, row.namespace, row.lane_id) == (execution_id, "tenant", "x")
    assert (row.execution_kind, row.public_state.value, row.priority) == ("mail", "waiting", 4)
    assert row.created_at == info.created_at


async def test_the_age_counts_from_the_end_or_from_creation(engine: Engine) -> None:
    old = await engine.create()
    ended_late = await engine.create()
    await engine.advance(60_000)
    await engine.backend.executions.cancel_execution(ended_late)
    await engine.create()
    edge = await engine.now() - 30_000

    async def listed(where: Filter) -> set[ExecutionId]:
        return {each for page in await walk(engine, 10, where=where) for each in page}

    assert await listed(Filter(before=edge)) == {old}
    assert len(await listed(Filter(before=edge + 60_000))) == 3


async def test_the_sizes_of_lanes(engine: Engine) -> None:
    await many(engine, 3)
    await engine.claim()
    await engine.create(policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    ended = await engine.create(lane="mails")
    await engine.backend.executions.cancel_execution(ended)
    await engine.create(lane="mails", delay_until=await engine.now() + 5000)
    found = await engine.backend.listings.count_lanes([LANE, "mails", "unused"])
    assert {
        lane: {state: n for state, n in counts.items() if n} for lane, counts in found.items()
    } == {
        LANE: {"eligible": 2, "active": 1, "blocked_route": 1},
        "mails": {"terminal": 1, "delayed": 1},
        "unused": {},
    }


async def test_filters(engine: Engine) -> None:
    plain = await engine.create()
    tenant = await engine.create(namespace="tenant", tags={"app.a": "1", "app.b": "2"})
    other = await engine.create(lane="elsewhere", execution_kind="mail", tags={"app.a": "1"})
    ended = await engine.create()
    await engine.backend.executions.cancel_execution(ended)
    for where, expected in (
        (Filter(), {plain, tenant, other, ended}),
        (Filter(namespace="tenant"), {tenant}),
        (Filter(lane="elsewhere"), {other}),
        (Filter(kind="mail"), {other}),
        (Filter(state="cancelled"), {ended}),
        (Filter(state="waiting", lane=LANE), {plain, tenant}),
        (Filter(tags={"app.a": "1"}), {tenant, other}),
        (Filter(tags={"app.a": "1", "app.b": "2"}), {tenant}),
        (Filter(tags={"app.a": "2"}), set[ExecutionId]()),
        (Filter(namespace="tenant", kind="mail"), set[ExecutionId]()),
        (Filter(finished=True), {ended}),
        (Filter(finished=False), {plain, tenant, other}),
    ):
        pages = await walk(engine, 1, where=where)
        assert {each for page in pages for each in page} == expected
        inside = await walk(engine, 10, where=where, partition=plain.partition)
        here = {each for each in expected if each.partition == plain.partition}
        assert {each for page in inside for each in page} == here


async def test_changes_during_a_walk(engine: Engine) -> None:
    created = sorted(await many(engine, 9))
    partition = created[0].partition
    first = await engine.backend.listings.list_executions(partition=partition, limit=3)
    # The one the cursor names goes, and new ones come.
    await engine.backend.executions.cancel_execution(created[2])
    await engine.advance(86_400_000)
    await engine.backend.upkeep.trim_retention(created[2].tag, LANE, [created[2]])
    await many(engine, 5)
    rest = await engine.backend.listings.list_executions(
        partition=partition, cursor=first.next_cursor or "", limit=100
    )
    listed = ids(first) + ids(rest)
    assert len(listed) == len(set(listed))
    assert set(created) <= set(listed)


def sealed(content: str) -> str:
    return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "cursor",
    [
        "nonsense",
        "ü",
        sealed("x|"),
        sealed("1|not an id"),
        sealed(f"1|{{fp:2}}:{OTHER}"),
        f"{{fp:1}}:{OTHER}",
    ],
)
async def test_bad_cursors(engine: Engine, cursor: str) -> None:
    await refused(engine.backend.listings.list_executions(cursor=cursor), "invalid_cursor")


@pytest.mark.parametrize("cursor", ["nonsense", f"{{fp:2}}:{OTHER}", sealed("1|")])
async def test_bad_cursors_of_a_partition(engine: Engine, cursor: str) -> None:
    call = engine.backend.listings.list_executions(partition=1, cursor=cursor)
    await refused(call, "invalid_cursor")


@pytest.mark.parametrize("partition", [-1, 256])
async def test_bad_partitions(engine: Engine, partition: int) -> None:
    await refused(engine.backend.listings.list_executions(partition=partition), "invalid_input")
    call = engine.backend.listings.list_lane(LANE, "active", partition=partition)
    await refused(call, "invalid_input")


# --- lane indexes -------------------------------------------------------------------------------


async def walk_lane(engine: Engine, state: str, limit: int) -> list[ExecutionId]:
    partition = engine.new_id().partition
    listed: list[ExecutionId] = []
    cursor = ""
    while True:
        page = await engine.backend.listings.list_lane(
            LANE, state, partition=partition, cursor=cursor, limit=limit
        )
        listed += ids(page)
        if page.next_cursor is None:
            return listed
        assert len(page.executions) == limit
        cursor = page.next_cursor


async def test_eligible_in_claim_order_whatever_they_require(engine: Engine) -> None:
    gpu: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    order: list[tuple[int, ExecutionId]] = []
    for n, (priority, policy) in enumerate(
        [(0, None), (5, gpu), (0, gpu), (9000, None), (5, None), (0, None)]
    ):
        order.append((-priority * 1000 + n, await engine.create(priority=priority, policy=policy)))
        await engine.advance(1)
    expected = [execution_id for _, execution_id in sorted(order)]
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=[LANE], capabilities=["gpu"]
    )
    for limit in (1, 2, 3, 6, 50):
        assert await walk_lane(engine, "eligible", limit) == expected
    claims = await engine.claim_all(10, capabilities=["gpu"])
    assert [claim.execution_id for claim in claims] == expected


async def test_equal_scores(engine: Engine) -> None:
    created = await many(engine, 30)
    for limit in (1, 7, 29, 30):
        assert await walk_lane(engine, "eligible", limit) == sorted(created)


@pytest.mark.parametrize(
    ("start", "state"),
    [
        ("waiting", "eligible"),
        ("delayed", "delayed"),
        ("active", "active"),
        ("completed", "terminal"),
        ("revoked", "reclaimable"),
        ("waiting_children", "blocked_dependencies"),
    ],
)
async def test_lane_states(engine: Engine, start: str, state: str) -> None:
    case = await Case.make(engine, start)
    assert await walk_lane(engine, state, 5) == [case.execution_id]


@pytest.mark.parametrize(
    "state", ["suspended", "blocked_budget", "blocked_quota", "blocked_route", "blocked_operator"]
)
async def test_empty_lane_states(engine: Engine, state: str) -> None:
    await engine.create()
    assert await walk_lane(engine, state, 5) == []


async def test_lane_input(engine: Engine) -> None:
    error = await refused(
        engine.backend.listings.list_lane(LANE, "waiting", partition=1), "invalid_input"
    )
    assert "blocked_lane" in error.detail
    await refused(engine.backend.listings.list_lane("", "active", partition=1), "invalid_input")
    page = await engine.backend.listings.list_lane(LANE, "active", partition=1, limit=0)
    assert page == ExecutionPage(())
    for cursor in ("x", sealed("1"), sealed(f"1.0|{{fp:2}}:{OTHER}"), sealed("nan|x")):
        call = engine.backend.listings.list_lane(LANE, "active", partition=1, cursor=cursor)
        await refused(call, "invalid_cursor")
