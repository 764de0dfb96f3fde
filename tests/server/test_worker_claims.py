"""The long poll of POST /v1/workers/{worker_id}/claim: rings, namespaces, clients that leave."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from flowfabric.core.capabilities import Offer
from flowfabric.core.ids import new_uuid
from flowfabric.server.auth import new_token, write_tokens
from tests.server.test_remote import server, waiting
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until

CLAIM = {"lane_id": "default", "worker_instance_id": "w-1", "grant_ttl_ms": 5000}
GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}
LONG = "/v1/workers/w/claim?wait_ms=30000"
SHORT_S = 1.5
"""Less than the interval of sweeps: only a ring answers so soon."""


def poll(http: Http, **change: Any) -> asyncio.Future[Any]:
    return asyncio.ensure_future(http.post(LONG, CLAIM | change))


async def answered(poll: asyncio.Future[Any]) -> Any:
    async with asyncio.timeout(SHORT_S):
        answer = await poll
    assert answer.status == 200, answer.body
    return answer.json["execution_id"]


async def test_a_ring_goes_to_a_worker_that_can_take_the_work(engine: Engine) -> None:
    async with server(engine) as (process, http):
        plain = [poll(http) for _ in range(5)]
        elsewhere = poll(http, namespace="elsewhere", capabilities=["gpu"])
        able = poll(http, capabilities=["gpu"], namespace="default")
        await waiting(process, 7)
        wanted = await engine.create(policy=GPU)
        assert await answered(able) == wanted
        for number in range(5):
            # The waits of the others go on.
            await engine.create()
            done, _ = await asyncio.wait(
                plain, timeout=SHORT_S, return_when=asyncio.FIRST_COMPLETED
            )
            assert len(done) == 1, number
            plain = [each for each in plain if each not in done]
        await engine.create(namespace="elsewhere")
        await answered(elsewhere)


async def test_a_worker_beside_the_long_polls_hears_its_rings(engine: Engine) -> None:
    """A worker of the SDK that offers more than those that wait at the server."""
    async with server(engine) as (process, http):
        polls = [poll(http) for _ in range(3)]
        await waiting(process, 3)
        bell = engine.backend.wakeups.listen(["default"])
        bell.hear(Offer("gpu"))
        try:
            heard = asyncio.ensure_future(bell.wait(30))
            await until(lambda: _listeners(engine, 2), "both doorbells")
            wanted = await engine.create(policy=GPU)
            async with asyncio.timeout(SHORT_S):
                assert await heard == [("default", wanted.tag)]
        finally:
            await bell.aclose()
            for each in polls:
                each.cancel()


async def _listeners(engine: Engine, count: int) -> bool:
    return (await engine.backend.meta.usage()).blocked >= count


async def test_one_ring_for_several_executions_wakes_as_many(engine: Engine) -> None:
    async with server(engine) as (process, http):
        polls = [poll(http) for _ in range(4)]
        await waiting(process, 4)
        rows = [{"namespace": "default", "execution_kind": "job"}] * 4
        assert (await http.post("/v1/bulk/executions", rows)).status == 200
        async with asyncio.timeout(SHORT_S):
            assert len({await answered(each) for each in polls}) == 4


async def test_waiting_holds_no_connection_to_the_store(engine: Engine) -> None:
    async with server(engine) as (process, http):
        polls = [poll(http) for _ in range(10)]
        await waiting(process, 10)
        await until(lambda: _listeners(engine, 1), "the doorbell")
        assert (await engine.backend.meta.usage()).blocked == 1
        for each in polls:
            each.cancel()
        await waiting(process, 0)


async def test_the_end_of_the_wait(engine: Engine) -> None:
    async with server(engine) as (process, http):
        assert (await http.post("/v1/workers/w/claim?wait_ms=20", CLAIM)).status == 204
        long = poll(http)
        await waiting(process, 1)
        await process.services.remote.aclose()
        assert (await long).status == 204


async def test_a_grant_for_a_disconnected_client_is_returned(
    engine: Engine, monkeypatch: Any
) -> None:
    issue = engine.backend.claims.issue_claim_grant
    issued, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Any:
        grant = await issue(*args, **options)
        issued.set()
        await go_on.wait()
        return grant

    execution_id = await engine.create()
    async with server(engine) as (process, http):
        monkeypatch.setattr(engine.backend.claims, "issue_claim_grant", slow)
        long = poll(http)
        await issued.wait()
        long.cancel()
        await until(lambda: process.app._requests.held == 0, "the request to end")
        go_on.set()
        await until(lambda: not process.services.background, "the claim")
        monkeypatch.undo()
        again = await http.post("/v1/workers/v/claim", CLAIM | {"worker_instance_id": "v-1"})
        assert again.json["execution_id"] == execution_id


async def test_a_drained_worker_waits_for_nothing_and_takes_no_ring(engine: Engine) -> None:
    for instance in ("w-1", "w-2"):
        await engine.backend.workers.register_worker(
            worker_id="w", worker_instance_id=instance, lanes=["default"]
        )
    await engine.backend.workers.drain_worker("w-1")
    async with server(engine) as (process, http):
        drained, able = poll(http), poll(http, worker_instance_id="w-2")
        await waiting(process, 2)
        execution_id = await engine.create()
        assert await answered(able) == execution_id
        assert (await drained).status == 204


async def test_only_of_the_namespace_that_is_named(http: Http, engine: Engine) -> None:
    await engine.create(namespace="acme")
    for other in ("other", "default"):
        asked = CLAIM | {"namespace": other}
        assert (await http.post("/v1/workers/w/claim", asked)).status == 204
    assert (await http.post("/v1/workers/w/claim", CLAIM | {"namespace": "acme"})).status == 200
    bad = await http.post("/v1/workers/w/claim", CLAIM | {"namespace": "a:b"})
    assert bad.kind == (400, "invalid_input")


async def test_a_token_of_several_namespaces_serves_them_in_turn(
    engine: Engine, tmp_path: Path
) -> None:
    token, stored = new_token("t", ["operate"], ["a", "b"])
    write_tokens(tmp_path / "tokens", [stored])
    for namespace in ("a", "a", "a", "a", "b", "b", "c"):
        await engine.create(namespace=namespace)
    async with server(engine, tokens_file=tmp_path / "tokens") as (_, http):
        ours = http.with_token(token)
        found: list[str | None] = []
        for _ in range(4):
            grant = (await ours.post("/v1/workers/w/claim", CLAIM)).json
            namespace_of = engine.backend.reads.get_execution_namespace
            found.append(await namespace_of(grant["execution_id"]))
        assert sorted(map(str, found)) == ["a", "a", "b", "b"]
        refused = await ours.post("/v1/workers/w/claim", CLAIM | {"namespace": "c"})
        assert refused.status == 403


async def test_tasks_that_others_left_to_the_worker(http: Http, engine: Engine) -> None:
    execution_id = await engine.create(execution_kind="resize")
    assert await engine.claim_all(tasks=["other"]) == []
    assert (await http.post("/v1/workers/w/claim", CLAIM)).status == 204
    found = await http.post("/v1/workers/w/claim", CLAIM | {"tasks": ["resize"]})
    assert found.json["execution_id"] == execution_id


async def connections(engine: Engine) -> int:
    listed = cast("bytes", await engine.backend.transport.call("CLIENT", "LIST"))
    return len(listed.splitlines())


def able(n: int) -> dict[str, Any]:
    return {"worker_instance_id": f"w-{n}", "capabilities": [f"c{n}"]}


async def test_offers_that_nobody_waits_with_keep_no_doorbell(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has a connection to Valkey."""
    monkeypatch.setattr("flowfabric.scheduler.claim_desk._MOST_BELLS", 4)
    before = await connections(engine)
    async with server(engine) as (_, http):
        for n in range(20):
            answer = await http.post("/v1/remote/claim?wait_ms=1", able(n))
            assert (answer.status, answer.json["claims"]) == (200, [])
            assert await connections(engine) <= before + 4


