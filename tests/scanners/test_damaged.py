"""Damaged indexes and registries: what is malformed goes or is left out, and hides nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowfabric.core.ids import new_uuid
from flowfabric.core.state import OwnershipState, PublicState
from flowfabric.engine.api.upkeep import Index
from flowfabric.engine.valkey import keys
from flowfabric.scanners import ScannerFilter
from flowfabric.scanners.base import ScanResult
from flowfabric.scanners.settings import INTERVALS_S
from tests.support.engine import TTL, Engine
from tests.support.executions import Case
from tests.support.scanning import DEFAULTS, create_delayed, idle, rings, running
from tests.support.sdk import until

INDEXES = {
    "lease_expiry": "lease_expiry",
    "delayed_promoter": "lane:default:delayed",
    "attempt_timeout": "attempt_timeout",
    "execution_deadline": "execution_deadline",
    "suspension_timeout": "suspension_timeout",
    "pending_wp_expiry": "pending_waitpoint_expiry",
    "retention_trimmer": "lane:default:terminal",
}
MALFORMED = [
    *(b"", b"\xff\xfe", b"not-an-id", b"caf\xc3\xa9", b"{fp:86}:\xff"),
    b"{fp:9}:11111111-2222-4333-8444-555555555555",
    b"{fp:86}:AAAAAAAA-2222-4333-8444-555555555555",
]


async def stored(engine: Engine, key: str) -> list[bytes]:
    found: Any = await engine.backend.transport.call("ZRANGE", key, 0, -1)
    return found


def told(caplog: pytest.LogCaptureFixture, action: str) -> list[dict[str, Any]]:
    return [r.__dict__ for r in caplog.records if r.__dict__.get("action") == action]


@pytest.mark.parametrize("bad", MALFORMED)
@pytest.mark.parametrize("scanner", INDEXES)
async def test_a_malformed_member_is_removed_and_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture, scanner: str, bad: bytes
) -> None:
    tag = (await engine.create()).tag
    ghost = new_uuid() if scanner == "pending_wp_expiry" else engine.new_id()
    key = keys.index(tag, INDEXES[scanner])
    await engine.backend.transport.call("ZADD", key, 1, bad, 2, ghost)
    assert await idle(engine).scan_once(scanner) == ScanResult(processed=2)
    assert await stored(engine, key) == []
    (record,) = told(caplog, "member_malformed")
    assert (record["scanner"], record["partition"]) == (scanner, tag)
    assert record["item"] == bad.decode(errors="backslashreplace")
    assert record["message"].isprintable()


@pytest.mark.corrupts
async def test_a_filter_leaves_what_it_cannot_read(engine: Engine) -> None:
    mine = await engine.create(namespace="acme", delay_until=await engine.now() + 60_000)
    await engine.advance(60_010)
    supervisor = idle(engine, accept=ScannerFilter(namespace="acme"))
    for scanner, name in INDEXES.items():
        key = keys.index(mine.tag, name)
        await engine.backend.transport.call("ZADD", key, 1, b"\xff", 2, new_uuid())
        expected = ScanResult(processed=1 if scanner == "delayed_promoter" else 0)
        assert await supervisor.scan_once(scanner) == expected
        assert len(await stored(engine, key)) == 2
    await engine.backend.transport.call("ZADD", keys.index(mine.tag, "all_executions"), 0, b"\xff")
    for _ in range(2):
        assert await supervisor.scan_once("index_reconciler") == ScanResult()


async def test_running_scanners_do_not_stumble(engine: Engine) -> None:
    held = await engine.running()
    await engine.backend.transport.call(
        "ZADD", keys.index(held.execution_id.tag, "lease_expiry"), 1, b"\xff"
    )
    await engine.advance(TTL)

    async def expired() -> bool:
        vector = await engine.vector(held.execution_id)
        return vector.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE

    async with running(engine.backend) as supervisor:
        await until(expired)
        assert supervisor.status()["lease_expiry"].restarts == 0


# --- indexes that cannot be read -----------------------------------------------------------------


async def garble(engine: Engine, key: str) -> None:
    await engine.backend.transport.call("DEL", key)
    await engine.backend.transport.call("SET", key, "garbage")


@pytest.mark.corrupts
@pytest.mark.parametrize("scanner", INDEXES)
async def test_an_unreadable_index_is_one_error_and_the_scan_continues(
    engine: Engine, caplog: pytest.LogCaptureFixture, scanner: str
) -> None:
    bad, good = await engine.create(), await engine.create(lane="other")
    name = INDEXES[scanner]
    ghost = new_uuid() if scanner == "pending_wp_expiry" else engine.new_id("other")
    await garble(engine, keys.index(bad.tag, name))
    key = keys.index(good.tag, name.replace("default", "other"))
    await engine.backend.transport.call("ZADD", key, 1, ghost)
    assert await idle(engine).scan_once(scanner) == ScanResult(processed=1, errors=1)
    assert await stored(engine, key) == []
    (record,) = told(caplog, "scanner_failure")
    assert (record["scanner"], record["partition"], record["index"]) == (scanner, bad.tag, name)
    assert "WRONGTYPE" in record["error"]


@pytest.mark.corrupts
async def test_an_index_that_becomes_unreadable_while_something_is_armed(engine: Engine) -> None:
    """The cheap look asks for the earliest entry only, and must not fail for all."""
    due = await engine.now() + 1000
    bad = await engine.create(delay_until=due + 3_600_000)
    good = await engine.create(lane="other", delay_until=due)
    promoter = idle(engine, DEFAULTS)._runners["delayed_promoter"]
    assert await promoter.cycle() == ScanResult()
    assert await promoter.cycle() == ScanResult(), "answered by the cheap look"
    await garble(engine, keys.lane(bad.tag, "default", "delayed"))
    await engine.advance(1001)
    for expected in (ScanResult(processed=1, errors=1), ScanResult(errors=1)):
        assert await promoter.cycle() == expected
    assert await engine.backend.reads.read_execution_state(good) is PublicState.WAITING


@pytest.mark.parametrize(("score", "due"), [("+inf", 0), ("-inf", 1), ("1e300", 0), ("0.5", 1)])
async def test_scores_that_are_no_time(engine: Engine, score: str, due: int) -> None:
    await engine.create()
    ghost = engine.new_id()
    key = keys.index(ghost.tag, "lease_expiry")
    await engine.backend.transport.call("ZADD", key, score, ghost)
    scan = await engine.backend.upkeep.scan_due([Index(ghost.tag, "lease_expiry")], 10)
    assert (len(scan.due), list(scan.armed.values())) == (due, [2**53 - 1][due:])
    runner = idle(engine)._runners["lease_expiry"]
    for _ in range(3):
        await runner.cycle()
    assert len(await stored(engine, key)) == 1 - due
    await engine.backend.transport.call("DEL", key)


DUE = {
    "delayed_promoter": ("delayed", "waiting"),
    "lease_expiry": ("active", "active"),
    "attempt_timeout": ("active", "expired"),
    "execution_deadline": ("waiting", "expired"),
    "retention_trimmer": ("completed", None),
}


@pytest.mark.parametrize("scanner", DUE)
async def test_an_index_that_runs_ahead_ends_nothing_early(engine: Engine, scanner: str) -> None:
    """The record has the last word; the reconciler puts the index right."""
    before, after = DUE[scanner]
    case = await Case.make(engine, before)
    execution_id, key = case.execution_id, keys.index(case.execution_id.tag, INDEXES[scanner])
    vector = await engine.vector(execution_id)
    right: Any = await engine.backend.transport.call("ZSCORE", key, execution_id)
    await engine.backend.transport.call("ZADD", key, 1, execution_id)
    supervisor = idle(engine)
    assert await supervisor.scan_once(scanner) == ScanResult()
    assert await engine.vector(execution_id) == vector
    for _ in range(2):
        await supervisor.scan_once("index_reconciler")
    assert await engine.backend.transport.call("ZSCORE", key, execution_id) == right
    await engine.advance(int(right) - await engine.now())
    assert (await supervisor.scan_once(scanner)).processed == 1
    if after is None:
        assert await engine.backend.reads.describe_execution(execution_id) is None
    else:
        assert await engine.backend.reads.read_execution_state(execution_id) == after


async def test_the_retention_of_another_lane(engine: Engine) -> None:
    """A stray entry must not have the execution deleted under the wrong name."""
    ended = await engine.create(lane="other", execution_id=engine.new_id())
    await engine.create()
    await engine.backend.executions.cancel_execution(ended)
    await engine.advance(86_400_001)
    stray = keys.lane(ended.tag, "default", "terminal")
    await engine.backend.transport.call("ZADD", stray, 1, ended)
    assert await engine.backend.upkeep.trim_retention(ended.tag, "default", [ended]) == [
        "not_terminal"
    ]
    assert await stored(engine, stray) == []
    assert await engine.backend.upkeep.trim_retention(ended.tag, "other", [ended]) == ["purged"]


@pytest.mark.corrupts
async def test_a_damaged_lane_silences_no_other_doorbell(engine: Engine) -> None:
    bad, good = await engine.create(), await engine.create(lane="other")
    await garble(engine, keys.lane(bad.tag, "default", "config"))
    await engine.backend.transport.call("DEL", keys.wake("default"), keys.wake("other"))
    assert await idle(engine).scan_once("doorbell") == ScanResult(errors=1)
    assert await rings(engine, "other") == [str(good.partition).encode()]


async def test_a_purge_whose_note_is_unreadable(engine: Engine) -> None:
    """What it left cannot be counted any more; the others must not wait for it."""
    await engine.create()
    gone, backlog = engine.new_id(), keys.index(engine.new_id().tag, "purge_backlog")
    await engine.backend.transport.call("HSET", backlog, "\xff", "garbage", gone, "")
    assert await idle(engine).scan_once("retention_trimmer") == ScanResult()
    assert await engine.backend.transport.call("EXISTS", backlog) == 0


# --- registries ----------------------------------------------------------------------------------

NO_LANES = [b"bad\x01lane", b"\xff", b"", b"x" * 65]
NO_PARTITIONS = [b"zz", b"-1", b"007", b"+7", b"256", b"70000", b"\xff", b"", b"9" * 5000]


@pytest.mark.corrupts
async def test_registries_with_malformed_names(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    (delayed,) = await create_delayed(engine, 1)
    call = engine.backend.transport.call
    await call("SADD", keys.LANES, *NO_LANES)
    await call("SADD", keys.PARTITIONS, *NO_PARTITIONS)
    await engine.advance(1001)
    supervisor = idle(engine)
    for scanner in INTERVALS_S:
        for _ in range(2):
            assert (await supervisor.scan_once(scanner)).errors == 0
    assert await engine.backend.reads.read_execution_state(delayed) is PublicState.WAITING
    assert await engine.backend.places.used_partitions() == [delayed.tag]
    assert await engine.backend.places.lanes_in_use() == ["default"]
    said = told(caplog, "registry_malformed")
    assert len(said) == len(NO_LANES) + len(NO_PARTITIONS), "each once"
    assert all(record["message"].isprintable() for record in said)


@pytest.mark.corrupts
@pytest.mark.parametrize("registry", [keys.PLACES, keys.PARTITIONS])
async def test_a_registry_of_the_wrong_type(
    engine: Engine, caplog: pytest.LogCaptureFixture, registry: str
) -> None:
    """Scanners go on with what they know."""
    (delayed,) = await create_delayed(engine, 1)
    supervisor = idle(engine)
    await supervisor.scan_once("lease_expiry")
    engine.backend.places.known_places.clear()
    await garble(engine, registry)
    await engine.advance(1001)
    results = [await supervisor.scan_once("delayed_promoter") for _ in range(3)]
    # Nobody could join a deployment with such a registry, the next test included.
    await engine.backend.transport.call("DEL", registry)
    assert results == [ScanResult(processed=1), ScanResult(), ScanResult()]
    assert await engine.backend.reads.read_execution_state(delayed) is PublicState.WAITING
    (record,) = told(caplog, "registry_unreadable")
    assert (registry in record["error"], record["levelno"]) == (True, logging.WARNING)
