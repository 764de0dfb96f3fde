"""Listing executions: the indexes of a lane, and cursors (10 §3.1)."""

from __future__ import annotations

import pytest

from flowfabric.core.ids import ExecutionId
from tests.support.budgets import new_budget
from tests.support.engine import Engine
from tests.support.flows import submitted
from tests.support.http import Http
from tests.support.shapes import SUMMARY, expect
from tests.support.subjects import Subjects

PATH = "/v1/executions"


async def listed(http: Http, execution_id: ExecutionId, index: str, lane: str) -> list[str]:
    query = f"partition={execution_id.partition}&lane={lane}&state={index}"
    answer = await http.get(f"{PATH}?{query}")
    assert answer.status == 200, answer.body
    assert answer.json.keys() == {"executions", "next_cursor"}
    return [row["execution_id"] for row in answer.json["executions"]]


INDEXES = (
    *("eligible", "delayed", "active", "suspended", "terminal", "reclaimable"),
    *("blocked_dependencies", "blocked_budget", "blocked_quota", "blocked_route"),
    *("blocked_operator", "blocked_lane"),
)


async def test_every_index_by_its_name(http: Http, engine: Engine) -> None:
    subjects, backend = Subjects(engine, http), engine.backend
    found: dict[str, tuple[ExecutionId, str]] = {}
    for index, subject in (
        ("eligible", "waiting"),
        ("active", "running"),
        ("suspended", "parked"),
        ("terminal", "cancelled"),
        ("reclaimable", "revoked"),
        ("blocked_operator", "blocked"),
    ):
        facts = await subjects.make(subject)
        found[index] = facts["id"], facts["lane"]
    later = await engine.create(lane="later", delay_until=await engine.now() + 60_000)
    found["delayed"] = later, "later"
    flow = await submitted(engine, "a>b")
    found["blocked_dependencies"] = flow.nodes["b"], "default"
    await new_budget(backend, {"tokens": 10})
    for index, reason in (
        ("blocked_budget", "waiting_for_budget"),
        ("blocked_quota", "waiting_for_quota"),
        ("blocked_route", "waiting_for_capable_worker"),
        ("blocked_lane", "paused_by_policy"),
    ):
        execution_id = await engine.create(lane=index)
        await backend.claims.block_execution_for_admission(execution_id, reason)
        found[index] = execution_id, index
    assert found.keys() == set(INDEXES)
    for index, (execution_id, lane) in found.items():
        for each in INDEXES:
            inside = execution_id in await listed(http, execution_id, each, lane)
            # An execution whose lease was revoked is active until it is claimed again.
            expected = each == index or (index, each) == ("reclaimable", "active")
            assert inside == expected, (index, each)


async def test_an_index_is_paged_and_filtered(http: Http, engine: Engine) -> None:
    made = [
        await engine.create(priority=9 - n, namespace="a" if n % 2 else "b", tags={"k.n": str(n)})
        for n in range(5)
    ]
    base = f"{PATH}?partition={made[0].partition}&lane=default&state=eligible"
    pages: list[list[str]] = []
    cursor = ""
    while True:
        page = (await http.get(f"{base}&limit=2&cursor={cursor}")).json
        pages.append([row["execution_id"] for row in page["executions"]])
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert pages == [made[:2], made[2:4], made[4:]]
    filtered = (await http.get(f"{base}&namespace=a")).json["executions"]
    assert [row["execution_id"] for row in filtered] == [made[1], made[3]]
    tagged = await http.get(f"{base}&tag=k.n:4")
    row = SUMMARY | {
        "namespace": "b",
        "execution_kind": tagged.json["executions"][0]["execution_kind"],
    }
    expect(tagged, 200, {"executions": [row | {"priority": 5}], "next_cursor": None})


@pytest.mark.parametrize("cursor", ["nope", "%00", "{fp:7}:11111111-2222-4333-8444-555555555555"])
async def test_a_cursor_of_another_listing(http: Http, cursor: str) -> None:
    answer = await http.get(f"{PATH}?partition=7&lane=default&state=eligible&cursor={cursor}")
    assert answer.kind == (400, "invalid_cursor")
