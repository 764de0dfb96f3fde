"""Claiming, renewing and completing over HTTP, by workers in any language."""

from __future__ import annotations

import asyncio
import contextlib
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.server.auth import new_token, write_tokens
from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess
from tests.server.conftest import Serving
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.proxy import FaultProxy
from tests.support.sdk import until

ME = {"worker_instance_id": "w-1"}
CLAIM = "/v1/remote/claim"
RENEW = "/v1/remote/renew"
COMPLETE = "/v1/remote/complete"
FAIL = "/v1/remote/fail"


async def claimed(http: Http, **ask: Any) -> list[dict[str, Any]]:
    answer = await http.post(CLAIM, ME | ask)
    assert answer.status == 200, answer.body
    return answer.json["claims"]


async def state(engine: Engine, execution_id: ExecutionId) -> str:
    return (await engine.backend.reads.read_execution_state(execution_id)).value


def text_of(handle: Handle) -> str:
    return b64encode(handle.opaque).decode()


@contextlib.asynccontextmanager
async def server(engine: Engine, **settings: Any) -> AsyncGenerator[tuple[ServerProcess, Http]]:
    """A server whose parts the test looks into."""
    given: dict[str, Any] = {"listen": ("127.0.0.1", 0), "shutdown_timeout_s": 5} | settings
    process = ServerProcess(engine.backend, ServerConfig(**given))
    await process.listen()
    try:
        yield process, Http(process.address)
    finally:
        await process.stop_serving()


async def waiting(process: ServerProcess, count: int) -> None:
    await until(lambda: process.services.remote.desk.waiting == count, f"{count} long polls")


async def test_a_worker_claims_and_completes(http: Http, engine: Engine) -> None:
    execution_id = await engine.create(input_payload=b'{"a":1}', tags={"team": "blue"})
    (claim,) = await claimed(http, max=5)
    assert b64decode(claim["payload_b64"]) == b'{"a":1}'
    assert {name: claim[name] for name in ("execution_id", "tags", "attempt_index", "kind")} == {
        "execution_id": execution_id,
        "tags": {"team": "blue"},
        "attempt_index": 0,
        "kind": "fresh",
    }
    assert claim["lease_ttl_ms"] == 30_000
    assert await state(engine, execution_id) == "active"
    items = [{"handle": claim["handle"], "result_b64": "ZG9uZQ=="}]
    answer = await http.post(COMPLETE, {"items": items})
    (row,) = answer.json["results"]
    assert row == {
        "status": 200,
        "result": {"Completed": {"execution_id": execution_id, "public_state": "completed"}},
    }
    assert await engine.backend.reads.get_execution_result(execution_id) == b"done"
    again = await http.post(COMPLETE, {"items": items})
    assert again.json == answer.json


async def test_a_claim_has_what_the_policy_and_the_flow_say(http: Http, engine: Engine) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 60_000}}
    await engine.create(policy=policy, execution_kind="resize", payload_encoding="json")
    (claim,) = await claimed(http, lease_ttl_ms=5_000)
    assert 0 < claim["attempt_timeout_ms"] <= 60_000
    assert (claim["execution_kind"], claim["payload_encoding"]) == ("resize", "json")
    assert (claim["lease_ttl_ms"], claim["resume_cause"], claim["inputs"]) == (5_000, None, {})


