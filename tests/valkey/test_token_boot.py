"""Seeding at boot: from the environment, or minted once for an embedded Valkey."""

from __future__ import annotations

import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.suspension import Suspended
from flowfabric.core.errors import ConfigError, EngineError, ValidationError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.secrets import SECRET_VARIABLE
from flowfabric.engine.connect import ServerLocation
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.boot import prepare
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connect import connect
from flowfabric.valkey.embedded_folder import folder_secret
from tests.support.engine import Engine, untouched
from tests.support.server import TestServer

SECRET = "0f" * 32
OTHER = "1e" * 32
NEWER = """#!lua name=flowfabric
server.register_function('ff_version', function() return { 9999, 'other', 9999 } end)
"""


async def secret_of(engine: Engine, partition: int = 0) -> str | None:
    store = keys.secrets(f"{{fp:{partition}}}")
    raw: Any = await engine.backend.transport.call("HGET", store, "secret:k1")
    return None if raw is None else raw.decode()


def actions(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of the steps of a boot since the last call (09 §10)."""
    found = [str(vars(record).get("action")) for record in caplog.records]
    caplog.clear()
    return [each for each in found if each.split("_")[0] in ("version", "counts", "secret")]


async def calls(engine: Engine, function: str) -> int:
    """How often a function was called so far."""
    stats: Any = await engine.backend.transport.call("INFO", "commandstats")
    text = stats.decode() if isinstance(stats, bytes) else str(stats)
    line = next((one for one in text.splitlines() if one.startswith(function)), "calls=0,")
    return int(line.partition("calls=")[2].partition(",")[0])


async def test_a_configured_secret_is_seeded_everywhere(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric.engine")
    steps = ["version_accepted", "counts_validated"]
    await engine.backend.meta.prepare()
    assert await secret_of(engine) is None, "nothing is configured: nothing is sent"
    assert actions(caplog) == steps
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.upper())
    await engine.backend.meta.prepare()
    for partition in (0, 100, 255):
        assert await secret_of(engine, partition) == SECRET
    assert actions(caplog) == [*steps, "secret_installed"]
    async with untouched(engine):
        await engine.backend.meta.prepare()
    assert actions(caplog) == steps
    assert SECRET not in caplog.text.lower()


async def test_another_configured_secret_is_warned_about(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    monkeypatch.setenv(SECRET_VARIABLE, OTHER)
    with caplog.at_level(logging.WARNING):
        await engine.backend.meta.prepare()
    assert await secret_of(engine) == SECRET
    assert [r.__dict__["action"] for r in caplog.records] == ["secret_mismatch"]


@pytest.mark.parametrize("bad", ["ab", "x" * 64, "abc" * 21])
async def test_a_bad_setting_stops_the_boot(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, bad)
    async with untouched(engine):
        with pytest.raises(ConfigError, match=SECRET_VARIABLE) as caught:
            await engine.backend.meta.prepare()
    assert bad not in str(caught.value).replace(SECRET_VARIABLE, "")


async def test_minting_is_asked_for_once(engine: Engine) -> None:
    asked: list[int] = []

    def mint() -> str:
        asked.append(1)
        return SECRET

    transport = engine.backend.transport
    for _ in range(3):
        await prepare(transport, PartitionCounts(), mint_secret=mint)
    assert len(asked) == 1
    assert await secret_of(engine, 200) == SECRET
    before = await calls(engine, "cmdstat_fcall:")
    await prepare(transport, PartitionCounts(), mint_secret=mint)
    # The library's version and the lanes; the key store is looked at without it.
    assert await calls(engine, "cmdstat_fcall:") - before <= 2


@pytest.mark.parametrize("bad", ["ab", "x" * 64])
async def test_a_minted_secret_is_checked_before_anything_is_written(
    valkey: TestServer, bad: str
) -> None:
    client = await connect(parse_url(valkey.url))
    try:
        await client.call("FLUSHALL")
        await client.call("FUNCTION", "FLUSH")
        with pytest.raises(ValidationError, match="invalid_secret_hex"):
            await prepare(client, PartitionCounts(), mint_secret=lambda: bad)
        assert await client.call("KEYS", "*") == []
        assert await client.call("FUNCTION", "LIST") == []
    finally:
        await client.aclose()


async def test_lanes_come_last(valkey: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the library or the secret is refused for, no worker finds a lane to work on."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    client = await connect(parse_url(valkey.url))
    try:
        await client.call("FLUSHALL")
        await client.call("FUNCTION", "LOAD", "REPLACE", NEWER)
        with pytest.raises(EngineError) as caught:
            await prepare(client, PartitionCounts())
        assert caught.value.code == "library_version_conflict"
        assert await client.call("KEYS", "*") == [keys.CONFIG_PARTITIONS.encode()]
        await client.call("FUNCTION", "FLUSH")
        await client.call("SET", keys.secrets("{fp:0}"), "no hash")
        with pytest.raises(EngineError):
            await prepare(client, PartitionCounts())
        assert await client.call("EXISTS", keys.LANES) == 0
    finally:
        await client.call("FUNCTION", "FLUSH")
        await client.aclose()


async def test_the_environment_comes_before_minting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, OTHER)
    await prepare(
        engine.backend.transport,
        PartitionCounts(),
        mint_secret=lambda: pytest.fail("must not be asked"),
    )
    assert await secret_of(engine) == OTHER


# --- the file -----------------------------------------------------------------------------------


def test_the_folder_keeps_its_secret(tmp_path: Path) -> None:
    first = folder_secret(tmp_path)
    assert len(bytes.fromhex(first)) == 32
    assert folder_secret(tmp_path) == first
    (file,) = tmp_path.iterdir()
    assert file.name == "waitpoint_secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert folder_secret(other) != first


def test_processes_that_mint_at_the_same_time_get_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        minted = set(pool.map(folder_secret, [tmp_path] * 64))
    assert len(minted) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["waitpoint_secret"]


@pytest.mark.parametrize("content", ["", "c0ffee", "zz" * 32, "ü"])
def test_a_damaged_file_is_named_not_shown(tmp_path: Path, content: str) -> None:
    (tmp_path / "waitpoint_secret").write_text(content)
    with pytest.raises(ConfigError, match="waitpoint_secret") as caught:
        folder_secret(tmp_path)
    assert not content or content not in str(caught.value)


async def test_an_embedded_deployment_signs_from_its_first_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("FF_URL", raising=False)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    secrets: list[str] = []
    for _ in range(2):
        place = ServerLocation()
        backend = await place.open()
        try:
            secrets.append((tmp_path / "data" / "waitpoint_secret").read_text())
            execution_id = ExecutionId.solo("default", backend.counts)
            await backend.executions.create_execution(
                NewExecution(execution_id=execution_id, execution_kind="job", lane_id="default")
            )
            want = ClaimRequest("default", "w", "w-1", capabilities="", lease_ttl_ms=30_000)
            claimed = await backend.claims.claim_many(want, execution_id.tag, 10)
            (claim,) = [c for c in claimed.claims if c.execution_id == execution_id]
            parked = await backend.suspensions.suspend(claim.handle, condition=Single("k"))
            assert isinstance(parked, Suspended)
            kids = await backend.secrets.list_waitpoint_hmac_kids(255)
            assert kids.current_kid == "k1"
        finally:
            await backend.aclose()
            place.close()
    assert secrets[0] == secrets[1]
