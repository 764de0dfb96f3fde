"""What the functions of subscription groups guard: one reader per feed, no step back (12 §11.3)."""

from __future__ import annotations

from typing import cast

from flowfabric.engine.valkey.feeds import ValkeyFeeds
from flowfabric.engine.valkey.places import ValkeyPlaces
from tests.support.engine import Engine

TTL = 30_000


def feeds(engine: Engine) -> ValkeyFeeds:
    return ValkeyFeeds(engine.backend.calls, cast("ValkeyPlaces", engine.backend.places))


async def test_a_feed_has_one_reader_until_its_lease_ends(engine: Engine) -> None:
    lease = feeds(engine).lease_feed
    assert await lease("fp:1", "g", "a", TTL, None) == (True, None)
    assert await lease("fp:1", "g", "b", TTL, None) == (False, None)
    assert await lease("fp:1", "other", "b", TTL, None) == (True, None)
    await engine.advance(TTL + 1)
    assert await lease("fp:1", "g", "b", TTL, None) == (True, None)
    assert await lease("fp:1", "g", "a", TTL, None) == (False, None)


async def test_only_its_reader_returns_a_feed(engine: Engine) -> None:
    lease = feeds(engine).lease_feed
    await lease("fp:1", "g", "a", TTL, None)
    await lease("fp:1", "g", "b", 0, None)
    assert await lease("fp:1", "g", "b", TTL, None) == (False, None)
    await lease("fp:1", "g", "a", 0, None)
    assert await lease("fp:1", "g", "b", TTL, None) == (True, None)


async def test_a_position_never_moves_back(engine: Engine) -> None:
    lease = feeds(engine).lease_feed
    assert await lease("fp:1", "g", "a", TTL, (5, 3)) == (True, (5, 3))
    for older in ((5, 2), (4, 9), None):
        assert await lease("fp:1", "g", "a", TTL, older) == (True, (5, 3))
    # A late acknowledgement by a former reader counts: it has processed these events.
    assert await lease("fp:1", "g", "b", 0, (6, 0)) == (False, (6, 0))


async def test_members_that_stay_away_leave_the_group(engine: Engine) -> None:
    join = feeds(engine).join_group
    assert await join("g", "b", TTL, "first") == ("first", ["b"])
    await engine.advance(TTL - 5_000)
    assert await join("g", "a", TTL, "second") == ("first", ["a", "b"])
    await engine.advance(5_001)
    assert await join("g", "a", TTL, "third") == ("first", ["a"])
    assert await join("g", "a", 0, "") == ("first", [])
