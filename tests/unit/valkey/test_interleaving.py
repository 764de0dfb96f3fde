"""Many callers, random cancellation, deadlines and cuts: each reply belongs to its request."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.transport import Transport
from tests.support.proxy import FaultProxy
from tests.unit.valkey.conftest import Keeper

SEED = int(os.environ.get("FF_TEST_SEED", random.SystemRandom().randrange(2**32)))


@pytest.mark.parametrize("max_in_flight", [1, 7, 4096])
async def test_every_reply_matches_its_request(
    keep: Keeper, proxy: FaultProxy, client: Transport, max_in_flight: int
) -> None:
    print("FF_TEST_SEED =", SEED)  # noqa: T201 - shown when the test fails
    dice = random.Random(SEED)
    far = keep(Transport(parse_url(proxy.url), max_in_flight=max_in_flight))
    await far.wait_ready()
    outcomes = {"answered": 0, "cancelled": 0, "failed": 0}

    async def caller(name: int) -> None:
        for turn in range(60):
            text = f"{name}:{turn}:".encode() + b"x" * dice.choice((0, 10, 5000))
            timeout = dice.choice((None, None, None, 0.001))
            call = asyncio.ensure_future(far.call("ECHO", text, timeout=timeout))
            if dice.random() < 0.3:
                for _ in range(dice.randrange(4)):
                    await asyncio.sleep(0)
                call.cancel()
            try:
                assert await call == text
                outcomes["answered"] += 1
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1
            except TransportError:
                outcomes["failed"] += 1

    async def chaos() -> None:
        for _ in range(6):
            await asyncio.sleep(dice.random() * 0.02)
            dice.choice((proxy.cut, proxy.drop_next_reply, proxy.drop_next_request))()

    await asyncio.gather(chaos(), *(caller(name) for name in range(40)))
    assert sum(outcomes.values()) == 2400
    assert outcomes["answered"] > 100
    assert outcomes["cancelled"] > 100
    # Nothing is left behind: the connection is in step and empty.
    assert await far.call("ECHO", "in step", replay_safe=True, timeout=30) == b"in step"
    assert far._link.conn is not None
    assert far._link.conn.in_flight == 0
