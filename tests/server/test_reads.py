"""Reading executions: shapes, the texts of their 404s, waiting, and listings."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.core.ids import ExecutionId, new_uuid
from tests.server.conftest import waiters
from tests.support.admission import budget, claimed, limited, quota, settled
from tests.support.engine import Engine
from tests.support.http import Http

PATH = "/v1/executions"
UNKNOWN = "{fp:7}:11111111-2222-4333-8444-555555555555"


async def test_the_info_has_exactly_the_documented_members(http: Http, engine: Engine) -> None:
    execution_id = await engine.create(namespace="acme", priority=3)
    info = (await http.get(f"{PATH}/{execution_id}")).json
    assert {name: info[name] for name in ("execution_id", "namespace", "lane_id", "priority")} == {
        "execution_id": execution_id,
        "namespace": "acme",
        "lane_id": "default",
        "priority": 3,
    }
    assert info["state_vector"] == {
        "lifecycle_phase": "runnable",
        "ownership_state": "unowned",
        "eligibility_state": "eligible_now",
        "blocking_reason": "waiting_for_worker",
        "terminal_outcome": "none",
        "attempt_state": "pending_first_attempt",
        "public_state": "waiting",
    }
    assert isinstance(info["created_at"], str)
    assert (info["current_attempt_index"], info["flow_id"], info["blocking_detail"]) == (
        0,
        None,
        "",
    )
    assert not {"started_at", "completed_at"} & info.keys()


async def test_times_of_an_ended_execution_are_text_in_the_info(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle, b"done", "json")
    info = (await http.get(f"{PATH}/{handle.execution_id}")).json
    assert isinstance(info["started_at"], str)
    assert isinstance(info["completed_at"], str)
    outcome = (await http.get(f"{PATH}/{handle.execution_id}/outcome")).json
    assert outcome == {
        "execution_id": handle.execution_id,
        "public_state": "completed",
        "terminal_outcome": "success",
        "completed_at": int(info["completed_at"]),
        "failure_reason": None,
        "failure_category": None,
        "cancellation_reason": None,
        "cancelled_by": None,
        "current_attempt_index": 0,
        "total_attempt_count": 1,
        "has_result": True,
    }


async def test_a_result_is_bytes(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    path = f"{PATH}/{handle.execution_id}/result"
    early = await http.get(path)
    assert early.kind == (404, "result_not_found")
    assert early.headers["x-ff-public-state"] == "active"
    await engine.backend.executions.complete(handle, b"\x00\xff", "bin")
    found = await http.get(path)
    assert (found.status, found.body) == (200, b"\x00\xff")
    assert found.headers["content-type"] == "application/octet-stream"
    assert found.headers["x-ff-payload-encoding"] == "bin"
    assert found.headers["x-ff-public-state"] == "completed"


@pytest.mark.parametrize(
    ("route", "error", "kind"),
    [
        ("", "execution not found: {}", "execution_not_found"),
        ("/state", "execution not found: {}", "execution_not_found"),
        ("/state?wait_ms=10", "execution not found: {}", "execution_not_found"),
        ("/result", "execution result not found: {}", "execution_not_found"),
        ("/describe", "execution_not_found: {}", "execution_not_found"),
        ("/explain", "execution_not_found: {}", "execution_not_found"),
        ("/outcome", "execution_not_found: {}", "execution_not_found"),
        ("/history", "execution_not_found: {}", "execution_not_found"),
        ("/steps", "execution_not_found: {}", "execution_not_found"),
        ("/tags", "execution not found: {}", "execution_not_found"),
    ],
)
async def test_an_unknown_execution(http: Http, route: str, error: str, kind: str) -> None:
    answer = await http.get(f"{PATH}/{UNKNOWN}{route}")
    assert answer.kind == (404, kind)
    assert answer.json["error"] == error.format(UNKNOWN)
    assert answer.json["detail"] == UNKNOWN


@pytest.mark.parametrize(
    "text", ["x", "{fp:7}:X", "{fp:256}:11111111-2222-4333-8444-555555555555", "%FF", "%00"]
)
async def test_a_bad_id_in_a_path_is_400(http: Http, text: str) -> None:
    for route in ("", "/state", "/result", "/describe"):
        answer = await http.get(f"{PATH}/{text}{route}")
        assert answer.kind == (400, "invalid_input")
        if text != "%FF":
            assert answer.json["error"].startswith("invalid execution_id: ")


async def test_ids_in_paths_may_be_raw_encoded_or_compact(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    encoded = execution_id.replace("{", "%7B").replace("}", "%7d").replace(":", "%3A")
    for text in (execution_id, encoded, execution_id.compact):
        assert (await http.get(f"{PATH}/{text}/state")).json == "waiting"


async def test_waiting_ends_when_the_execution_does(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    path = f"{PATH}/{handle.execution_id}"
    reads = [
        asyncio.ensure_future(http.get(f"{path}/{route}?wait_ms=30000"))
        for route in ("state", "result", "outcome")
    ]
    await waiters(engine, 1)
    await engine.backend.executions.complete(handle, b"7")
    state, result, outcome = await asyncio.gather(*reads)
    assert (state.status, state.json) == (200, "completed")
    assert (result.status, result.body) == (200, b"7")
    assert outcome.json["public_state"] == "completed"


async def test_a_wait_that_times_out(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    path = f"{PATH}/{execution_id}"
    state = await http.get(f"{path}/state?wait_ms=20")
    assert (state.status, state.json) == (200, "waiting")
    for route in ("result", "outcome"):
        answer = await http.get(f"{path}/{route}?wait_ms=20")
        assert (answer.status, answer.json) == (202, {"public_state": "waiting"})


async def test_a_result_that_never_comes_is_404_at_once(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id)
    answer = await http.get(f"{PATH}/{execution_id}/result?wait_ms=30000")
    assert answer.kind == (404, "result_not_found")
    assert answer.headers["x-ff-public-state"] == "cancelled"


@pytest.mark.parametrize("value", ["30001", "-1", "x", "1e3", ""])
async def test_a_bad_wait_is_400(http: Http, value: str) -> None:
    answer = await http.get(f"{PATH}/{UNKNOWN}/state?wait_ms={value}")
    assert answer.kind == (400, "invalid_input")
    assert answer.json["error"].startswith("invalid_input: wait_ms: ")


async def test_describe_and_explain(http: Http, engine: Engine) -> None:
    handle = await engine.running(tags={"a.b": "c"})
    path = f"{PATH}/{handle.execution_id}"
    described = (await http.get(f"{path}/describe")).json
    assert described["tags"] == {"a.b": "c"}
    assert described["current_attempt"] == {"attempt_id": handle.attempt_id, "attempt_index": 0}
    lease = described["current_lease"]
    assert (lease["lease_id"], lease["lease_epoch"]) == (handle.lease_id, 1)
    explained = (await http.get(f"{path}/explain")).json
    assert explained["public_state"] == "active"
    assert explained.keys() == {
        *("public_state", "blocking_reason", "blocking_detail", "since", "retry_at"),
        *("missing_capabilities", "budgets", "quota", "unresolved_edges", "waitpoints"),
        "lane_state",
    }


async def test_explain_names_exhausted_budgets(http: Http, engine: Engine) -> None:
    spent, open_ = await budget(engine, 10, spent=10), await budget(engine, 10, spent=3)
    execution_id = await limited(engine, open_, spent)
    path = f"{PATH}/{execution_id}/explain"
    reading = {"budget_id": spent, "dimension": "tokens", "used": 10, "limit": 10}
    reading |= {"name": "", "next_reset_at": None}
    assert (await http.get(path)).json["budgets"] == [reading]
    assert await claimed(engine) == []
    explained = (await http.get(path)).json
    assert explained["blocking_reason"] == "waiting_for_budget"
    assert (explained["budgets"], explained["quota"]) == ([reading], None)
    await engine.backend.budgets.reset_budget(spent)
    await settled(engine)
    assert (await http.get(path)).json["budgets"] is None


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"rate": 1}, "rate"), ({"cap": 1}, "concurrency"), ({"rate": 1, "cap": 1}, "rate")],
)
async def test_explain_names_a_full_quota(
    http: Http, engine: Engine, limits: dict[str, int], reason: str
) -> None:
    policy = await quota(engine, **limits)
    ids = {await limited(engine, quota=policy), await limited(engine, quota=policy)}
    path = f"{PATH}/{min(ids)}/explain"
    assert (await http.get(path)).json["quota"] is None
    (running,) = await claimed(engine)
    await settled(engine)
    (waiting,) = ids - {running}
    explained = (await http.get(f"{PATH}/{waiting}/explain")).json
    assert (explained["blocking_reason"], explained["budgets"]) == ("waiting_for_quota", None)
    found = explained["quota"]
    after = found.pop("retry_after_ms")
    assert found == {"quota_policy_id": policy, "reason": reason, "name": ""}
    assert after is None if reason == "concurrency" else 0 < after <= 60_000
    # What runs is not kept from starting.
    assert (await http.get(f"{PATH}/{running}/explain")).json["quota"] is None


async def test_explain_ignores_limits_that_do_not_exist(http: Http, engine: Engine) -> None:
    execution_id = await limited(engine, new_uuid(), quota=new_uuid())
    explained = (await http.get(f"{PATH}/{execution_id}/explain")).json
    assert (explained["budgets"], explained["quota"]) == (None, None)


async def test_tags_are_read_and_written(http: Http, engine: Engine) -> None:
    execution_id = await engine.create(tags={"app.a": "1"})
    path = f"{PATH}/{execution_id}/tags"
    assert (await http.get(path)).json == {"app.a": "1"}
    written = await http.put(path, {"app.a": "2", "app.b": "3"})
    assert (written.status, written.json) == (200, {"Ok": {"count": 2}})
    assert (await http.get(path)).json == {"app.a": "2", "app.b": "3"}
    assert (await http.put(path, {})).kind == (400, "invalid_input")
    assert (await http.put(path, {"Bad": "1"})).kind == (400, "invalid_tag_key")
    assert (await http.put(path, {"app.a": 1})).kind == (422, "invalid_input")
    assert (await http.put(f"{PATH}/{UNKNOWN}/tags", {"a.b": "c"})).kind == (
        404,
        "execution_not_found",
    )


async def test_history_lists_the_unusual(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.leases.revoke_lease(handle.execution_id)
    found = (await http.get(f"{PATH}/{handle.execution_id}/history")).json
    assert found["next_cursor"] is None
    assert [each["type"] for each in found["events"]] == ["revoked"]
    assert found["events"][0]["lease_id"] == handle.lease_id


async def all_pages(http: Http, query: str) -> list[str]:
    found: list[str] = []
    cursor = ""
    while True:
        page = (await http.get(f"{PATH}?limit=2&cursor={cursor}&{query}")).json
        found += [row["execution_id"] for row in page["executions"]]
        assert len(page["executions"]) <= 2
        cursor = page["next_cursor"]
        if cursor is None:
            return found


async def test_listings_page_through_everything_once(http: Http, engine: Engine) -> None:
    made = [await engine.create(lane=lane) for lane in ("a", "b", "default") for _ in range(3)]
    by_place = sorted(made, key=lambda each: (each.partition, each))
    assert await all_pages(http, "") == by_place
    assert await all_pages(http, "lane=b") == [e for e in by_place if e in made[3:6]]
    partition = made[0].partition
    inside = sorted(each for each in made if each.partition == partition)
    assert await all_pages(http, f"partition={partition}") == inside
    first = (await http.get(f"{PATH}?partition={partition}&limit=2")).json
    assert first["next_cursor"] == inside[1]


async def test_one_lane_and_index_is_listed_in_its_order(http: Http, engine: Engine) -> None:
    low, high = await engine.create(priority=1), await engine.create(priority=9)
    query = f"partition={low.partition}&lane=default&state=eligible"
    assert await all_pages(http, query) == [high, low]
    assert await all_pages(http, query.replace("eligible", "active")) == []


async def test_listings_filter(http: Http, engine: Engine) -> None:
    tagged = await engine.create(namespace="acme", tags={"k:1": "v:2"}, execution_kind="other")
    await engine.create()
    for query in ("namespace=acme", "kind=other", "namespace=acme&state=waiting"):
        assert await all_pages(http, query) == [tagged]
    # The first colon separates the key from the value.
    assert await all_pages(http, "tag=k:1:v:2") == []
    other = await engine.create(tags={"k": "v:2", "z": "1"})
    assert await all_pages(http, "tag=k:v%3A2&tag=z:1") == [other]
    assert await all_pages(http, "tag=k:v%3A2&tag=z:2") == []
    # All must match, also those of one key; the same one twice is one.
    assert await all_pages(http, "tag=z:1&tag=z:2") == []
    assert await all_pages(http, "tag=z:1&tag=z:2&tag=z:1") == []
    assert await all_pages(http, "tag=z:1&tag=z:1") == [other]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("state=nope", "invalid_input"),
        ("state=eligible", "invalid_input"),
        ("state=eligible&partition=1", "invalid_input"),
        ("tag=nocolon", "invalid_input"),
        ("partition=256", "invalid_input"),
        ("partition=x", "invalid_input"),
        ("limit=-1", "invalid_input"),
        ("limit=x", "invalid_input"),
        ("cursor=nope", "invalid_cursor"),
        ("partition=1&cursor=nope", "invalid_cursor"),
        (f"partition=1&cursor={UNKNOWN}", "invalid_cursor"),
        ("lane=%00", "invalid_input"),
        ("namespace=%FF", "invalid_input"),
    ],
)
async def test_bad_listings(http: Http, query: str, code: str) -> None:
    assert (await http.get(f"{PATH}?{query}")).kind == (400, code)


async def test_limits_are_lowered_and_zero_is_an_empty_page(http: Http, engine: Engine) -> None:
    await engine.create()
    page = (await http.get(f"{PATH}?limit=99999999")).json
    assert len(page["executions"]) == 1
    empty = (await http.get(f"{PATH}?limit=0")).json
    assert empty == {"executions": [], "next_cursor": None}


async def test_rows_are_objects_with_text_times(http: Http, engine: Engine) -> None:
    execution_id: ExecutionId = await engine.create(namespace="acme")
    (row,) = (await http.get(PATH)).json["executions"]
    assert row["execution_id"] == execution_id
    assert (row["namespace"], row["public_state"]) == ("acme", "waiting")
    assert isinstance(row["created_at"], str)
