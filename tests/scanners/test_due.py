"""The loop that all due-index scanners share."""

from __future__ import annotations

import logging

import pytest

from flowfabric.core.state import PublicState
from flowfabric.scanners.base import ScanResult
from tests.support.engine import Engine
from tests.support.scanning import break_record, create_delayed, idle, members, plant

DELAYED = "lane:default:delayed"


async def test_more_than_a_page_in_one_cycle(engine: Engine) -> None:
    ids = await create_delayed(engine, 120)
    await engine.advance(1001)
    assert await idle(engine).scan_once("delayed_promoter") == ScanResult(processed=120)
    assert await members(engine, ids[0].tag, DELAYED) == []


@pytest.mark.corrupts
async def test_entries_stuck_at_the_head_never_hide_later_ones(engine: Engine) -> None:
    ids = await create_delayed(engine, 180)
    await engine.advance(1001)
    # Due in the index, not by their records: more than a page of them, all before the others.
    later = await create_delayed(engine, 60, in_ms=60_000)
    for stuck in later:
        await plant(engine, stuck.tag, DELAYED, stuck)
    assert await idle(engine).scan_once("delayed_promoter") == ScanResult(processed=180)
    assert await members(engine, ids[0].tag, DELAYED) == later


@pytest.mark.corrupts
async def test_a_poison_item_never_stops_a_sweep(engine: Engine) -> None:
    ids = await create_delayed(engine, 70)
    for poison in (ids[0], ids[30], ids[69]):
        await break_record(engine, poison)
    await engine.advance(1001)
    supervisor = idle(engine)
    assert await supervisor.scan_once("delayed_promoter") == ScanResult(processed=67, errors=3)
    for healthy in (ids[1], ids[29], ids[31], ids[68]):
        assert await engine.backend.reads.read_execution_state(healthy) is PublicState.WAITING
    eligible = await members(engine, ids[0].tag, "lane:default:eligible")
    assert len(eligible) == 67, "no neighbour was lost half way"


@pytest.mark.corrupts
@pytest.mark.parametrize(
    ("scanner", "index"),
    [
        ("lease_expiry", "lease_expiry"),
        ("attempt_timeout", "attempt_timeout"),
        ("execution_deadline", "execution_deadline"),
        ("retention_trimmer", "lane:default:terminal"),
    ],
)
async def test_a_poison_item_of_each_index(engine: Engine, scanner: str, index: str) -> None:
    poison, ghost = await engine.create(), engine.new_id()
    await break_record(engine, poison)
    await plant(engine, poison.tag, index, poison, 1)
    await plant(engine, poison.tag, index, ghost, 2)
    assert await idle(engine).scan_once(scanner) == ScanResult(processed=1, errors=1)
    assert await members(engine, poison.tag, index) == [poison]


@pytest.mark.corrupts
async def test_a_poison_item_rests_after_three_failures(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    (poison,) = await create_delayed(engine, 1)
    await break_record(engine, poison)
    await engine.advance(1001)
    supervisor = idle(engine)
    with caplog.at_level(logging.WARNING):
        errors = [(await supervisor.scan_once("delayed_promoter")).errors for _ in range(14)]
    assert errors == [1, 1, 1, *[0] * 10, 1]
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().startswith("scanner delayed_promoter: persistent failure")
    assert record.__dict__["scanner"] == "delayed_promoter"
    assert record.__dict__["item"] == poison
    assert record.__dict__["failures"] == 3
    assert record.__dict__["backoff_cycles"] == 10


async def test_an_idle_cycle_logs_nothing(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    await create_delayed(engine, 1, in_ms=60_000)
    supervisor = idle(engine)
    with caplog.at_level(logging.INFO):
        for name in supervisor.status():
            await supervisor.scan_once(name)
    assert caplog.records == []


async def test_a_busy_cycle_logs_what_it_did(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await create_delayed(engine, 2)
    await engine.advance(1001)
    with caplog.at_level(logging.INFO):
        await idle(engine).scan_once("delayed_promoter")
    (record,) = caplog.records
    fields = record.__dict__
    assert (fields["action"], fields["scanner"]) == ("scanner_cycle", "delayed_promoter")
    assert (fields["processed"], fields["errors"]) == (2, 0)
    assert fields["elapsed_ms"] >= 0
