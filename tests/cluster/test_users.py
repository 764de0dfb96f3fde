"""The ACL users of docs/how-to/deploy-on-valkey.md: enough for their work, and no more."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.contracts.leases import Claim, Granted, Revoked
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.connect import ServerLocation
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scanners.supervisor import ScannerSupervisor
from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess
from flowfabric.valkey.address import Address, parse_url
from flowfabric.valkey.connection import Reply, dial
from tests.docs.markdown import ROOT
from tests.support.acl import PAGE, documented_users, login
from tests.support.cluster import TestCluster
from tests.support.http import Http
from tests.support.server import TestServer, free_port

WORKER: Any = {"worker_id": "w", "worker_instance_id": "w-1"}
SERVES: Any = {"lease_ttl": "2s", "capabilities": ["gpu"], "lanes": ["default"]}
SOURCE = ROOT / "src" / "flowfabric"
SECRET = "ff:sec:{fp:0}:waitpoint_hmac"
# Only the operator may read settings; a worker skips its checks of them.
OPTIONAL = {"ff-worker: config|get"}
# Words in the sources that are commands too, commands that need no permission, and ACL GETUSER:
# without it, `doctor` skips a check. Only benchmarks use MEMORY.
NOT_CALLED = {"ACL", "AUTH", "DEBUG", "HELLO", "MEMORY", "READONLY", "TYPE"}
# Those with subcommands: the users get only the ones that are called.
SUBCOMMANDS = {"CLIENT", "CLUSTER", "CONFIG", "FUNCTION", "XINFO"}


def allowed(user: str) -> set[str]:
    return {word[1:].upper() for word in documented_users()[user] if word.startswith("+")}


@dataclass
class Deployment:
    """A prepared deployment whose users are the documented ones."""

    base: str
    nodes: list[TestServer]

    def url(self, user: str) -> str:
        return login(self.base, user)

    async def admin(self, *words: str) -> list[Reply]:
        """One command on every node, by the server's administrator."""
        replies: list[Reply] = []
        for node in self.nodes:
            conn = await dial(Address(socket_path=str(node.socket_path)))
            replies.append(await conn.call(*words))
            await conn.aclose()
        return replies

    async def refusals(self) -> set[str]:
        """What the ACL has refused so far."""
        logs = await self.admin("ACL", "LOG")
        return {
            f"{bytes(entry[b'username']).decode()}: {bytes(entry[b'object']).decode()}"
            for log in logs
            for entry in log
        }

    async def backend(self, user: str) -> ValkeyBackend:
        return await ValkeyBackend.connect(parse_url(self.url(user)))


@pytest.fixture(scope="module")
def single() -> Iterator[TestServer]:
    server = TestServer("--appendonly", "yes", port=free_port())
    yield server
    server.stop()


@pytest.fixture(params=["single", "cluster"])
def bare(request: pytest.FixtureRequest) -> Deployment:
    found: TestServer | TestCluster = request.getfixturevalue(request.param)
    if isinstance(found, TestCluster):
        return Deployment(found.url, found.nodes)
    return Deployment(f"valkey://127.0.0.1:{found.port}", [found])


@pytest.fixture
async def deployment(bare: Deployment) -> Deployment:
    await bare.admin("FLUSHALL")
    await bare.admin("FUNCTION", "FLUSH")
    for rule in documented_users().values():
        await bare.admin(*rule)
    await bare.admin("ACL", "LOG", "RESET")
    operator = parse_url(bare.url("ff-operator"))
    async with await ValkeyBackend.connect(
        operator, prepare_with=PartitionCounts(flow=16)
    ) as backend:
        await backend.secrets.seed_at_boot("ab" * 32)
    return bare


class Application:
    """The same tasks for every user of a deployment."""

    def __init__(self, url: str) -> None:
        self.app = app = ff.Fabric(url)

        @app.task(retry=ff.Retry(2, backoff="20ms"))
        async def flaky(ctx: ff.Context) -> str:
            await ctx.progress(50, "half")
            await ctx.stream(f"attempt {ctx.attempt}")
            if ctx.attempt == 1:
                raise ConnectionError
            return "done"

        @app.task
        async def ask(ctx: ff.Context, name: str) -> str:
            await ctx.waitpoint(name)
            answers = ("yes", "approved")
            return (await ctx.wait_for(name, answers, timeout="1h")).name

        @app.task
        async def impatient(ctx: ff.Context) -> str:
            answer = await ctx.wait_for("never", timeout="50ms", on_timeout="default")
            return "late" if answer is None else answer.name

        @app.task(timeout="100ms")
        async def slow() -> None:
            await asyncio.sleep(3600)

        @app.task
        async def stuck(ctx: ff.Context) -> None:
            await ctx.stream("started")
            await asyncio.sleep(3600)

        @app.task(capabilities=["gpu"])
        async def render() -> str:
            return "rendered"

        @app.task(quota="calls", budgets=["team"])
        async def spend(ctx: ff.Context) -> str:
            async with ctx.reserve("team", tokens=4):
                await ctx.usage("team", tokens=6)
            return "spent"

        self.render, self.spend = render, spend
        self.flaky, self.ask, self.impatient = flaky, ask, impatient
        self.slow, self.stuck = slow, stuck


