"""`GET /v1/executions/{id}/steps`: every field, page by page (10 §3.7, 11 §17.1)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.steps import StepError
from tests.support.engine import Engine
from tests.support.http import Http

NOW = 1_900_000_000_000
CHILD = "{fp:7}:11111111-2222-4333-8444-555555555555"


async def record(engine: Engine, handle: Handle, key: str, **step: Any) -> None:
    await engine.backend.steps.record_step(handle.execution_id, handle, key, **step)


def row(key: str, seq: int, **changed: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "step_key": key,
        "seq": seq,
        "kind": "step",
        "status": "done",
        "codec": "",
        "result": None,
        "encoding": None,
        "error": None,
        "attempt_index": 0,
        "lease_epoch": 1,
        "started_at": NOW,
        "finished_at": NOW,
        "fire_at": None,
        "child_execution_id": None,
    }
    return fields | changed


async def test_every_field(http: Http, engine: Engine) -> None:
    await engine.freeze(NOW)
    handle = await engine.running()
    await record(engine, handle, "fetch", result='{"ü":1}'.encode(), codec="json", took_ms=4)
    await record(engine, handle, "image", result=b"\x00\xff")
    await record(engine, handle, "send", status="failed", error=StepError("no route", "transient"))
    await record(engine, handle, "nap", kind="timer", status="pending", fire_in_ms=90)
    child: dict[str, Any] = {"kind": "child", "child_execution_id": CHILD}
    await record(engine, handle, "sub", result=b"", **child)
    found = await http.get(f"/v1/executions/{handle.execution_id}/steps")
    assert found.status == 200
    assert found.json == {
        "steps": [
            row("fetch", 1, codec="json", result='{"ü":1}', encoding="utf8", started_at=NOW - 4),
            row("image", 2, result="AP8=", encoding="base64"),
            row("send", 3, status="failed", error={"reason": "no route", "category": "transient"}),
            row("nap", 4, kind="timer", status="pending", finished_at=None, fire_at=NOW + 90),
            row("sub", 5, result="", encoding="utf8", **child),
        ],
        "next_cursor": None,
    }
    assert [list(each) for each in found.json["steps"]] == [list(row("", 1))] * 5


async def test_pages(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    for n in range(5):
        await record(engine, handle, f"k{n}")
    path = f"/v1/executions/{handle.execution_id}/steps"

    async def page(query: str) -> tuple[list[int], str | None]:
        found = await http.get(f"{path}?{query}")
        assert found.status == 200
        assert list(found.json) == ["steps", "next_cursor"]
        return [each["seq"] for each in found.json["steps"]], found.json["next_cursor"]

    seqs, cursor = await page("limit=2")
    assert seqs == [1, 2]
    seqs, cursor = await page(f"limit=2&cursor={cursor}")
    assert seqs == [3, 4]
    assert await page(f"limit=2&cursor={cursor}") == ([5], None)
    assert await page("") == ([1, 2, 3, 4, 5], None)
    assert await page("cursor=&limit=5000") == ([1, 2, 3, 4, 5], None)
    assert await page("limit=0") == ([], None)


async def test_a_page_has_a_hundred_steps_by_default(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    for n in range(101):
        await record(engine, handle, f"k{n}")
    found = (await http.get(f"/v1/executions/{handle.execution_id}/steps")).json
    assert len(found["steps"]) == 100
    assert found["next_cursor"] is not None


async def test_a_page_of_large_steps_is_short(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    for n in range(8):
        await record(engine, handle, f"k{n}", result=bytes(262_144))
    found = (await http.get(f"/v1/executions/{handle.execution_id}/steps")).json
    assert 0 < len(found["steps"]) < 8
    cursor = found["next_cursor"]
    rest = (await http.get(f"/v1/executions/{handle.execution_id}/steps?cursor={cursor}")).json
    assert [each["seq"] for each in (*found["steps"], *rest["steps"])] == list(range(1, 9))


@pytest.mark.parametrize("cursor", ["nope", "1", "s", "s0", "s-1", "s1x", "s1234567890", "%C3%BC"])
async def test_cursors_of_other_listings(http: Http, engine: Engine, cursor: str) -> None:
    execution_id = await engine.create()
    answer = await http.get(f"/v1/executions/{execution_id}/steps?cursor={cursor}")
    assert answer.kind == (400, "invalid_cursor")


@pytest.mark.parametrize("limit", ["-1", "x", "1.5", "1e3"])
async def test_unusable_limits(http: Http, engine: Engine, limit: str) -> None:
    execution_id = await engine.create()
    answer = await http.get(f"/v1/executions/{execution_id}/steps?limit={limit}")
    assert answer.kind == (400, "invalid_input")