async def test_only_what_the_worker_offers_is_claimed(http: Http, engine: Engine) -> None:
    gpu = await engine.create(policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    other = await engine.create(namespace="acme")
    assert await claimed(http) == []
    (claim,) = await claimed(http, capabilities=["gpu"])
    assert claim["execution_id"] == gpu
    (claim,) = await claimed(http, namespaces=["*"])
    assert (claim["execution_id"], claim["namespace"]) == (other, "acme")
    known = await engine.create(execution_kind="known")
    await engine.create(execution_kind="unknown")
    answer = await http.post(CLAIM, ME | {"tasks": ["known"], "max": 5})
    assert [each["execution_id"] for each in answer.json["claims"]] == [known]
    assert answer.json["unknown_tasks"] == ["unknown"]


@pytest.mark.parametrize(
    ("ask", "status", "names"),
    [
        ({"worker_instance_id": "a b"}, 400, "worker_instance_id"),
        ({"lanes": []}, 400, "lanes"),
        ({"lanes": ["\n"]}, 400, "lane_id"),
        ({"max": 257}, 400, "max"),
        ({"max": -1}, 422, "max"),
        ({"lease_ttl_ms": 999}, 400, "lease_ttl_ms"),
        ({"capabilities": ["a,b"]}, 400, "worker:"),
        ({"namespaces": [""]}, 400, "namespaces"),
        ({"request_id": "x"}, 422, "request_id"),
    ],
)
async def test_claims_are_checked(http: Http, ask: dict[str, Any], status: int, names: str) -> None:
    answer = await http.post(CLAIM, ME | ask)
    assert (answer.status, answer.json["detail"].startswith(names)) == (status, True), answer.body


async def test_a_claim_waits_for_work(engine: Engine) -> None:
    async with server(engine) as (process, http):
        poll = asyncio.ensure_future(http.post(f"{CLAIM}?wait_ms=30000", ME))
        await waiting(process, 1)
        execution_id = await engine.create()
        (claim,) = (await poll).json["claims"]
        assert claim["execution_id"] == execution_id
        assert (await http.post(f"{CLAIM}?wait_ms=20", ME)).json["claims"] == []


async def test_workers_that_wait_share_a_doorbell_and_each_ring_wakes_one(engine: Engine) -> None:
    async with server(engine, max_requests=2) as (process, http):
        polls = [
            asyncio.ensure_future(
                http.post(f"{CLAIM}?wait_ms=30000", {"worker_instance_id": f"w-{number}"})
            )
            for number in range(20)
        ]
        await waiting(process, 20)

        async def listening() -> bool:
            return (await engine.backend.meta.usage()).blocked == 1

        await until(listening, "one listener")
        await engine.create()
        await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        await waiting(process, 19)
        # One worker takes one of the four, and wakes the next for the rest.
        for _ in range(4):
            await engine.create()
        await until(lambda: sum(poll.done() for poll in polls) == 5, "five claims")
        await process.services.remote.aclose()
        found = [len((await poll).json["claims"]) for poll in polls]
        assert sorted(found) == [0] * 15 + [1] * 5


async def test_a_poll_ends_without_a_claim_when_its_client_disconnects(engine: Engine) -> None:
    async with server(engine) as (process, http):
        poll = asyncio.ensure_future(http.post(f"{CLAIM}?wait_ms=30000", ME))
        await waiting(process, 1)
        poll.cancel()
        await waiting(process, 0)
        execution_id = await engine.create()
        (claim,) = await claimed(http, worker_instance_id="w-2")
        assert claim["execution_id"] == execution_id


async def test_claims_for_a_disconnected_client_are_released(engine: Engine) -> None:
    execution_id = await engine.create()
    async with server(engine) as (process, http):
        desk = process.services.remote.desk
        claim, gate, made = desk.claim, asyncio.Event(), asyncio.Event()

        async def slow(*args: Any) -> Any:
            found = await claim(*args)
            made.set()
            await gate.wait()
            return found

        desk.claim = slow  # pyright: ignore[reportAttributeAccessIssue]
        poll = asyncio.ensure_future(http.post(CLAIM, ME | {"request_id": new_uuid()}))
        await made.wait()
        assert await state(engine, execution_id) == "active"
        poll.cancel()
        under_way = process.services.remote._under_way
        await until(lambda: any(each.given_up.done() for each in under_way.values()), "it has gone")
        gate.set()

        async def waits() -> bool:
            return await state(engine, execution_id) == "waiting"

        await until(waits, "the lease was given back")


async def test_a_lost_answer_is_repeated_by_its_request_id(http: Http, engine: Engine) -> None:
    ids = {await engine.create(), await engine.create()}
    ask = ME | {"max": 2, "request_id": new_uuid()}
    with FaultProxy(http.address) as proxy:
        proxy.drop_next_reply(b"/v1/remote/claim")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await Http(proxy.address).post(CLAIM, ask)
        await engine.create()
        first = (await Http(proxy.address).post(CLAIM, ask)).json["claims"]
    assert {claim["execution_id"] for claim in first} == ids
    again = (await http.post(CLAIM, ask)).json["claims"]
    assert [claim["handle"] for claim in again] == [claim["handle"] for claim in first]
    only = (await http.post(CLAIM, ask | {"max": 0})).json
    assert {claim["execution_id"] for claim in only["claims"]} == ids
    assert only["waited_ms"] <= 0
    assert await claimed(http, max=0, request_id=new_uuid()) == []
    (other,) = await claimed(http, max=2, request_id=new_uuid())
    assert other["execution_id"] not in ids


async def test_another_server_repeats_the_answer(
    http: Http, serve: Serving, engine: Engine
) -> None:
    await engine.create()
    ask = {"request_id": new_uuid(), "lanes": ["other", "default"]}
    (first,) = await claimed(http, **ask)
    async with serve() as second:
        (again,) = await claimed(second, **ask)
    assert again == first


async def test_a_repeat_joins_the_poll_that_waits(engine: Engine) -> None:
    async with server(engine) as (process, http):
        ask = ME | {"request_id": new_uuid()}
        polls = [asyncio.ensure_future(http.post(f"{CLAIM}?wait_ms=30000", ask)) for _ in range(2)]
        under_way = process.services.remote._under_way
        await until(lambda: any(each.clients == 2 for each in under_way.values()), "both wait")
        await engine.create()
        one, two = [(await poll).json for poll in polls]
        assert one == two
        assert len(one["claims"]) == 1


async def test_a_worker_is_registered_by_its_calls(http: Http, engine: Engine) -> None:
    ask = {"worker_id": "pool", "lanes": ["a", "b"], "capabilities": ["gpu"], "tasks": ["resize"]}
    await claimed(http, **ask)
    (entry,) = await engine.backend.workers.list_workers("default")
    assert (entry.worker_id, entry.worker_instance_id) == ("pool", "w-1")
    assert (entry.lanes, entry.capabilities) == (("a", "b"), ("gpu",))
    assert (entry.tasks, entry.takes_other_tasks) == (("resize",), False)
    await claimed(http, **ask, max=0)
    await http.post(CLAIM, ME | {"leaving": True})
    assert await engine.backend.workers.list_workers("default") == []


async def test_a_worker_that_renews_stays_registered(http: Http, engine: Engine) -> None:
    await engine.create()
    (claim,) = await claimed(http, lease_ttl_ms=86_400_000)
    for _ in range(3):
        await engine.advance(100_000_000)
        await claimed(http, max=0, lease_ttl_ms=86_400_000)
        answer = await http.post(RENEW, {"items": [{"handle": claim["handle"]}]})
        assert answer.json["draining"] is False
    assert len(await engine.backend.workers.list_workers("default")) == 1


async def test_a_drained_worker_gets_nothing(http: Http, engine: Engine) -> None:
    await engine.create()
    (held,) = await claimed(http)
    await engine.create()
    drained = await http.post("/v1/workers/w-1/drain")
    assert drained.json == {"Draining": {"leases": 1}}
    answer = await http.post(CLAIM, ME)
    assert (answer.json["claims"], answer.json["draining"]) == ([], True)
    assert (await http.post(CLAIM, ME | {"max": 0})).json["draining"] is True
    items = [{"handle": held["handle"]}]
    assert (await http.post(COMPLETE, {"items": items})).json["results"][0]["status"] == 200
    assert len(await claimed(http, worker_instance_id="w-2")) == 1


async def test_renewing(http: Http, engine: Engine) -> None:
    await engine.create()
    (claim,) = await claimed(http)
    await engine.advance(20_000)
    stale = await engine.running()
    await engine.backend.leases.revoke_lease(stale.execution_id)
    items = [{"handle": claim["handle"]}, {"handle": "?"}, {"handle": text_of(stale)}, {}]
    first, second, third, fourth = (await http.post(RENEW, {"items": items})).json["results"]
    assert first["status"] == 200
    assert first["result"]["Renewed"]["expires_at"] >= claim["lease_expires_at"] + 20_000
    assert (second["status"], second["code"]) == (400, "invalid_input")
    assert (third["status"], third["code"]) == (409, "lease_revoked")
    assert (fourth["status"], fourth["detail"]) == (422, "handle: missing")


async def test_a_stale_handle_changes_nothing(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    (old,) = await claimed(http)
    await engine.backend.leases.revoke_lease(execution_id)
    (new,) = await claimed(http, worker_instance_id="w-2")
    assert (new["kind"], new["attempt_index"]) == ("reclaimed", 1)
    before = await engine.digest()
    about = {"handle": old["handle"]}
    calls: dict[str, dict[str, Any]] = {
        "renew": {},
        "complete": {"result_b64": "eA=="},
        "fail": {"reason": "no"},
        "delay": {"delay_ms": 1000},
        "suspend": {"waitpoint_key": "k"},
        "progress": {"pct": 5},
        "frames": {"frames": [{"text": "x"}], "seq": 1},
    }
    for name, fields in calls.items():
        answer = await http.post(f"/v1/remote/{name}", {"items": [about | fields]})
        (row,) = answer.json["results"]
        assert row["status"] == 409, (name, row)
        # A refused append is counted in the record.
        assert name == "frames" or await engine.digest() == before, name
    assert await state(engine, execution_id) == "active"
    answer = await http.post(COMPLETE, {"items": [{"handle": new["handle"]}]})
    assert answer.json["results"][0]["status"] == 200


async def test_each_item_of_a_batch_has_its_own_answer(http: Http, engine: Engine) -> None:
    for _ in range(2):
        await engine.create()
    one, two = await claimed(http, max=2)
    items: list[Any] = [
        {"handle": one["handle"], "result": [1, 2]},
        {"handle": "bm90IGEgaGFuZGxl"},
        {"handle": two["handle"], "result": [1], "result_b64": "AQ=="},
        {"result": []},
        5,
    ]
    rows = (await http.post(COMPLETE, {"items": items})).json["results"]
    assert [row["status"] for row in rows] == [200, 400, 400, 422, 422]
    assert await state(engine, two["execution_id"]) == "active"
    assert (await http.post(COMPLETE, {"items": []})).kind == (400, "invalid_input")
    assert (await http.post(COMPLETE, {"items": [{}] * 1001})).kind == (400, "invalid_input")


async def test_completing_claims_the_next(http: Http, engine: Engine) -> None:
    ids = {await engine.create() for _ in range(3)}
    (first,) = await claimed(http)
    ask = ME | {"max": 2, "request_id": new_uuid()}
    body = {"items": [{"handle": first["handle"]}], "claim": ask}
    with FaultProxy(http.address) as proxy:
        proxy.drop_next_reply(b"/v1/remote/complete")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await Http(proxy.address).post(COMPLETE, body)
    answer = (await http.post(COMPLETE, body)).json
    assert answer["results"][0]["status"] == 200
    assert {claim["execution_id"] for claim in (first, *answer["claims"])} == ids
    assert answer["draining"] is False
    only = (await http.post(COMPLETE, {"items": [], "claim": ME})).json
    assert (only["results"], only["claims"]) == ([], [])


async def test_failing_and_claiming_the_next_survives_a_lost_answer(
    http: Http, engine: Engine
) -> None:
    ids = {await engine.create() for _ in range(3)}
    (first,) = await claimed(http)
    ask = ME | {"max": 2, "request_id": new_uuid()}
    body = {"items": [{"handle": first["handle"], "reason": "broken"}], "claim": ask}
    with FaultProxy(http.address) as proxy:
        proxy.drop_next_reply(b"/v1/remote/fail")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await Http(proxy.address).post(FAIL, body)
    answer = (await http.post(FAIL, body)).json
    assert answer["results"] == [{"status": 200, "result": "TerminalFailed"}]
    assert {claim["execution_id"] for claim in (first, *answer["claims"])} == ids
    only = (await http.post(FAIL, {"items": [], "claim": ME})).json
    assert (only["results"], only["claims"]) == ([], [])


@pytest.mark.parametrize("path", [COMPLETE, FAIL])
async def test_a_claim_that_is_refused_ends_nothing(http: Http, engine: Engine, path: str) -> None:
    execution_id = await engine.create()
    (first,) = await claimed(http)
    asks: dict[str, Any] = ME | {"lanes": []}
    items = [{"handle": first["handle"], "reason": "broken"}]
    body: dict[str, Any] = {"items": items, "claim": asks}
    assert (await http.post(path, body)).kind == (400, "invalid_input")
    assert await state(engine, execution_id) == "active"


async def test_tokens_need_the_scope_and_see_their_namespaces(
    serve: Serving, engine: Engine, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.toml"
    working, work = new_token("worker", ["remote"], ["acme"])
    reading, read = new_token("viewer", ["read"], None)
    write_tokens(file, [work, read])
    theirs = await engine.running()
    mine = await engine.create(namespace="acme")
    async with serve(tokens_file=file) as http:
        assert (await http.post(CLAIM, ME)).status == 401
        assert (await http.with_token(reading).post(CLAIM, ME)).kind == (403, "forbidden")
        worker = http.with_token(working)
        for elsewhere in ({}, {"namespaces": ["*"]}, {"namespace": "acme", "namespaces": ["x"]}):
            assert (await worker.post(CLAIM, ME | elsewhere)).kind == (403, "forbidden")
        assert (await worker.get(f"/v1/executions/{mine}")).kind == (403, "forbidden")
        (claim,) = await claimed(worker, namespace="acme", namespaces=["*"])
        assert claim["execution_id"] == mine
        items = [{"handle": text_of(theirs)}, {"handle": claim["handle"]}]
        rows = (await worker.post(COMPLETE, {"items": items})).json["results"]
        assert [row["status"] for row in rows] == [404, 200]
        assert await state(engine, theirs.execution_id) == "active"


async def test_long_polls_have_a_pool_of_their_own(engine: Engine) -> None:
    async with server(engine, max_remote_claims=1, max_requests=1) as (process, http):
        poll = asyncio.ensure_future(http.post(f"{CLAIM}?wait_ms=30000", ME))
        await waiting(process, 1)
        assert (await http.get("/v1/lanes")).status == 200
        refused = await http.post(CLAIM, ME)
        assert refused.kind == (429, "resource_exhausted")
        assert refused.json["error"].startswith("too many concurrent remote_claims calls")
        await process.services.remote.aclose()
        assert (await poll).json["claims"] == []


async def test_a_worker_that_restarts_with_its_instance_id(http: Http, engine: Engine) -> None:
    """It is refused while the old registration lasts; asking does not renew that."""
    start = ME | {"max": 0, "starting": True}
    first = start | {"request_id": new_uuid()}
    for _ in range(2):
        # A repeat of the request is the same worker.
        assert (await http.post(CLAIM, first)).status == 200
    alive = "ff:worker:{default}:w-1:alive"
    await engine.backend.transport.call("PEXPIRE", alive, 20_000)
    for _ in range(2):
        refused = await http.post(CLAIM, start | {"request_id": new_uuid()})
        assert refused.kind == (400, "invalid_input")
        assert refused.json["detail"] == "worker_instance_id: instance_id in use"
    left: Any = await engine.backend.transport.call("PTTL", alive)
    assert left <= 20_000
    await engine.backend.transport.call("DEL", alive)
    assert (await http.post(CLAIM, start | {"request_id": new_uuid()})).status == 200
    # What it registers later is still registered by the same worker.
    again = start | {"request_id": new_uuid(), "lanes": ["other"]}
    assert (await http.post(CLAIM, again)).status == 400


async def test_of_two_workers_that_start_at_once_one_is_accepted(engine: Engine) -> None:
    start = ME | {"max": 0, "starting": True}
    async with server(engine) as (_, one), server(engine) as (_, other):
        answers = await asyncio.gather(
            *(each.post(CLAIM, start | {"request_id": new_uuid()}) for each in (one, other))
        )
    assert sorted(answer.status for answer in answers) == [200, 400]


async def test_budgets_and_quotas_are_asked_first(http: Http, engine: Engine) -> None:
    policy_id = new_uuid()
    await engine.backend.quotas.create_quota_policy(
        quota_policy_id=policy_id,
        window_seconds=60,
        max_requests_per_window=1,
        max_concurrent=0,
    )
    policy = {"quota_policy_id": policy_id}
    ids = {await engine.create(policy=policy) for _ in range(2)}
    (claim,) = await claimed(http, max=2)
    (other,) = ids - {claim["execution_id"]}
    assert await state(engine, other) == "rate_limited"


def test_a_handle_survives_its_text() -> None:
    handle = Handle(
        execution_id=ExecutionId("{fp:1}:11111111-2222-4333-8444-555555555555"),
        lease=f"{new_uuid()}/3",
        attempt=f"{new_uuid()}/1",
        lease_ttl_ms=1,
        lane_id="default",
        worker_instance_id="w",
    )
    assert Handle.decode(b64decode(text_of(handle))) == handle
    assert msgspec.json.encode(handle.opaque).decode() == f'"{text_of(handle)}"'