async def reached(run: ff.Run[Any], state: str) -> None:
    while (await run.state()).value != state:  # noqa: ASYNC110 - no event for it
        await asyncio.sleep(0.02)


async def claim_by_hand(
    execution_id: ExecutionId, worker: ValkeyBackend, operator: ValkeyBackend
) -> None:
    """Grants and waitpoints of a worker; an operator revokes the lease and rotates the secret."""
    grant = await worker.claims.issue_claim_grant(execution_id, **WORKER)
    held = (await worker.claims.claim_execution(grant, **WORKER, lease_ttl_ms=60_000)).handle
    made = await worker.waitpoints.create_waitpoint(held, "unused", 60_000)
    assert await worker.waitpoints.close_waitpoint(execution_id, made.waitpoint_id, handle=held)
    made = await worker.waitpoints.create_waitpoint(held, "stale", 60_000)
    assert await operator.waitpoints.close_waitpoint(execution_id, made.waitpoint_id)
    assert isinstance(await operator.leases.revoke_lease(execution_id), Revoked)
    outcome = await worker.claims.issue_reclaim_grant(execution_id, **WORKER)
    assert isinstance(outcome, Granted)
    again = await worker.claims.reclaim_execution(outcome.grant, **WORKER, lease_ttl_ms=60_000)
    assert isinstance(again, Claim)
    await worker.executions.complete(again.handle)
    summary = await operator.secrets.rotate_waitpoint_hmac_secret_all("next", "cd" * 32)
    assert summary.rotated == len(summary.entries)


async def test_the_users_can_do_their_work(deployment: Deployment) -> None:
    submit = Application(deployment.url("ff-submit"))
    worker = Application(deployment.url("ff-worker"))
    operator = Application(deployment.url("ff-operator"))
    async with submit.app, worker.app, operator.app, worker.app.worker(**SERVES):
        retried = await submit.flaky.options(
            delay="50ms", idempotency_key="once", tags={"app.a": "b"}, priority=3
        ).submit()
        output = [bytes(frame.payload) async for frame in retried.stream()]
        assert (len(output), await retried.result(timeout=30)) == (2, "done")
        rendered = await submit.app.submit(submit.render)
        assert await rendered.result(timeout=30) == "rendered"
        many = await submit.app.submit_many(submit.flaky, [[], []])
        assert [await run.result(timeout=30) for run in many] == ["done", "done"]
        asked = [await submit.app.submit(submit.ask, name) for name in ("a", "b", "c")]
        for run in asked:
            await reached(run, "suspended")
        assert await deployment.refusals() <= OPTIONAL
        for refused in (asked[0].signal("a", "yes"), asked[0].approve("a")):
            with pytest.raises(TransportError) as caught:
                await refused
            assert caught.value.kind == "auth"
        await deployment.admin("ACL", "LOG", "RESET")
        await worker.app.get_run(str(asked[0].id)).signal("a", "yes")
        await worker.app.get_run(str(asked[2].id)).signal("c", "perhaps")
        await operator.app.get_run(str(asked[1].id)).approve("b", by="ada")
        assert await asked[0].result(timeout=30) == "yes"
        assert await asked[1].result(timeout=30) == "approved"
        stuck = await submit.app.submit(submit.stuck)
        await anext(aiter(stuck.stream()))
        later = await submit.flaky.options(delay="1h").submit()
        for run in (asked[2], stuck, later):
            await run.cancel("enough")
            assert (await run.wait(timeout=30)).state.value == "cancelled"
        await (await submit.app.client()).replay(stuck.id, "once more")
        await reached(stuck, "active")
        await stuck.cancel()
        late = await submit.app.submit(submit.impatient)
        assert await late.result(timeout=30) == "late"
        slow = await submit.app.submit(submit.slow)
        await reached(slow, "expired")
        assert (await retried.info()).total_attempt_count == 2
        by_hand = (await submit.flaky.options(lane="by-hand").submit()).id
    async with await deployment.backend("ff-worker") as backend:
        supervisor = ScannerSupervisor(backend, ScannerSettings(events_retention_ms=1))
        for name in supervisor.status():
            assert (await supervisor.scan_once(name)).errors == 0
        await backend.listings.list_executions(limit=100)
        async with await deployment.backend("ff-operator") as operated:
            await claim_by_hand(by_hand, backend, operated)
    assert await deployment.refusals() <= OPTIONAL


