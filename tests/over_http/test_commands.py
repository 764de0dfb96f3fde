"""Every command against a server: the same output as against Valkey, and the same effect."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest

from flowfabric.cli.main import COMMANDS
from flowfabric.core.conditions import Single
from flowfabric.core.contracts.streams import Frame
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.command import Cli, Done
from tests.support.engine import Engine
from tests.support.flows import submitted
from tests.support.http_engine import serving
from tests.support.server import TestServer
from tests.support.suspension import Waits

ELSEWHERE = {"worker", "server", "dev", "admin", "config", "tokens"}
"""Commands that run or configure a process. The tests of workers cover `worker`."""


class Commands:
    """The command at both addresses of one deployment."""

    def __init__(self, engine: Engine, at_valkey: Cli, at_server: Cli) -> None:
        self.engine = engine
        self._at_valkey = at_valkey
        self._at_server = at_server

    async def run(self, *arguments: str, **variables: str) -> Done:
        """Run a command against the server; it must succeed."""
        done = await self._at_server(*arguments, **variables)
        assert (done.code, "error" in done.err) == (0, False), (arguments, done)
        return done

    async def same(self, *arguments: str) -> Done:
        """Run a command that reads at both addresses; what it prints must be the same."""
        done = await self.run(*arguments)
        assert done == await self._at_valkey(*arguments), arguments
        return done

    async def refused(self, *arguments: str) -> str:
        """Run a command that fails in the same way at both addresses."""
        done = await self._at_server(*arguments)
        assert done.code == 1, (arguments, done)
        assert done == await self._at_valkey(*arguments), arguments
        return done.err


@pytest.fixture
async def commands(
    backend: ValkeyBackend, valkey: TestServer, tmp_path: Path
) -> AsyncIterator[Commands]:
    """Both addresses, with the clock at rest: otherwise ages would differ."""
    engine = Engine(backend)
    await engine.freeze(await engine.now())
    async with serving(engine) as server:
        at_server = Cli(tmp_path, FF_URL="http://{}:{}".format(*server.address))
        yield Commands(engine, Cli(tmp_path, FF_URL=valkey.url), at_server)


async def test_executions(commands: Commands) -> None:
    engine = commands.engine
    done = await commands.run("submit", "resize", "cat.png", "--lane", "images", "--priority", "5")
    first = done.out.strip()
    assert (await commands.same("ps", "--json")).objects[0]["task"] == "resize"
    assert "images" in (await commands.same("ps", "--lane", "images")).out
    assert "no live worker" in (await commands.same("explain", first)).out
    assert "cat.png" in (await commands.same("show", first[:12])).out
    handle = (await engine.claim(lane="images")).handle
    await commands.run("revoke-lease", first, "--yes")
    await engine.backend.executions.cancel_execution(handle.execution_id)
    await commands.run("replay", first, "--reason", "again")
    assert (await commands.same("ps", "--state", "waiting", "--json")).objects
    await commands.run("cancel", first, "--reason", "enough")
    assert "cancelled" in (await commands.same("show", first, "--json")).out
    await commands.run("purge", "--lane", "images", "--yes")
    assert (await commands.same("ps")).out == "No executions yet.\n"
    assert "execution_not_found" in await commands.refused("show", "deadbeef")
    assert "execution_not_found" in await commands.refused("cancel", first)


async def test_results_and_output(commands: Commands) -> None:
    engine = commands.engine
    handle = await engine.running(execution_kind="draw", payload_encoding="json")
    shown = handle.execution_id.compact
    streams = engine.backend.streams
    await streams.append_frame(handle, Frame(payload=b"hello", frame_type="out"))
    await streams.append_frame(
        handle, Frame(payload=b'{"done": 1}', frame_type="out"), mode="summary"
    )
    assert (await commands.same("summary", shown)).out
    await engine.backend.executions.complete(handle, b'{"width": 80}', "json")
    assert (await commands.same("result", shown)).out == '{"width": 80}\n'
    assert "hello" in (await commands.same("tail", shown)).out


async def test_answers(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("cd" * 32)
    waits = await Waits.open(commands.engine)
    parked = await waits.park(Single("paid", "done"), prompt="Did the money arrive?")
    shown = parked.handle.execution_id.compact
    assert "Did the money arrive?" in (await commands.same("waiting")).out
    token = parked.details.waitpoint_token.reveal()
    await commands.run("signal", shown, "paid", "done", FF_WAITPOINT_TOKEN=token)
    assert "already_answered" in await commands.refused("approve", shown, "--as", "ada")
    # Claimed again, the same attempt waits for the next answer.
    handle = (await commands.engine.claim()).handle
    again = await waits.park(Single("ok", "approved"), handle=handle)
    await commands.run("approve", shown, "--as", "ada")
    handle = (await commands.engine.claim()).handle
    again = await waits.park(Single("more", "go"), handle=handle)
    await commands.run("close-waitpoint", shown, again.details.waitpoint_id, "--yes")
    assert (await commands.same("secrets", "--json")).objects
    await commands.run("rotate-secret", "k2", "--secret-file", "secret", "--yes")
    assert "k2" in (await commands.same("secrets")).out


async def test_flows(commands: Commands) -> None:
    engine = commands.engine
    flow = await submitted(engine, "a>b")
    assert flow.flow_id in (await commands.same("flows")).out
    assert (await commands.same("flow", "show", flow.flow_id[:8])).out
    await commands.run("flow", "release", flow.flow_id)
    await flow.end("a", "failed")
    await commands.run("flow", "replay", flow.flow_id)
    assert (await commands.same("flow", "show", flow.flow_id, "--json")).out
    await commands.run("flow", "cancel", flow.flow_id, "--wait")
    await commands.run("flow", "retry")
    await commands.run("flow", "delete", flow.flow_id, "--yes")
    assert "flow_not_found" in await commands.refused("flow", "show", flow.flow_id)


async def test_the_fleet(commands: Commands) -> None:
    engine = commands.engine
    await engine.create(lane="mails")
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["mails"]
    )
    assert "w-1" in (await commands.same("workers")).out
    assert (await commands.same("lanes")).lines[-1].split()[:2] == ["mails", "active"]
    assert (await commands.same("lanes", "--partitions")).out
    assert "w-1" in (await commands.run("top", "--once")).out
    await commands.run("lane", "pause", "mails", "--reason", "provider is down")
    assert "provider is down" in (await commands.same("lane", "show", "mails")).out
    await commands.run("lane", "resume", "mails")
    await commands.run("lane", "drain", "mails")
    await commands.run("lane", "disable", "mails")
    await commands.run("lane", "set", "mails", "--placement", "spread", "--shards", "4")
    assert (await engine.backend.lanes.get_lane("mails")).shards == 4
    await commands.run("drain-worker", "w-1")
    assert "lane_not_found" in await commands.refused("lane", "show", "nowhere")


async def test_limits(commands: Commands) -> None:
    await commands.run("budget", "create", "team", "tokens=100")
    assert "tokens" in (await commands.same("budgets")).out
    await commands.run("budget", "raise", "team", "tokens=200")
    assert "200" in (await commands.same("budget", "show", "team")).out
    await commands.run("budget", "reset", "team")
    await commands.run("budget", "delete", "team", "--yes")
    await commands.run("quota", "create", "api", "--max-requests", "5")
    await commands.run("quota", "update", "api", "--max-requests", "7")
    assert "7" in (await commands.same("quota", "show", "api")).out
    assert "api" in (await commands.same("quotas")).out
    for unknown in (
        *(("budget", "show"), ("budget", "reset"), ("quota", "show")),
        *(("budget", "raise", "tokens=5"), ("quota", "update", "--max-requests=5")),
    ):
        said = await commands.refused(*unknown[:2], "nope", *unknown[2:])
        assert "nope" in said, unknown


async def test_the_doctor(commands: Commands) -> None:
    checks = (await commands.run("doctor", "--json")).objects[0]["checks"]
    named = {check["name"]: check["grade"] for check in checks}
    assert len(named) == len(checks)
    assert named["server"] == named["API token"] == named["ready"] == named["release"] == "ok"
    # What the server found out about its own deployment.
    assert {"connection", "functions", "partitions"} <= named.keys()


def _exercised() -> Iterator[tuple[str, ...]]:
    """The commands that the tests of this module run against the server."""
    for node in ast.walk(ast.parse(Path(__file__).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            yield tuple(map(str, words))


def test_every_command_is_exercised() -> None:
    ran = set(_exercised())
    for name, (module, _) in COMMANDS.items():
        found: Any = getattr(
            import_module(f"flowfabric.cli.commands.{module}"), name.replace("-", "_")
        )
        if name in ELSEWHERE:
            continue
        if isinstance(found, Mapping):
            for part in cast("Mapping[str, Any]", found):
                assert (name, part) in ran
        else:
            assert any(words[:1] == (name,) for words in ran), name