async def test_workers_without_a_doorbell_find_work(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.scheduler.claim_desk._MOST_BELLS", 2)
    monkeypatch.setattr("flowfabric.scheduler.claim_desk._LISTEN_S", 0.05)
    async with server(engine) as (process, http):
        asking = [
            asyncio.ensure_future(http.post("/v1/remote/claim?wait_ms=20000", able(n)))
            for n in range(6)
        ]
        await waiting(process, 6)
        for n in range(6):
            needed = {"required_capabilities": [f"c{n}"]}
            await engine.create(policy={"routing_requirements": needed})
        answers = await asyncio.gather(*asking)
    assert [len(answer.json["claims"]) for answer in answers] == [1] * 6


async def test_one_request_id_for_all_claims_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each claim would cost more than the one before it, and leave another note."""
    monkeypatch.setattr("flowfabric.server.remote_turns._MOST_TURNS", 3)
    ask = {"worker_instance_id": "w-1", "request_id": new_uuid()}
    async with server(engine) as (_, http):
        for _ in range(3):
            assert (await http.post("/v1/remote/claim", ask)).status == 200
        notes = await engine.backend.transport.call("DBSIZE")
        for _ in range(2):
            refused = await http.post("/v1/remote/claim", ask)
            assert refused.kind == (400, "invalid_input")
            assert refused.json["detail"] == (
                "request_id: was used 3 times; send a new one with each claim, and the same one "
                "only to repeat it"
            )
        assert await engine.backend.transport.call("DBSIZE") == notes
        new = await http.post("/v1/remote/claim", ask | {"request_id": new_uuid()})
        assert new.status == 200