async def test_the_users_can_work_within_limits(deployment: Deployment) -> None:
    submit = Application(deployment.url("ff-submit"))
    worker = Application(deployment.url("ff-worker"))
    async with ff.Fabric(deployment.url("ff-operator")) as operator:
        client = await operator.client()
        await client.create_quota("calls", 5, max_concurrent=1)
        await client.create_budget("team", {"tokens": 10})
    async with submit.app, worker.app, worker.app.worker(**SERVES):
        first = await submit.app.submit(submit.spend)
        assert await first.result(timeout=30) == "spent"
        second = await submit.app.submit(submit.spend)
        assert (await second.explain()).limits.budgets
    async with await deployment.backend("ff-worker") as backend:
        supervisor = ScannerSupervisor(backend, ScannerSettings())
        for name in supervisor.status():
            assert (await supervisor.scan_once(name)).errors == 0
    assert await deployment.refusals() <= OPTIONAL


async def test_the_operator_can_run_the_server(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_FLOW_PARTITIONS", "16")
    config = ServerConfig(listen=("127.0.0.1", 0), has_hmac_secret=True)
    location = ServerLocation(deployment.url("ff-operator"))
    server = await ServerProcess.start(config, location)
    try:
        http = Http(server.address)
        body = {"namespace": "default", "execution_kind": "resize"}
        sent = [await http.post("/v1/executions", body, idempotency_key="a") for _ in range(2)]
        assert [answer.status for answer in sent] == [201, 201]
        assert sent[1].headers["idempotency-replayed"] == "true"
        claim = {"worker_instance_id": "w-1", "tasks": ["resize"]}
        answer = await http.post("/v1/remote/claim?wait_ms=10000", claim)
        (claimed,) = answer.json["claims"]
        done = {"items": [{"handle": claimed["handle"], "result_b64": "e30="}]}
        assert (await http.post("/v1/remote/complete", done)).json["results"][0]["status"] == 200
        for path in ("/readyz", "/metrics", "/v1/admin/scanners", "/v1/admin/waitpoint-kids"):
            assert (await http.get(path)).status == 200, path
        secret = {"new_kid": "k2", "new_secret_hex": "cd" * 32}
        rotated = await http.post("/v1/admin/rotate-waitpoint-secret", secret)
        assert (rotated.status, rotated.json["failed"]) == (200, [])
    finally:
        await server.stop()
    assert await deployment.refusals() <= OPTIONAL


async def test_the_users_can_do_no_more(deployment: Deployment) -> None:
    worker, submit = await deployment.backend("ff-worker"), await deployment.backend("ff-submit")
    before = await deployment.admin("DBSIZE")
    async with worker, submit:
        refused = {
            worker: [
                ("HSET", SECRET, "current_kid", "mine"),
                ("HSET", "ff:config:partitions", "flow", "1"),
                ("SET", "other", "1"),
            ],
            submit: [
                ("HGETALL", SECRET),
                ("SET", "ff:leader:{scanners}", "me"),
                ("HSET", "ff:signal:x", "a", "b"),
            ],
        }
        for backend, commands in refused.items():
            for command in [
                *commands,
                ("FUNCTION", "LIST"),
                ("FUNCTION", "FLUSH"),
                ("SCRIPT", "FLUSH"),
                ("CONFIG", "GET", "dir"),
                ("KEYS", "*"),
                ("FLUSHALL",),
                ("ACL", "LIST"),
            ]:
                key = next((word for word in command if ":" in word), "{fp:0}")
                with pytest.raises(TransportError) as caught:
                    await backend.transport.call(*command, key=key)
                assert caught.value.kind == "auth", command
        with pytest.raises(EngineError):
            await worker.secrets.rotate_waitpoint_hmac_secret(0, "mine", "cd" * 32, 0)
    assert await deployment.admin("DBSIZE") == before


def called() -> dict[str, set[str]]:
    """The commands that the package sends, from Python and from Lua."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.lua"):
        for name in re.findall(r"'([A-Z]+)'", path.read_text()):
            found.setdefault(name, set()).add(path.name)
    for path in SOURCE.rglob("*.py"):
        if "bench" in path.parts or path == SOURCE / "engine" / "valkey" / "testing.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in [node.value, *re.findall(r"call\('([A-Z]+)'", node.value)]:
                    found.setdefault(name, set()).add(path.name)
    return found


async def test_the_users_have_the_commands_that_are_called(deployment: Deployment) -> None:
    (listed, *_) = await deployment.admin("COMMAND", "LIST")
    known = {bytes(name).decode().upper() for name in listed}
    needed = {name: where for name, where in called().items() if name in known - NOT_CALLED}
    granted = {name.partition("|")[0] for name in allowed("ff-operator")}
    missing = {name: where for name, where in needed.items() if name not in granted}
    assert missing == {}, f"add them to the users in {PAGE.name}"
    assert granted - needed.keys() == set(), f"remove them from the users in {PAGE.name}"
    assert {name for name in granted if name in SUBCOMMANDS} == {
        name.partition("|")[0] for name in allowed("ff-operator") if "|" in name
    }
    only = {"CLIENT|LIST", "CONFIG|GET", "FUNCTION|LOAD"}
    assert allowed("ff-operator") - allowed("ff-worker") == only
    assert allowed("ff-submit") < allowed("ff-worker")
