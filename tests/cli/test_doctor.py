"""`flowfabric doctor`: each finding in its good and its bad form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from flowfabric.engine.api.meta import Grade
from flowfabric.engine.connect import ServerLocation
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.embedded_checks import check_secret_file
from flowfabric.engine.valkey.health import scripting_finding
from flowfabric.engine.valkey.library import LIBRARY_VERSION, read_library
from flowfabric.scanners import ScannerFilter, ScannerSettings
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connect import connect
from tests.support.command import Cli, Done
from tests.support.engine import Engine
from tests.support.scanning import running
from tests.support.sdk import until
from tests.support.server import TestServer, free_port
from tests.support.suspension import SECRET

CHECKS = (
    *(
        "connection",
        "version",
        "functions",
        "scripting",
        "access",
        "eviction",
        "persistence",
        "memory",
        "writes",
    ),
    *("clock", "clock skew"),
    *("partitions", "tokens", "lanes", "lane placement", "workers", "servers", "scanners"),
    *("flows", "indexes"),
)


async def examined(cli: Cli, *arguments: str, **variables: str) -> tuple[Done, dict[str, Any]]:
    """The findings by name."""
    done = await cli("doctor", "--json", *arguments, **variables)
    (report,) = done.objects
    assert done.code == (0 if report["ok"] else 1)
    return done, {check["name"]: check for check in report["checks"]}


async def live(engine: Engine, *lanes: str) -> None:
    """A worker and a scanner leader, as the registry shows them."""
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=lanes or ["default"]
    )
    assert await engine.backend.leadership.acquire("", "host:12:uuid", 60_000)


async def test_all_is_well(cli: Cli, engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    await live(engine)
    await engine.create()
    done, found = await examined(cli)
    assert tuple(found) == CHECKS
    assert {check["grade"] for check in found.values()} == {"ok"}
    assert not any("advice" in check for check in found.values())
    (report,) = done.objects
    assert report["ok"] is True
    assert report["address"].startswith("unix:/")
    plain = await cli("doctor")
    assert (plain.code, plain.err) == (0, "")
    assert plain.out.count("✓") == len(CHECKS)
    assert "All checks passed." in plain.lines[-1]
    assert "run by host:12 (host:pid)" in plain.out
    assert "1 execution examined" in plain.out


async def test_no_live_worker(cli: Cli, engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    done, found = await examined(cli)
    assert done.code == 0
    assert found["workers"]["grade"] == found["scanners"]["grade"] == "warning"
    assert "flowfabric worker" in found["workers"]["advice"]
    plain = await cli("doctor")
    assert plain.out.count("⚠") == 2
    assert "No check failed, 2 warnings." in plain.lines[-1]
    await live(engine, "other")
    await engine.create(lane="mails")
    _, found = await examined(cli)
    assert "no worker serves mails, where work waits" in found["workers"]["detail"]
    _, found = await examined(cli, "--namespace", "elsewhere")
    assert "0 live workers" in found["workers"]["detail"]


async def test_server_processes_are_counted(cli: Cli, engine: Engine, valkey: TestServer) -> None:
    _, found = await examined(cli)
    assert found["servers"]["detail"] == "no server process: the REST API is not served"
    async with aclosing(await ServerLocation(valkey.url).open_server()):
        # More connections of the same process do not count.
        async with aclosing(await ServerLocation(valkey.url).open_server()):
            _, found = await examined(cli)
            assert found["servers"]["detail"].startswith("one server process: ")
            assert found["servers"]["detail"].endswith(f":{os.getpid()} (host:pid)")
        async with aclosing(await connect(parse_url(valkey.url), name="flowfabric-server:b:7")):
            _, found = await examined(cli)
            assert found["servers"]["detail"].startswith("2 server processes: ")


async def test_scanners_of_a_part(cli: Cli, engine: Engine) -> None:
    """A filter, or scanners left out, is another lease than the usual one."""
    settings = ScannerSettings(
        filter=ScannerFilter(namespace="acme"), disabled=frozenset({"doorbell"})
    )
    async with running(engine.backend, settings) as supervisor:
        process = supervisor.leadership.identity.rpartition(":")[0]

        async def listed() -> bool:
            return bool(await engine.backend.leadership.leaders())

        await until(listed)
        _, found = await examined(cli)
        assert found["scanners"]["grade"] == "ok"
        assert found["scanners"]["detail"] == f"run by {process} in part (host:pid)"
    _, found = await examined(cli)
    assert found["scanners"]["grade"] == "warning"


@pytest.mark.corrupts
async def test_registries_with_malformed_names(cli: Cli, engine: Engine) -> None:
    await engine.create()
    call = engine.backend.transport.call
    await call("SADD", keys.LANES, b"bad\x01lane", b"\xff")
    await call("SADD", keys.PARTITIONS, "zz")
    done, found = await examined(cli)
    assert done.code == 1
    assert found["lanes"]["grade"] == found["partitions"]["grade"] == "broken"
    assert found["lanes"]["detail"] == "ff:idx:lanes holds 2 malformed names"
    assert found["partitions"]["detail"] == "ff:idx:partitions holds 1 malformed name"
    assert "SREM" in found["lanes"]["advice"]
    assert found["indexes"]["grade"] == "ok", "the rest is examined all the same"


@pytest.mark.corrupts
async def test_a_malformed_member_is_shown_as_it_is(cli: Cli, engine: Engine) -> None:
    execution_id = await engine.create()
    key = keys.index(execution_id.tag, "all_executions")
    await engine.backend.transport.call("ZADD", key, 0, b"\xff")
    _, found = await examined(cli)
    assert found["indexes"]["grade"] == "broken"
    assert "1 differ from their index, such as \\xff" in found["indexes"]["detail"]


async def test_a_paused_lane(cli: Cli, engine: Engine) -> None:
    await engine.backend.lanes.set_lane_state("mails", "paused", "maintenance")
    _, found = await examined(cli)
    assert found["lanes"]["grade"] == "warning"
    assert "mails is paused (maintenance)" in found["lanes"]["detail"]


async def test_lanes_that_share_a_partition(cli: Cli, engine: Engine) -> None:
    home = engine.new_id().partition
    twin = next(name for n in range(10_000) if engine.new_id(name := f"lane-{n}").partition == home)
    await engine.backend.transport.call("SADD", keys.LANES, twin)
    _, found = await examined(cli)
    assert found["lane placement"]["grade"] == "warning"
    assert (
        f"remediate: 2 of 2 pinned lanes share one (default + {twin})"
        in (found["lane placement"]["detail"])
    )
    await engine.backend.lanes.set_lane_config(twin, placement="spread")
    _, found = await examined(cli)
    assert found["lane placement"]["grade"] == "ok"


@pytest.mark.corrupts
async def test_index_drift_is_broken(cli: Cli, engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    await live(engine)
    execution_id = await engine.create()
    await engine.backend.transport.call(
        "ZREM", keys.eligible(execution_id.tag, "default"), execution_id
    )
    done, found = await examined(cli)
    assert done.code == 1
    assert found["indexes"]["grade"] == "broken"
    assert execution_id in found["indexes"]["detail"]
    plain = await cli("doctor")
    assert plain.code == 1
    assert plain.out.count("✗") == 1
    assert "1 check failed." in plain.lines[-1]


async def test_counts_that_contradict_the_environment(cli: Cli) -> None:
    done, found = await examined(cli, FF_FLOW_PARTITIONS="128")
    assert done.code == 1
    assert found["partitions"]["grade"] == "broken"
    assert "the environment sets 128, 32, 32" in found["partitions"]["detail"]
    same, found = await examined(cli, FF_FLOW_PARTITIONS="256")
    assert same.code == 0
    assert found["partitions"]["detail"] == "256 flow, 32 budget, 32 quota"


async def test_without_a_secret_handlers_cannot_wait(cli: Cli, engine: Engine) -> None:
    _, found = await examined(cli)
    assert found["tokens"]["grade"] == "warning"
    assert found["tokens"]["detail"].startswith("no secret to sign tokens on the server:")
    assert "FF_WAITPOINT_HMAC_SECRET" in found["tokens"]["advice"]
    await engine.backend.secrets.seed_at_boot(SECRET)
    await engine.backend.transport.call("DEL", "ff:sec:{fp:7}:waitpoint_hmac")
    _, found = await examined(cli)
    assert found["tokens"]["detail"].startswith("no secret to sign tokens on 1 partition:")
    assert SECRET not in str(found)


async def test_a_missing_library_is_a_warning(cli: Cli, engine: Engine) -> None:
    await engine.backend.transport.call("FUNCTION", "FLUSH", key="")
    try:
        _, found = await examined(cli)
        assert found["functions"]["grade"] == "warning"
        assert found["functions"]["detail"] == "the function library is not loaded"
    finally:
        await engine.backend.meta.prepare()


@pytest.fixture
def fresh() -> Iterator[TestServer]:
    """A server of its own that deletes data when memory is short and writes no log."""
    server = TestServer("--maxmemory-policy", "allkeys-lru")
    yield server
    server.stop()


async def test_prepare_sets_an_external_server_up(tmp_path: Path, fresh: TestServer) -> None:
    cli = Cli(tmp_path, FF_URL=fresh.url)
    done, found = await examined(cli)
    assert done.code == 1
    assert found["partitions"]["grade"] == "broken"
    assert found["partitions"]["advice"] == "run `flowfabric doctor --prepare` once"
    assert found["eviction"]["grade"] == "broken"
    assert found["persistence"]["grade"] == "warning"
    assert "noeviction" in found["eviction"]["advice"]
    secret = {"FF_WAITPOINT_HMAC_SECRET": SECRET}
    prepared, found = await examined(cli, "--prepare", FF_FLOW_PARTITIONS="64", **secret)
    # What preparing warns of is told once, as a finding.
    assert prepared.err == ""
    assert found["tokens"]["detail"] == "signed with k1"
    assert found["prepare"]["grade"] == found["functions"]["grade"] == "ok"
    assert found["partitions"]["detail"].startswith("64 flow")
    refused, found = await examined(cli, "--prepare")
    assert refused.code == 1
    assert "num_flow_partitions: stored=64, config=256" in found["deployment"]["detail"]
    assert (await cli("ps")).out == "No executions yet.\n"


async def test_a_full_server_that_is_a_replica(tmp_path: Path, fresh: TestServer) -> None:
    cli = Cli(tmp_path, FF_URL=fresh.url)
    await examined(cli, "--prepare")
    transport = await connect(parse_url(fresh.url))
    await transport.call("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1")
    await transport.call("REPLICAOF", "127.0.0.1", free_port())
    await transport.aclose()
    done, found = await examined(cli)
    assert done.code == 1
    assert "the server refuses new work" in found["memory"]["detail"]
    assert found["writes"]["advice"].startswith("connect to the primary, 127.0.0.1:")
    # Whatever needs no writing is examined all the same.
    assert found["indexes"]["grade"] == "ok"


async def test_an_unreachable_server(tmp_path: Path) -> None:
    cli = Cli(tmp_path, FF_URL=f"valkey://app:hidden@127.0.0.1:{free_port()}")
    done, found = await examined(cli)
    assert done.code == 1
    assert list(found) == ["connection"]
    assert "Connection refused" in found["connection"]["detail"]
    assert "hidden" not in done.out
    assert done.objects[0]["address"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("version", "hole", "fixed"),
    [
        ((8, 0, 0), "CVE-2024-31449", "8.0.9"),
        ((8, 0, 1), "CVE-2024-46981", "8.0.9"),
        ((8, 0, 5), "CVE-2025-49844", "8.0.9"),
        ((8, 1, 3), "CVE-2025-46818", "8.1.7"),
        ((8, 1, 5), "CVE-2025-67733", "8.1.7"),
        ((9, 0, 3), "CVE-2026-23631", "9.0.4"),
    ],
)
def test_known_holes_of_the_scripting_engine(
    version: tuple[int, int, int], hole: str, fixed: str
) -> None:
    finding = scripting_finding(version)
    assert finding.grade is Grade.WARNING
    assert hole in finding.detail
    assert finding.advice == f"upgrade to Valkey {fixed} or newer"


@pytest.mark.parametrize("version", [(8, 0, 9), (8, 1, 7), (9, 0, 4), (9, 1, 0), (10, 0, 0)])
def test_fixed_servers(version: tuple[int, int, int]) -> None:
    finding = scripting_finding(version)
    assert finding.grade is Grade.OK
    assert finding.detail.startswith("this version of FlowFabric knows of no vulnerability in ")


async def test_who_can_reach_the_server(tmp_path: Path) -> None:
    """192.0.2.1 belongs to no machine: the server is configured for it and cannot use it."""
    port = free_port()
    server = TestServer("--maxmemory-policy", "noeviction", port=port)
    cli = Cli(tmp_path, FF_URL=server.url)
    try:
        transport = await connect(parse_url(server.url))
        try:
            _, found = await examined(cli)
            assert found["access"]["grade"] == "warning"
            assert f"TCP port {port} needs no password: every user" in found["access"]["detail"]
            assert "requirepass" in found["access"]["advice"]
            await transport.call("CONFIG", "SET", "bind", "127.0.0.1 -192.0.2.1")
            _, found = await examined(cli)
            assert "anyone on the network" in found["access"]["detail"]
            await transport.call("CONFIG", "SET", "requirepass", "hidden")
            known = Cli(tmp_path, FF_URL=server.url, FF_PASSWORD="hidden")
            _, found = await examined(known)
            assert found["access"]["grade"] == "warning"
            assert "there is no ACL" in found["access"]["detail"]
            assert "ACL user per role" in found["access"]["advice"]
            await transport.call("CONFIG", "SET", "bind", "127.0.0.1")
            _, found = await examined(known)
            assert found["access"]["grade"] == "ok"
            await transport.call("ACL", "SETUSER", "worker", "on", ">w", "~*", "&*", "+@all")
            await transport.call("ACL", "SETUSER", "default", "off")
            own = Cli(tmp_path, FF_URL=server.url, FF_USERNAME="worker", FF_PASSWORD="w")
            _, found = await examined(own)
            assert found["access"]["detail"] == "the default user is disabled"
        finally:
            await transport.aclose()
    finally:
        server.stop()


def test_a_secret_that_others_can_read(tmp_path: Path) -> None:
    file = tmp_path / "waitpoint_secret"
    assert check_secret_file(tmp_path) == []
    file.touch(mode=0o600)
    (finding,) = check_secret_file(tmp_path)
    assert finding.grade is Grade.OK
    file.chmod(0o640)
    (finding,) = check_secret_file(tmp_path)
    assert finding.grade is Grade.WARNING
    assert "mode 0640" in finding.detail
    assert f"chmod 600 {file}" in finding.advice


async def test_other_functions_than_ours(cli: Cli, engine: Engine) -> None:
    """A newer library that does not serve us, and one of our version with other content."""
    call = engine.backend.transport.call
    try:
        await call("FUNCTION", "LOAD", "REPLACE", saying(LIBRARY_VERSION + 1, LIBRARY_VERSION + 1))
        _, found = await examined(cli)
        assert found["functions"]["grade"] == "broken"
        looked = await cli("ps", "--json")
        assert (looked.code, looked.error["code"]) == (1, "library_version_conflict")
        await call("FUNCTION", "LOAD", "REPLACE", saying(LIBRARY_VERSION, 1))
        _, found = await examined(cli)
        assert "FF_FORCE_LUA_RELOAD" in found["functions"]["advice"]
        _, found = await examined(cli, FF_FORCE_LUA_RELOAD="1")
        assert found["functions"]["grade"] == "warning"
        stored = await read_library(engine.backend.transport)
        assert stored is not None
        assert stored.content_hash == "other", "doctor loads nothing"
    finally:
        # The next call loads the real one again.
        await call("FUNCTION", "FLUSH")


async def test_functions_for_tests_are_refused_in_production(cli: Cli) -> None:
    """The movable clock of the tests, in a process that does not know it."""
    assert (await cli("ps", "--json")).code == 0
    _, found = await examined(cli, PYTHONPATH="")
    assert found["functions"]["grade"] == "broken"
    assert "functions for tests that move its clock" in found["functions"]["detail"]
    looked = await cli("ps", "--json", PYTHONPATH="")
    assert (looked.code, looked.error["code"]) == (1, "library_version_conflict")


async def test_another_length_of_the_feeds(cli: Cli) -> None:
    _, found = await examined(cli, FF_EVENTS_MAXLEN="500")
    assert found["functions"]["grade"] == "warning"
    assert "other content or settings" in found["functions"]["detail"]
    assert "--prepare" in found["functions"]["advice"]
    try:
        assert (await cli("doctor", "--prepare", FF_EVENTS_MAXLEN="500")).code == 0
        _, found = await examined(cli, FF_EVENTS_MAXLEN="500")
        assert found["functions"]["grade"] == "ok"
    finally:
        assert (await cli("doctor", "--prepare", FF_EVENTS_MAXLEN="10000")).code == 0


def saying(version: int, min_client: int) -> str:
    """A library that says this of itself, and nothing else."""
    return (
        "#!lua name=flowfabric\n"
        "server.register_function{function_name='ff_version', flags={'no-writes'}, "
        f"callback=function() return {{{version}, 'other', {min_client}}} end}}"
    )
