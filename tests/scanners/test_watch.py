"""What an idle deployment costs, and that saving commands hides no work."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric.engine.backend import Backend
from flowfabric.scanners.delayed_promoter import DelayedPromoter
from flowfabric.scanners.lease_expiry import LeaseExpiry
from flowfabric.scanners.territory import Territory
from flowfabric.scanners.watch import DueWatch
from tests.scanners.support import DEFAULTS, create_delayed, running, until
from tests.support.engine import Engine

WINDOW_S = 3.0


async def _commands(backend: Backend) -> int:
    info: Any = await backend.transport.call("INFO", "stats")
    text = info.decode() if isinstance(info, bytes) else str(info)
    return int(text.partition("total_commands_processed:")[2].split()[0])


async def _rate(engine: Engine) -> float:
    async with running(engine.backend, DEFAULTS) as supervisor:
        await until(lambda: all(s.cycles > 1 for s in supervisor.status().values() if _often(s)))
        before = await _commands(engine.backend)
        await asyncio.sleep(WINDOW_S)
        return (await _commands(engine.backend) - before - 1) / WINDOW_S


def _often(status: Any) -> bool:
    return status.interval_s < 5


async def test_idle_with_nothing_armed(engine: Engine) -> None:
    await engine.backend.complete(await engine.running())
    assert await _rate(engine) <= 4.0


async def test_idle_with_something_armed_far_ahead(engine: Engine) -> None:
    await create_delayed(engine, 3, in_ms=3_600_000)
    assert await _rate(engine) <= 6.0, "4.2 on average; a short window holds a few more"


async def _watch(engine: Engine) -> tuple[DueWatch, Territory]:
    scanners = [LeaseExpiry(), DelayedPromoter()]
    watch = DueWatch(engine.backend, {s.name: s.indexes for s in scanners}, 60.0)
    territory = Territory((engine.new_id().tag,), ("default",))
    for scanner in scanners:
        indexes = list(scanner.indexes(territory.lanes))
        watch.learn(
            indexes, territory.tags, await engine.backend.scan_due(indexes, territory.tags, 50)
        )
    return watch, territory


async def test_unknown_indexes_must_be_scanned(engine: Engine) -> None:
    watch = DueWatch(engine.backend, {"lease_expiry": LeaseExpiry().indexes}, 60.0)
    assert not await watch.quiet("lease_expiry", Territory(("{fp:0}",), ("default",)))


async def test_one_look_covers_every_scanner(engine: Engine) -> None:
    watch, territory = await _watch(engine)
    before = await _commands(engine.backend)
    assert await watch.quiet("delayed_promoter", territory)
    assert await _commands(engine.backend) - before == 2, "one EXISTS, and INFO itself"
    assert watch.covered_at("lease_expiry") > 0


async def test_an_index_that_appears_is_scanned(engine: Engine) -> None:
    watch, territory = await _watch(engine)
    assert await watch.quiet("lease_expiry", territory)
    held = await engine.running()
    assert not await watch.quiet("delayed_promoter", territory)
    assert not await watch.quiet("lease_expiry", territory)
    await engine.backend.complete(held)


async def test_an_earlier_entry_of_another_process_is_seen(engine: Engine) -> None:
    await create_delayed(engine, 1, in_ms=3_600_000)
    watch, territory = await _watch(engine)
    assert await watch.quiet("delayed_promoter", territory)
    due = watch.next_due("delayed_promoter")
    assert due is not None
    assert due > asyncio.get_running_loop().time() + 3000
    (soon,) = await create_delayed(engine, 1, in_ms=30)

    async def due_now() -> bool:
        return not await watch.quiet("delayed_promoter", territory)

    await until(due_now, timeout=2)
    assert await engine.backend.promote_delayed(soon.tag, "default", [soon]) == ["promoted"]


async def test_a_clock_not_heard_of_for_long_is_not_trusted(engine: Engine) -> None:
    await create_delayed(engine, 1, in_ms=3_600_000)
    watch, territory = await _watch(engine)
    assert await watch.quiet("delayed_promoter", territory)
    watch._trust_s = 0
    assert not await watch.quiet("delayed_promoter", territory)
    assert await watch.quiet("lease_expiry", territory), "nothing armed needs no clock"
