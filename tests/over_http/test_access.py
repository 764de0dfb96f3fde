"""Which tokens may call which operations, and what is refused before it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import FlowGraph, GraphNode
from flowfabric.core.errors import AuthError, EngineError, NotFoundError, UnavailableError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.api.reads import Filter
from flowfabric.engine.connect import ServerLocation
from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.backend import HttpBackend
from flowfabric.engine.http.operations import operations
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.server.auth import new_token, write_tokens
from tests.support.engine import Engine, refused
from tests.support.http import Http
from tests.support.http_engine import serving
from tests.support.sdk import until


@asynccontextmanager
async def with_token(
    backend: ValkeyBackend, tmp_path: Path, *scopes: str, namespaces: list[str] | None = None
) -> AsyncGenerator[HttpBackend]:
    """A client whose token has these scopes and namespaces."""
    token, stored = new_token("t", scopes, namespaces)
    write_tokens(tmp_path / "tokens", [stored])
    async with serving(Engine(backend), tokens_file=tmp_path / "tokens") as server:
        host, port = server.address
        address = ServerAddress(host=host, port=port, token=token)
        async with await HttpBackend.connect(address) as remote:
            yield remote


def job(engine: Engine, namespace: str = "default", **fields: Any) -> NewExecution:
    return NewExecution(
        execution_id=engine.new_id(), execution_kind="job", namespace=namespace, **fields
    )


async def test_without_the_right_token(backend: ValkeyBackend) -> None:
    async with serving(Engine(backend), api_token="s3cret") as server:
        host, port = server.address
        for token, advice in ((None, "set FF_API_TOKEN"), ("old", "does not accept the token")):
            address = ServerAddress(host=host, port=port, token=token)
            with pytest.raises(AuthError, match=advice) as caught:
                await HttpBackend.connect(address)
            assert caught.value.code == "unauthorized"


async def test_the_doctor_says_what_is_wrong_with_a_token(
    backend: ValkeyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, stored = new_token("t", ["submit"], None)
    write_tokens(tmp_path / "tokens", [stored])
    async with serving(Engine(backend), tokens_file=tmp_path / "tokens") as server:
        location = ServerLocation("http://{}:{}".format(*server.address))
        found = await location.diagnose(None, prepare=False, connect_timeout=3)
        assert [(each.name, each.grade) for each in found] == [
            ("server", "ok"),
            ("API token", "broken"),
        ]
        assert "set FF_API_TOKEN" in found[1].advice
        monkeypatch.setenv("FF_API_TOKEN", token)
        location = ServerLocation("http://{}:{}".format(*server.address))
        found = await location.diagnose(None, prepare=False, connect_timeout=3)
        assert [(each.name, each.grade) for each in found][1:] == [("permission", "broken")]
        assert "scope 'read'" in found[1].advice


async def test_a_token_that_only_reads(backend: ValkeyBackend, tmp_path: Path) -> None:
    engine = Engine(backend)
    execution_id = await engine.create()
    async with with_token(backend, tmp_path, "read") as remote:
        assert (await remote.reads.read_execution_info(execution_id)).execution_kind == "job"
        for call in (
            remote.executions.cancel_execution(execution_id),
            remote.executions.create_execution(job(engine)),
            remote.secrets.list_waitpoint_hmac_kids(),
        ):
            error = await refused(call, "forbidden")
            assert "this token does not have the scope" in str(error)


async def test_operators_may_do_what_workers_do(backend: ValkeyBackend, tmp_path: Path) -> None:
    engine = Engine(backend)
    async with with_token(backend, tmp_path, "operate", "read") as remote:
        await remote.executions.complete(await engine.running(), b"1")
    async with with_token(backend, tmp_path, "remote", "read") as remote:
        handle = await engine.running()
        await remote.leases.renew(handle)
        await refused(remote.executions.cancel_execution(handle.execution_id), "forbidden")


@pytest.fixture
async def others(backend: ValkeyBackend) -> tuple[NewExecution, str]:
    """An execution and a flow of a namespace that the token does not have."""
    engine = Engine(backend)
    new = job(engine, "theirs")
    await backend.executions.create_execution(new)
    nodes = (GraphNode(key="a", execution_kind="job"),)
    graph = FlowGraph(flow_id=new_uuid(), flow_kind="f", namespace="theirs", nodes=nodes)
    await backend.flows.submit_flow(graph)
    return new, graph.flow_id


async def test_what_belongs_to_others_does_not_exist(
    backend: ValkeyBackend, tmp_path: Path, others: tuple[NewExecution, str]
) -> None:
    new, flow_id = others
    async with with_token(backend, tmp_path, "admin", namespaces=["ours"]) as remote:
        hidden = [
            remote.reads.read_execution_info(new.execution_id),
            remote.executions.cancel_execution(new.execution_id),
            remote.flows.resolve_execution_flow_id(new.execution_id),
            remote.flows.describe_flow(flow_id),
            remote.flows.cancel_flow(flow_id),
        ]
        for call in hidden:
            with pytest.raises(NotFoundError):
                await call
        assert (await backend.reads.read_execution_state(new.execution_id)) == "waiting"


async def test_lists_show_the_tokens_own_namespaces(
    backend: ValkeyBackend, tmp_path: Path, others: tuple[NewExecution, str]
) -> None:
    theirs, flow_id = others
    ours = job(Engine(backend), "ours")
    await backend.executions.create_execution(ours)
    for namespace in ("ours", "theirs"):
        await backend.workers.register_worker(
            *(), worker_id="w", worker_instance_id=namespace, lanes=["default"], namespace=namespace
        )
    async with with_token(backend, tmp_path, "admin", namespaces=["ours"]) as remote:
        page = await remote.listings.list_executions()
        assert [row.execution_id for row in page.executions] == [ours.execution_id]
        page = await remote.listings.list_executions(where=Filter(namespace="theirs"))
        assert page.executions == ()
        assert await remote.listings.find_executions(theirs.execution_id.uuid[:8]) == []
        assert await remote.listings.find_executions(ours.execution_id.uuid[:8]) == [
            ours.execution_id
        ]
        assert (await remote.flows.list_flows()).entries == ()
        partition = theirs.execution_id.partition
        assert flow_id not in await remote.flows.flow_ids(partition)
        workers = await remote.workers.list_workers(None)
        assert [each.worker_instance_id for each in workers] == ["ours"]


async def test_writes_need_an_allowed_namespace(
    backend: ValkeyBackend, tmp_path: Path, others: tuple[NewExecution, str]
) -> None:
    engine = Engine(backend)
    async with with_token(backend, tmp_path, "admin", namespaces=["ours"]) as remote:
        await remote.executions.create_execution(job(engine, "ours"))
        await refused(remote.executions.create_execution(job(engine, "theirs")), "forbidden")
        mixed = [job(engine, "ours"), job(engine, "theirs")]
        await refused(remote.executions.create_many(mixed), "forbidden")
        await refused(
            remote.workers.register_worker(
                worker_id="w", worker_instance_id="w-1", lanes=["default"], namespace="theirs"
            ),
            "forbidden",
        )
        # The namespace is "default" unless another one is given.
        await refused(remote.workers.drain_worker("w-1"), "forbidden")
        for call in (
            remote.lanes.set_lane_state("default", "paused"),
            remote.secrets.rotate_waitpoint_hmac_secret_all("k9", "ab" * 32),
            remote.budgets.reset_budget(new_uuid()),
            remote.places.namespaces_in_use(),
        ):
            error = await refused(call, "forbidden")
            assert "token that is not limited to namespaces" in str(error)


async def test_an_item_of_others_does_not_hold_up_a_batch(
    backend: ValkeyBackend, tmp_path: Path
) -> None:
    """Nor one whose execution was deleted: the results of the others would be lost."""
    engine = Engine(backend)
    for namespace in ("ours", "theirs", "ours"):
        await engine.create(namespace=namespace)
    held = [(await engine.claim(namespaces=[name])).handle for name in ("ours", "theirs", "ours")]
    first, theirs, last = held
    async with with_token(backend, tmp_path, "remote", "read", namespaces=["ours"]) as remote:
        items = [Completion(handle, b"1") for handle in held]
        found = await remote.executions.complete_many(items)
        assert [getattr(each, "code", "completed") for each in found] == [
            *("completed", "execution_not_found", "completed")
        ]
        hidden = await remote.executions.complete_many(items[1:2])
        assert isinstance(hidden[0], NotFoundError)
    for handle, state in ((first, "completed"), (theirs, "active"), (last, "completed")):
        assert await backend.reads.read_execution_state(handle.execution_id) == state


async def test_events_of_others_are_left_out(backend: ValkeyBackend, tmp_path: Path) -> None:
    engine = Engine(backend)
    ours, theirs = job(engine, "ours"), job(engine, "theirs")
    await backend.executions.create_many([ours, theirs])
    async with with_token(backend, tmp_path, "admin", namespaces=["ours"]) as remote:
        async with await remote.events.subscribe_completion() as feed:
            for new in (theirs, ours):
                await backend.executions.cancel_execution(new.execution_id)
            event = await anext(feed)
            assert not isinstance(event, EngineError)
            assert event.execution_id == ours.execution_id
        with pytest.raises(AuthError):
            await remote.events.subscribe_worker_events("theirs", "start")


FED = "/v1/engine/feeds"
FAR = 2**64


@pytest.mark.parametrize(
    ("operation", "given", "detail"),
    [
        ("tagged", {"ids": ["garbage"], "tags": {"a.b": "c"}}, "ids[0]"),
        ("tagged", {"ids": [f"{{fp:999}}:{new_uuid()}"], "tags": {"a.b": "c"}}, "execution_id: "),
        ("states", {"feeds": ["fp:0", "zz"]}, "feed: "),
        ("states", {"feeds": ["fp:999"]}, "feed: "),
        ("states", {"feeds": ["worker:a b"]}, "namespace: "),
        ("last_position", {"feed": "fp:01"}, "feed: "),
        ("read", {"positions": {"fp:1}x": [0, 0]}, "count": 1, "wait_s": 0}, "feed: "),
        ("read", {"positions": {"fp:1": [0, -1]}, "count": 1, "wait_s": 0}, "fp:1: "),
        ("read", {"positions": {"fp:1": [FAR, 0]}, "count": 1, "wait_s": 0}, "fp:1: "),
        ("read", {"positions": {"fp:1": [0, 0]}, "count": 0, "wait_s": 0}, "count: "),
        ("join_group", {"group": "g", "member": "m", "lease_ms": FAR, "start": ""}, "lease_ms: "),
        ("join_group", {"group": "g", "member": "m", "lease_ms": 9, "start": "x"}, "cursor: "),
        ("join_group", {"group": "", "member": "m", "lease_ms": 0, "start": ""}, "group: "),
        *(
            (
                "lease_feed",
                {"feed": feed, "group": "g", "member": "m", "lease_ms": 1, "done": at},
                d,
            )
            for feed, at, d in (("zz", None, "feed: "), ("q:1", [1, -1], "done: "))
        ),
    ],
)
async def test_what_a_feed_cannot_be_asked(
    backend: ValkeyBackend, operation: str, given: dict[str, Any], detail: str
) -> None:
    """Feed names become keys of the store, and some values its errors."""
    async with serving(Engine(backend)) as server:
        before = await backend.transport.call("DBSIZE", key="")
        answer = await Http(server.address).post(f"{FED}/{operation}", given)
        assert answer.status in (400, 422), answer.body
        assert answer.json["detail"].startswith(detail), answer.body
        assert await backend.transport.call("DBSIZE", key="") == before


async def test_a_feed_is_awaited_for_a_time_that_the_store_takes(backend: ValkeyBackend) -> None:
    engine = Engine(backend)
    execution_id = await engine.create()
    await backend.executions.cancel_execution(execution_id)
    feed = f"fp:{execution_id.partition}"
    async with serving(engine) as server:
        http = Http(server.address)
        for wait_s in (-1, 1e300):
            given = {"positions": {feed: [0, 0]}, "count": 1, "wait_s": wait_s}
            answer = await http.post(f"{FED}/read", given)
            assert (answer.status, list(answer.json)) == (200, [feed]), answer.body


async def test_many_readers_of_feeds_leave_few_connections(backend: ValkeyBackend) -> None:
    async def connections() -> int:
        return len(str(await backend.transport.call("CLIENT", "LIST")).split("\\n")) - 1

    before = await connections()
    given = {"positions": {"fp:1": [0, 0]}, "count": 1, "wait_s": 0.5}
    async with serving(Engine(backend)) as server:
        http = Http(server.address)
        await asyncio.gather(*(http.post(f"{FED}/read", given) for _ in range(80)))

        async def are_few() -> bool:
            return await connections() <= before + 32

        await until(are_few, "closed connections")


async def test_tags_of_other_namespaces_are_not_revealed(
    backend: ValkeyBackend, tmp_path: Path, others: tuple[NewExecution, str]
) -> None:
    theirs, ours = others[0].execution_id, job(Engine(backend), "ours")
    await backend.executions.create_execution(ours)
    for each in (theirs, ours.execution_id):
        await backend.executions.set_execution_tags(each, {"app.customer": "acme"})
    asked = {"ids": [theirs, ours.execution_id], "tags": {"app.customer": "acme"}}
    token, stored = new_token("t", ["admin"], ["ours"])
    write_tokens(tmp_path / "tokens", [stored])
    async with serving(Engine(backend), tokens_file=tmp_path / "tokens") as server:
        http = Http(server.address).with_token(token)
        assert (await http.post(f"{FED}/tagged", asked)).json == [ours.execution_id]
        # All namespaces share the groups and their positions.
        group = {"group": "g", "member": "m", "lease_ms": 9, "start": ""}
        lease = {"feed": "fp:1", "group": "g", "member": "m", "lease_ms": 9, "done": [9, 9]}
        for operation, given in (("join_group", group), ("lease_feed", lease)):
            answer = await http.post(f"{FED}/{operation}", given)
            assert answer.kind == (403, "forbidden"), operation


async def test_what_the_table_does_not_list_is_not_there(backend: ValkeyBackend) -> None:
    async with serving(Engine(backend)) as server:
        http = Http(server.address)
        for path in ("upkeep/purge", "leadership/acquire", "executions/nope", "nope/nope"):
            answer = await http.post(f"/v1/engine/{path}", {})
            assert (answer.status, answer.json) == (404, {"error": "not found"})
        assert (await http.get("/v1/engine/reads/read_execution_info")).status == 405


async def test_arguments_that_do_not_decode(backend: ValkeyBackend) -> None:
    async with serving(Engine(backend)) as server:
        http = Http(server.address)
        path = "/v1/engine/executions/change_priority"
        for body, status, detail in (
            ({"execution_id": "x", "new_priority": 1}, 422, "execution_id: "),
            ({"new_priority": "high"}, 422, "new_priority: "),
            ({}, 422, "execution_id: missing"),
            ({"other": 1}, 400, "other: unknown field"),
        ):
            answer = await http.post(path, body)
            assert answer.kind == (status, "invalid_input")
            assert answer.json["detail"].startswith(detail)
        assert (await http.post(path, b"{", content_type="application/json")).status == 400
        new = {"execution_id": "1-" + new_uuid(), "execution_kind": "j", "policy": {"priority": ""}}
        answer = await http.post("/v1/engine/executions/create_execution", {"new": new})
        assert answer.kind == (422, "invalid_policy_json")


async def test_what_only_the_store_can_do(backend: ValkeyBackend) -> None:
    async with serving(Engine(backend)) as server:
        host, port = server.address
        async with await HttpBackend.connect(ServerAddress(host=host, port=port)) as remote:
            for call, op in (
                (remote.upkeep.purge("{fp:1}"), "purge"),
                (remote.leadership.acquire("", "a:1:b", 1000), "acquire"),
                (remote.notes.get_note("x"), "get_note"),
                (remote.wakeups.find_work([]), "find_work"),
                (remote.meta.prepare(), "prepare"),
            ):
                with pytest.raises(UnavailableError) as caught:
                    await call
                assert caught.value.op == op
            supports = remote.meta.capabilities().supports
            assert supports["cancel_execution"]
            assert supports["claim_for_worker"]
            with pytest.raises(UnavailableError):
                remote.wakeups.listen(["default"])


def test_every_operation_that_names_nothing_says_so() -> None:
    """Otherwise a token of some namespaces could reach what belongs to others."""
    subjects = ("execution", "handle", "flow", "namespace", "new", "items", "graph", "grant")
    for noun in operations().values():
        for operation in noun.values():
            named = any(each in name for name in operation.types for each in subjects)
            if "open" in operation.marks and named:
                assert operation.noun == "feeds", operation.path
