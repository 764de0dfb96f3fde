from __future__ import annotations

import pytest

from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from flowfabric.scanners import ScannerFilter
from flowfabric.scanners.base import ScanResult
from tests.support.engine import Engine
from tests.support.scanning import break_record, create_delayed, idle

ACME = ScannerFilter(namespace="acme")
CELL = ScannerFilter(instance_tag=("cell", "eu"))


async def test_only_the_namespace(engine: Engine) -> None:
    due = await engine.now() + 60_000
    ours = await engine.create(namespace="acme", delay_until=due)
    theirs = await engine.create(delay_until=due)
    await engine.advance(60_010)
    found = await idle(engine, accept=ACME).scan_once("delayed_promoter")
    assert found == ScanResult(processed=1)
    assert await engine.backend.reads.read_execution_state(ours) is PublicState.WAITING
    assert await engine.backend.reads.read_execution_state(theirs) is PublicState.DELAYED


async def test_the_default_namespace_is_one_too(engine: Engine) -> None:
    ours, theirs = await engine.create(), await engine.create(namespace="acme")
    accept = ScannerFilter(namespace="default")
    assert await accept.accepted(engine.backend, [ours, theirs]) == [ours]


async def test_only_the_tag_byte_for_byte(engine: Engine) -> None:
    ours = await engine.create(tags={"cell": "eu"})
    others = [await engine.create(tags={"cell": "EU"}), await engine.create()]
    assert await CELL.accepted(engine.backend, [ours, *others]) == [ours]


async def test_both_parts_must_match(engine: Engine) -> None:
    accept = ScannerFilter(namespace="acme", instance_tag=("cell", "eu"))
    ours = await engine.create(namespace="acme", tags={"cell": "eu"})
    others = [
        await engine.create(namespace="acme"),
        await engine.create(tags={"cell": "eu"}),
    ]
    assert await accept.accepted(engine.backend, [*others, ours]) == [ours]


@pytest.mark.corrupts
@pytest.mark.parametrize("accept", [ACME, CELL])
async def test_what_cannot_be_read_is_not_touched(engine: Engine, accept: ScannerFilter) -> None:
    broken = await engine.create(namespace="acme", tags={"cell": "eu"})
    await break_record(engine, broken)
    await engine.backend.transport.call("DEL", keys.tags(broken.tag, broken))
    await engine.backend.transport.call("SET", keys.tags(broken.tag, broken), "garbage")
    ids = [broken, engine.new_id(), "not an id", "{fp:9999}:" + broken.uuid]
    assert await accept.accepted(engine.backend, ids) == []


async def test_an_empty_filter_reads_nothing(engine: Engine) -> None:
    assert await ScannerFilter().accepted(engine.backend, ["anything"]) == ["anything"]


async def test_foreign_work_at_the_head_never_hides_ours(engine: Engine) -> None:
    theirs = await create_delayed(engine, 60)
    ours = await engine.create(namespace="acme", delay_until=await engine.now() + 2000)
    await engine.advance(2001)
    found = await idle(engine, accept=ACME).scan_once("delayed_promoter")
    assert found == ScanResult(processed=1)
    assert await engine.backend.reads.read_execution_state(ours) is PublicState.WAITING
    assert await engine.backend.reads.read_execution_state(theirs[0]) is PublicState.DELAYED


async def test_index_repair_and_retention_apply_it(engine: Engine) -> None:
    theirs = await engine.create()
    await engine.backend.executions.cancel_execution(theirs)
    drifted = await engine.create()
    await engine.backend.transport.call("DEL", keys.eligible(drifted.tag, "default"))
    await engine.advance(86_400_001)
    supervisor = idle(engine, accept=ACME)
    for name in ("index_reconciler", "index_reconciler", "retention_trimmer"):
        assert await supervisor.scan_once(name) == ScanResult()
    await engine.backend.upkeep.reconcile_execution_index(drifted.tag, [drifted])
