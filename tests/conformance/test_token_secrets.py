"""Signing secrets: seeding, rotation, grace, collection, listing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowfabric.core.contracts.suspension import (
    AlreadySeeded,
    HmacKid,
    HmacKids,
    Seeded,
    SeedOutcome,
    Suspended,
)
from flowfabric.core.errors import EngineError
from flowfabric.core.partition import PartitionCounts
from tests.support.engine import Engine, refused, untouched
from tests.support.leases import running
from tests.support.suspension import SECRET, Waits

ALL = PartitionCounts().flow
OTHER = "cd" * 32
THIRD = "ef" * 32


@pytest.mark.parametrize("size", [16, 32, 33])
async def test_a_secret_of_zeros_is_refused(engine: Engine, size: int) -> None:
    zeros, backend = "00" * size, engine.backend
    async with untouched(engine):
        for call in (
            backend.secrets.seed_at_boot(zeros),
            backend.secrets.rotate_waitpoint_hmac_secret(0, "k2", zeros),
            backend.secrets.rotate_waitpoint_hmac_secret_all("k2", zeros),
        ):
            await refused(call, "invalid_secret_hex")
        await refused(backend.secrets.seed_waitpoint_hmac_secret("k2", zeros), "invalid_input")
    await backend.secrets.seed_at_boot(f"{zeros[:-1]}1")


async def test_a_configured_secret_never_replaces_the_stored_one(engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    async with untouched(engine):
        assert await engine.backend.secrets.seed_at_boot(OTHER) == SeedOutcome(mismatch=ALL)


async def test_the_stored_secret_wins(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    with caplog.at_level(logging.WARNING):
        async with untouched(engine):
            outcome = await engine.backend.secrets.seed_at_boot(OTHER)
    assert outcome == SeedOutcome(mismatch=ALL)
    assert [r.__dict__["action"] for r in caplog.records] == ["secret_mismatch"], "one warning"
    assert SECRET not in caplog.text
    assert OTHER not in caplog.text


@pytest.mark.parametrize("bad", ["", "abc", "zz" * 32, "ab" * 15, "ab" * 16 + "a", " " + "ab" * 32])
async def test_a_secret_that_is_none(engine: Engine, bad: str) -> None:
    async with untouched(engine):
        problem = await refused(engine.backend.secrets.seed_at_boot(bad), "invalid_secret_hex")
    assert not bad or bad not in str(problem)


async def test_seeding_by_an_embedder(engine: Engine) -> None:
    seed: Any = engine.backend.secrets.seed_waitpoint_hmac_secret
    async with untouched(engine):
        for kid, secret in (
            ("k", "ab" * 31),
            ("k", "ab" * 33),
            ("k", "zz" * 32),
            ("", SECRET),
            ("a:b", SECRET),
            ("x" * 65, SECRET),
        ):
            await refused(seed(kid, secret), "invalid_input")
    assert await seed("app-1", SECRET) == Seeded("app-1")
    async with untouched(engine):
        assert await seed("app-1", SECRET.upper()) == AlreadySeeded("app-1", same_secret=True)
        assert await seed("app-1", OTHER) == AlreadySeeded("app-1", same_secret=False)
        await refused(seed("app-2", SECRET), "invalid_input")


async def test_seeding_looks_at_every_partition(engine: Engine) -> None:
    backend = engine.backend
    await backend.secrets.rotate_waitpoint_hmac_secret(9, "app-2", OTHER)
    await refused(backend.secrets.seed_waitpoint_hmac_secret("app-1", SECRET), "invalid_input")
    assert (await backend.secrets.list_waitpoint_hmac_kids(10)).current_kid == "app-1", (
        "installs stay"
    )
    assert (await backend.secrets.list_waitpoint_hmac_kids(9)).current_kid == "app-2"


# --- rotation -----------------------------------------------------------------------------------


async def test_bad_rotations(engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    rotate: Any = engine.backend.secrets.rotate_waitpoint_hmac_secret
    everywhere: Any = engine.backend.secrets.rotate_waitpoint_hmac_secret_all
    async with untouched(engine):
        for kid in ("", "a:b", "ü", "a b", "x" * 65, "a\n"):
            await refused(rotate(0, kid, "short", -1), "invalid_kid")
            await refused(everywhere(kid, "short", -1), "invalid_kid")
        for secret in ("", "abc", "zz" * 32, "ab" * 15):
            await refused(rotate(0, "k2", secret, -1), "invalid_secret_hex")
            await refused(everywhere("k2", secret, -1), "invalid_secret_hex")
        for grace in (-1, 2**53, True, 1.5, "1"):
            await refused(rotate(0, "k2", OTHER, grace), "invalid_grace_ms")
            await refused(everywhere("k2", OTHER, grace), "invalid_grace_ms")
        for partition in (-1, ALL):
            await refused(rotate(partition, "k2", OTHER), "invalid_input")
            await refused(
                engine.backend.secrets.list_waitpoint_hmac_kids(partition), "invalid_input"
            )


async def test_the_longest_grace_saturates(engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    await engine.backend.secrets.rotate_waitpoint_hmac_secret(0, "k2", OTHER, 2**53 - 1)
    kids = await engine.backend.secrets.list_waitpoint_hmac_kids()
    assert kids == HmacKids("k2", (HmacKid("k1", 2**53 - 1),))


async def test_every_past_kid_verifies_until_its_own_end(engine: Engine) -> None:
    """A, then B, then C: a token of A is good until A's grace ends, not until the next rotation."""
    waits = await Waits.open(engine)
    backend = engine.backend
    parked: list[Suspended] = []
    now = await engine.now()
    await engine.freeze(now)
    parked.append(await waits.park(handle=await running(engine)))
    await backend.secrets.rotate_waitpoint_hmac_secret_all("B", OTHER, 10_000)
    parked.append(await waits.park(handle=await running(engine)))
    await engine.freeze(now + 1000)
    await backend.secrets.rotate_waitpoint_hmac_secret_all("C", THIRD, 3_000)
    parked.append(await waits.park(handle=await running(engine)))
    partition = parked[0].handle.execution_id.partition
    assert [p.details.waitpoint_token.kid for p in parked] == ["k1", "B", "C"]
    kids = await backend.secrets.list_waitpoint_hmac_kids(partition)
    assert kids == HmacKids("C", (HmacKid("B", now + 4000), HmacKid("k1", now + 10_000)))

    async def answers() -> list[str]:
        codes: list[str] = []
        for one in parked:
            try:
                await waits.send(one, "noise")
                codes.append("ok")
            except EngineError as error:
                codes.append(error.code)
        return codes

    await engine.freeze(now + 4000)
    assert await answers() == ["ok", "ok", "ok"], "at its end a kid is still good"
    await engine.freeze(now + 4001)
    assert await answers() == ["ok", "token_expired", "ok"]
    await engine.freeze(now + 10_000)
    assert await answers() == ["ok", "token_expired", "ok"]
    assert (await backend.secrets.list_waitpoint_hmac_kids(partition)).verifying == (
        HmacKid("k1", now + 10_000),
    )
    await engine.freeze(now + 10_001)
    assert await answers() == ["token_expired", "token_expired", "ok"]
    done = await backend.secrets.rotate_waitpoint_hmac_secret(partition, "D", SECRET, 0)
    assert done.gc_count == 2
    assert await answers() == ["invalid_token", "invalid_token", "ok"], "collected, so unknown"
    await engine.freeze(now + 10_002)
    assert await answers() == ["invalid_token", "invalid_token", "token_expired"]


async def test_an_expired_kid_may_come_back_with_another_secret(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    partition = parked.handle.execution_id.partition
    rotate = engine.backend.secrets.rotate_waitpoint_hmac_secret
    await rotate(partition, "k2", OTHER, 0)
    await engine.advance(10)
    assert (await rotate(partition, "k1", THIRD, 0)).status == "rotated"
    await refused(waits.send(parked), "invalid_token")


async def test_partitions_may_differ_and_each_is_consistent(engine: Engine) -> None:
    waits = await Waits.open(engine)
    old = await waits.park(handle=await running(engine))
    await engine.backend.secrets.rotate_waitpoint_hmac_secret(
        old.handle.execution_id.partition, "k2", OTHER, 60_000
    )
    new = await waits.park(handle=await running(engine))
    elsewhere = await waits.park(handle=await running(engine, lane="other"))
    kids = [p.details.waitpoint_token.kid for p in (old, new, elsewhere)]
    assert kids == ["k1", "k2", "k1"]
    for parked in (old, new, elsewhere):
        await waits.send(parked)
