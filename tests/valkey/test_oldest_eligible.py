"""What the search for the longest-waiting execution of a lane costs, and what damage hides."""

from __future__ import annotations

import pytest

from flowfabric.engine.valkey import keys
from tests.support.engine import LANE, Engine

MINUTE = 60_000


async def age(engine: Engine) -> int:
    """The age that the engine reports, in whole minutes: the clock runs on."""
    return (await engine.backend.listings.oldest_eligible([LANE]))[LANE] // MINUTE


async def test_a_search_ends_after_its_share(engine: Engine) -> None:
    """Thousands that became claimable together cost a bounded number of reads."""
    for _ in range(3):
        delayed = [await engine.create(delay_ms=MINUTE) for _ in range(150)]
        await engine.advance(MINUTE)
        await engine.backend.upkeep.promote_delayed(delayed[0].tag, LANE, delayed)
    before = await _record_reads(engine)
    assert await age(engine) == 2
    assert await _record_reads(engine) - before <= 256


@pytest.mark.corrupts
async def test_damage_hides_only_itself(engine: Engine) -> None:
    broken = await engine.create()
    await engine.advance(1000)
    await engine.create()
    await engine.advance(MINUTE)
    call = engine.backend.transport.call
    await call("SET", keys.core(broken.tag, broken), "damaged")
    assert await age(engine) == 1
    await call("SET", keys.lane(broken.tag, LANE, "eligible"), "damaged")
    assert await age(engine) == 0


async def _record_reads(engine: Engine) -> int:
    info = await engine.backend.transport.call("INFO", "commandstats")
    text = info.decode() if isinstance(info, bytes) else str(info)
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    stats = lines.get("cmdstat_hmget", "calls=0,")
    return int(stats.partition("calls=")[2].partition(",")[0])
