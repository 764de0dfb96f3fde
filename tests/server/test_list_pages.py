"""What every listing of the API promises about its pages (10 §3.7, §11.8)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import GraphEdge, GraphNode
from flowfabric.core.ids import ExecutionId, new_uuid
from tests.support.budgets import new_budget
from tests.support.engine import LANE, Engine
from tests.support.flows import submitted
from tests.support.http import Http
from tests.support.quotas import policy
from tests.support.server_time import command, commands_run
from tests.support.suspension import Waits

Add = Callable[[], Awaitable[Any]]
"""Adds one entry to a listing."""
_PAGE = 3


class Listing:
    """A route, the noun of its entries, and what adds one."""

    def __init__(self, path: str, noun: str, key: str, add: Add) -> None:
        self.path, self.noun, self.key, self.add = path, noun, key, add

    async def page(self, http: Http, query: str) -> tuple[list[Any], str | None]:
        joint = "&" if "?" in self.path else "?"
        answer = await http.get(f"{self.path}{joint}{query}")
        assert answer.status == 200, answer.body
        assert answer.json.keys() == {self.noun, "next_cursor"}
        entries = answer.json[self.noun]
        return [each[self.key] if self.key else each for each in entries], answer.json[
            "next_cursor"
        ]

    async def pages(self, http: Http, limit: int) -> list[list[Any]]:
        found: list[list[Any]] = []
        cursor: str | None = ""
        while cursor is not None:
            entries, cursor = await self.page(http, f"limit={limit}&cursor={cursor}")
            found.append(entries)
        return found


async def _executions(engine: Engine) -> Listing:
    return Listing("/v1/executions", "executions", "execution_id", engine.create)


async def _of_partition(engine: Engine) -> Listing:
    path = f"/v1/executions?partition={engine.new_id().partition}"
    return Listing(path, "executions", "execution_id", engine.create)


async def _of_lane(engine: Engine) -> Listing:
    path = f"/v1/executions?partition={engine.new_id().partition}&lane={LANE}&state=eligible"
    return Listing(path, "executions", "execution_id", engine.create)


async def _flows(engine: Engine) -> Listing:
    return Listing("/v1/flows", "flows", "flow_id", lambda: submitted(engine, "a"))


async def _filtered_flows(engine: Engine) -> Listing:
    async def add() -> None:
        await submitted(engine, "a")
        await engine.backend.flows.create_flow(new_uuid(), "other", "elsewhere")

    return Listing("/v1/flows?namespace=default", "flows", "flow_id", add)


async def _members(engine: Engine) -> Listing:
    flow_id = new_uuid()
    await engine.backend.flows.create_flow(flow_id, "test")

    async def add() -> None:
        node = GraphNode(key=new_uuid(), execution_kind="job")
        await engine.backend.flows.extend_flow(flow_id, [node])

    return Listing(f"/v1/flows/{flow_id}/members", "members", "execution_id", add)


def _edges(query: str, *, out: bool) -> Callable[[Engine], Awaitable[Listing]]:
    async def listing(engine: Engine) -> Listing:
        flow = await submitted(engine, "one")

        async def add() -> None:
            key = new_uuid()
            node = GraphNode(key=key, execution_kind="job")
            edge = GraphEdge(frm="one", to=key) if out else GraphEdge(frm=key, to="one")
            await engine.backend.flows.extend_flow(flow.flow_id, [node], [edge])

        path = f"/v1/flows/{flow.flow_id}/edges{query.format(one=flow.nodes['one'])}"
        return Listing(path, "edges", "edge_id", add)

    return listing


async def _suspended(engine: Engine) -> Listing:
    waits = await Waits.open(engine)

    async def add() -> None:
        await waits.park(handle=await engine.running())

    return Listing("/v1/suspended", "suspensions", "execution_id", add)


async def _steps(engine: Engine) -> Listing:
    handle = await engine.running()

    async def add() -> None:
        await engine.backend.steps.record_step(handle.execution_id, handle, new_uuid(), result=b"")

    return Listing(f"/v1/executions/{handle.execution_id}/steps", "steps", "step_key", add)


async def _lanes(engine: Engine) -> Listing:
    async def add() -> None:
        await engine.create(lane=f"lane-{new_uuid()}")

    return Listing("/v1/lanes", "lanes", "", add)


async def _workers(engine: Engine) -> Listing:
    async def add() -> None:
        await engine.backend.workers.register_worker(
            worker_id="w", worker_instance_id=new_uuid(), lanes=[LANE], capabilities=[]
        )

    return Listing("/v1/workers", "workers", "worker_instance_id", add)


async def _leases(engine: Engine) -> Listing:
    return Listing("/v1/workers/w-1/leases", "leases", "execution_id", engine.running)


async def _expired(engine: Engine) -> Listing:
    async def add() -> None:
        handle = await engine.running()
        if handle.lease_epoch % 2:
            await engine.advance(60_000)

    return Listing("/v1/leases/expired", "leases", "execution_id", add)


async def _budgets(engine: Engine) -> Listing:
    return Listing(
        "/v1/budgets", "budgets", "budget_id", lambda: new_budget(engine.backend, {"tokens": 1})
    )


async def _quotas(engine: Engine) -> Listing:
    return Listing(
        "/v1/quotas", "quotas", "quota_policy_id", lambda: policy(engine, max_concurrent=1)
    )


LISTINGS = {
    "executions": _executions,
    "executions of a partition": _of_partition,
    "executions of a lane": _of_lane,
    "flows": _flows,
    "flows of a namespace": _filtered_flows,
    "members": _members,
    "edges from many": _edges("", out=False),
    "edges from one": _edges("?upstream_execution_id={one}", out=True),
    "edges into one": _edges("?downstream_execution_id={one}", out=False),
    "suspended": _suspended,
    "steps": _steps,
    "lanes": _lanes,
    "workers": _workers,
    "leases of a worker": _leases,
    "expired leases": _expired,
    "budgets": _budgets,
    "quotas": _quotas,
}
of_each_listing = pytest.mark.parametrize("name", LISTINGS)


async def filled(engine: Engine, http: Http, name: str) -> tuple[Listing, list[Any]]:
    """A listing with at least two full pages, and all its entries."""
    listing = await LISTINGS[name](engine)
    for _ in range(2 * _PAGE):
        await listing.add()
    entries, cursor = await listing.page(http, "")
    assert cursor is None
    assert len(set(entries)) == len(entries) >= 2 * _PAGE
    return listing, entries


@of_each_listing
async def test_pages_follow_each_other(http: Http, engine: Engine, name: str) -> None:
    listing, entries = await filled(engine, http, name)
    for limit in (1, _PAGE, len(entries), len(entries) + 1, 5000):
        pages = await listing.pages(http, limit)
        assert [each for page in pages for each in page] == entries
        # Only the last page may be short; it may be empty where entries are merged or filtered.
        assert [len(page) for page in pages[:-1]] == [limit] * (len(pages) - 1)
        assert len(pages[-1]) <= limit


@of_each_listing
async def test_the_limits_of_a_page(http: Http, engine: Engine, name: str) -> None:
    listing, _ = await filled(engine, http, name)
    assert await listing.page(http, "limit=0") == ([], None)
    joint = "&" if "?" in listing.path else "?"
    for query in ("limit=-1", "limit=many", "limit=1.0", "limit="):
        answer = await http.get(f"{listing.path}{joint}{query}")
        assert answer.kind == (400, "invalid_input"), query
    # The cursor of the lanes is the name of one (10 §3.7).
    odd = () if name == "lanes" else ("cursor=e30", "cursor=%7Bfp:1%7D:x", "cursor=nope")
    for query in ("cursor=%00", "cursor=%C3%BC", *odd):
        for limit in ("", "&limit=0"):
            answer = await http.get(f"{listing.path}{joint}{query}{limit}")
            assert answer.kind == (400, "invalid_cursor"), query + limit


# The cursor of these two is documented: the last name, the last id.
OPAQUE = [each for each in LISTINGS if each not in ("lanes", "executions of a partition")]
# The same route with other filters is the same listing.
SAME = ({"flows", "flows of a namespace"}, {each for each in LISTINGS if each.startswith("edges")})


async def test_no_listing_takes_the_cursor_of_another(http: Http, engine: Engine) -> None:
    """10 §3.7: a cursor that the listing did not hand out is refused."""
    listings = {name: (await filled(engine, http, name))[0] for name in OPAQUE}
    cursors = {name: (await each.page(http, "limit=1"))[1] for name, each in listings.items()}
    for name, listing in listings.items():
        for other, cursor in cursors.items():
            if other != name and not any({name, other} <= each for each in SAME):
                joint = "&" if "?" in listing.path else "?"
                answer = await http.get(f"{listing.path}{joint}cursor={cursor}")
                assert (answer.status, answer.json.get("kind")) == (400, "invalid_cursor"), (
                    f"{name} takes the cursor of {other}"
                )


@of_each_listing
async def test_what_is_added_meanwhile_moves_nothing(http: Http, engine: Engine, name: str) -> None:
    """Every entry that was there comes once, whatever is added between the pages."""
    listing, entries = await filled(engine, http, name)
    found: list[Any] = []
    cursor: str | None = ""
    while cursor is not None:
        page, cursor = await listing.page(http, f"limit=2&cursor={cursor}")
        found += page
        if len(found) < 2 * _PAGE:
            await listing.add()
    assert len(set(found)) == len(found)
    assert [each for each in found if each in entries] == entries


async def _cost(engine: Engine, http: Http, listing: Listing) -> tuple[int, int]:
    """The commands that a page takes, and the bytes that the server sends for it."""

    async def sent() -> int:
        told: Any = await command(engine, "INFO", "stats")
        return int(re.findall(rb"total_net_output_bytes:(\d+)", told)[0])

    _, cursor = await listing.page(http, "limit=5")
    ran, before = await commands_run(engine), await sent()
    await listing.page(http, f"limit=5&cursor={cursor}")
    after = await sent()
    return await commands_run(engine) - ran, after - before


PARTS = {
    "members": ("/members", "members", "execution_id"),
    "edges": ("/edges", "edges", "edge_id"),
    "edges from one": ("/edges?upstream_execution_id={root}", "edges", "edge_id"),
    "edges into one": ("/edges?downstream_execution_id={end}", "edges", "edge_id"),
}


@pytest.mark.parametrize("part", PARTS)
async def test_a_page_of_a_wide_flow_costs_a_page(http: Http, engine: Engine, part: str) -> None:
    costs: list[tuple[int, int]] = []
    for width in (20, 800):
        ways = (f"root>{n:04d} {n:04d}>end" for n in range(width))
        flow = await submitted(engine, " ".join(ways))
        path, noun, key = PARTS[part]
        path = path.format(root=flow.nodes["root"], end=flow.nodes["end"])
        listing = Listing(f"/v1/flows/{flow.flow_id}{path}", noun, key, engine.create)
        costs.append(await _cost(engine, http, listing))
    (few, small), (many, large) = costs
    # Ids decide how many upstreams the edges of a page have; each takes one command.
    assert many <= few + 10
    assert large <= 1.5 * small + 4096


async def test_a_page_among_equal_scores_costs_a_page(http: Http, engine: Engine) -> None:
    """Executions that were created in one call have the same score."""
    await engine.freeze(await engine.now())
    new = [
        NewExecution(execution_id=engine.new_id(), execution_kind="job", lane_id=LANE)
        for _ in range(1000)
    ]
    await engine.backend.executions.create_many(new)
    ids = sorted(each.execution_id for each in new)
    path = f"/v1/executions?partition={ids[0].partition}&lane={LANE}&state=eligible"
    listing = Listing(path, "executions", "execution_id", engine.create)
    assert [each for page in await listing.pages(http, 400) for each in page] == ids
    page = await engine.backend.listings.list_lane(
        LANE, "eligible", partition=ids[0].partition, limit=900
    )
    ran = await commands_run(engine)
    rest, _ = await listing.page(http, f"limit=5&cursor={page.next_cursor}")
    assert rest == ids[900:905]
    assert await commands_run(engine) - ran < 40


async def test_a_page_of_expired_leases_costs_a_page(http: Http, engine: Engine) -> None:
    """Those of one claim end together, and all are marked for reclaim."""
    backend, costs = engine.backend, list[tuple[int, int]]()
    listing = Listing("/v1/leases/expired", "leases", "execution_id", engine.running)
    ids: list[ExecutionId] = []
    for count in (20, 800):
        new = [
            NewExecution(execution_id=engine.new_id(), execution_kind="job") for _ in range(count)
        ]
        ids += [each.execution_id for each in new]
        await backend.executions.create_many(new)
        while await engine.claim_all(256):
            pass
        await engine.advance(60_000)
        for start in range(0, len(ids), 100):
            await backend.upkeep.mark_lease_expired_if_due(ids[0].tag, ids[start : start + 100])
        costs.append(await _cost(engine, http, listing))
    (few, small), (many, large) = costs
    # The position among equal times is sought by halves.
    assert many <= few + 20
    assert large <= 1.5 * small + 4096
    pages = await listing.pages(http, 150)
    assert sorted(each for page in pages for each in page) == sorted(ids)
    assert [len(page) for page in pages] == [150] * 5 + [70]
