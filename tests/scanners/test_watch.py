"""What an idle deployment costs, and that saving commands hides no work."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric.engine.valkey import keys
from flowfabric.scanners import ScannerSettings
from flowfabric.scanners.jobs import due_scanners
from flowfabric.scanners.settings import INTERVALS_S
from flowfabric.scanners.watch import DueWatch, Territory
from tests.support.engine import Engine
from tests.support.scanning import DEFAULTS, create_delayed, running
from tests.support.sdk import until
from tests.support.storage import commands

HASTE = 5
# Everything as by default, only faster, so that few seconds show many cycles.
HASTY = ScannerSettings(
    intervals_s={name: seconds / HASTE for name, seconds in INTERVALS_S.items()},
    territory_refresh_s=DEFAULTS.territory_refresh_s / HASTE,
    clock_trust_s=DEFAULTS.clock_trust_s / HASTE,
    leader_ttl_s=DEFAULTS.leader_ttl_s / HASTE,
)
CYCLES = 24
# Every scanner may have one look more than its share of the time, and so may the refreshes of the
# territory, the clock and the leader.
BURST = len(INTERVALS_S) + 3


async def _stays_below(engine: Engine, rate: float) -> None:
    """Count commands while scanners run. A slow machine has them run longer, not more often."""
    loop = asyncio.get_running_loop()
    async with running(engine.backend, HASTY) as supervisor:

        def looks() -> int:
            return supervisor.status()["delayed_promoter"].cycles

        await until(lambda: all(s.cycles > 1 for s in supervisor.status().values() if _often(s)))
        before, started, first = await commands(engine.backend), loop.time(), looks()
        await until(lambda: looks() >= first + CYCLES)
        used = await commands(engine.backend) - before - 1
        assert used <= rate * HASTE * (loop.time() - started) + BURST


def _often(status: Any) -> bool:
    return status.interval_s < 5 / HASTE


async def test_idle_with_nothing_armed(engine: Engine) -> None:
    await engine.backend.executions.complete(await engine.running())
    await _stays_below(engine, 3.3)


async def test_idle_with_something_armed_far_ahead(engine: Engine) -> None:
    await create_delayed(engine, 3, in_ms=3_600_000)
    await _stays_below(engine, 4.5)


async def _watch(engine: Engine) -> tuple[DueWatch, Territory]:
    scanners = due_scanners(engine.backend)[:2]
    assert [scanner.name for scanner in scanners] == ["lease_expiry", "delayed_promoter"]
    watch = DueWatch(engine.backend, {s.name: s.indexes for s in scanners}, 60.0)
    territory = {engine.new_id().tag: frozenset({"default"})}
    for scanner in scanners:
        indexes = scanner.indexes(territory)
        watch.learn(indexes, await engine.backend.upkeep.scan_due(indexes, 50))
    return watch, territory


async def test_unknown_indexes_must_be_scanned(engine: Engine) -> None:
    leases = due_scanners(engine.backend)[0]
    watch = DueWatch(engine.backend, {"lease_expiry": leases.indexes}, 60.0)
    assert await watch.idle_since("lease_expiry", {"{fp:0}": frozenset({"default"})}) is None


async def test_one_look_covers_every_scanner(engine: Engine) -> None:
    watch, territory = await _watch(engine)
    before = await commands(engine.backend)
    seen = await watch.idle_since("delayed_promoter", territory, 0.0)
    assert seen is not None
    assert await watch.idle_since("lease_expiry", territory, seen - 1) == seen
    assert await commands(engine.backend) - before == 2, "one EXISTS, and INFO itself"
    assert await watch.idle_since("lease_expiry", territory, seen) != seen, "not a new look"


async def test_an_index_that_appears_is_scanned(engine: Engine) -> None:
    watch, territory = await _watch(engine)
    assert await watch.idle_since("lease_expiry", territory) is not None
    held = await engine.running()
    assert await watch.idle_since("delayed_promoter", territory) is None
    assert await watch.idle_since("lease_expiry", territory) is None
    await engine.backend.executions.complete(held)


async def test_an_earlier_entry_of_another_process_is_seen(engine: Engine) -> None:
    await create_delayed(engine, 1, in_ms=3_600_000)
    watch, territory = await _watch(engine)
    assert await watch.idle_since("delayed_promoter", territory) is not None
    due = watch.next_due("delayed_promoter")
    assert due is not None
    assert due > asyncio.get_running_loop().time() + 3000
    (soon,) = await create_delayed(engine, 1, in_ms=30)

    async def due_now() -> bool:
        return await watch.idle_since("delayed_promoter", territory) is None

    await until(due_now, timeout=2)
    assert await engine.backend.upkeep.promote_delayed(soon.tag, "default", [soon]) == ["promoted"]


async def test_a_clock_that_was_not_read_for_long_is_not_trusted(engine: Engine) -> None:
    await create_delayed(engine, 1, in_ms=3_600_000)
    watch, territory = await _watch(engine)
    assert await watch.idle_since("delayed_promoter", territory) is not None
    watch._clock_trust_s = 0
    assert await watch.idle_since("delayed_promoter", territory) is None
    assert await watch.idle_since("lease_expiry", territory) is not None, (
        "nothing armed needs no clock"
    )


async def test_an_unreadable_index_concerns_its_own_scanner_only(engine: Engine) -> None:
    key = keys.index(engine.new_id().tag, "lease_expiry")
    await engine.backend.transport.call("SET", key, "garbage")
    watch, territory = await _watch(engine)
    for _ in range(2):
        assert await watch.idle_since("lease_expiry", territory) is None, (
            "the scan counts the error"
        )
        assert await watch.idle_since("delayed_promoter", territory) is not None
    await engine.backend.transport.call("DEL", key)


async def test_many_lanes_take_turns_in_one_command(engine: Engine) -> None:
    """However many indexes there are, a look needs one command more than its own indexes do."""
    scanners = {each.name: each for each in due_scanners(engine.backend)}
    watch = DueWatch(engine.backend, {name: s.indexes for name, s in scanners.items()}, 60.0)
    lanes = frozenset(f"lane-{number}" for number in range(30))
    territory: Territory = {f"{{fp:{number}}}": lanes for number in range(60)}
    for scanner in scanners.values():
        watch.learn_absent(scanner.indexes(territory))
    before = await commands(engine.backend)
    seen = await watch.idle_since("lease_expiry", territory)
    assert seen is not None
    assert await commands(engine.backend) == before + 2
    # Others were asked for in the same command, as far as they had room.
    others = {name for name in scanners if name != "lease_expiry"}
    asked = {name for name in others if await watch.idle_since(name, territory, seen - 1) == seen}
    assert asked
    delayed = await engine.create(lane="lane-1", delay_until=await engine.now() + 60_000)
    territory = {**territory, delayed.tag: lanes}
    watch.learn_absent(scanners["delayed_promoter"].indexes(territory))
    assert await watch.idle_since("delayed_promoter", territory) is None
