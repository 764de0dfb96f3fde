"""Signing secrets: seeding, rotation, grace, collection, listing."""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import Any

import pytest

from flowfabric.core.contracts.suspension import (
    HmacKids,
    Seeded,
    SeedOutcome,
)
from tests.conformance.test_token_secrets import ALL, OTHER, THIRD
from tests.support.engine import Engine, refused, untouched
from tests.support.suspension import SECRET, Waits


def store(partition: int = 0) -> str:
    return f"ff:sec:{{fp:{partition}}}:waitpoint_hmac"


async def test_a_seeding_call_is_short(engine: Engine) -> None:
    """The slow log shows arguments of long calls, so no call names many partitions."""
    call = engine.backend.transport.call
    await call("CONFIG", "SET", "slowlog-log-slower-than", 0, "slowlog-max-len", 100_000)
    await call("SLOWLOG", "RESET")
    try:
        await engine.backend.secrets.seed_at_boot(SECRET)
        logged: Any = await call("SLOWLOG", "GET", -1)
    finally:
        await call("CONFIG", "SET", "slowlog-log-slower-than", 10_000, "slowlog-max-len", 128)
        await call("SLOWLOG", "RESET")
    calls = [entry[3] for entry in logged if b"ff_seed_secret" in entry[3]]
    assert len(calls) == ALL / 16
    # Longer ones end with the number of arguments that are left out.
    assert all(b"more arguments" not in arguments[-1] for arguments in calls)


# --- what is signed -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 32, 63, 64, 65, 200])
async def test_a_token_is_a_standard_hmac(engine: Engine, size: int) -> None:
    """Keys shorter than a block, as long as one, and longer ones, which are hashed first."""
    secret = bytes(range(256)).hex()[: 2 * size] if size <= 256 else "ab" * size
    waits = await Waits.open(engine, secret.upper())
    parked = await waits.park()
    (stored,) = await waits.waitpoints(parked)
    message = f"{parked.details.waitpoint_id}|k|{stored['created_at']}".encode()
    digest = hmac.new(bytes.fromhex(secret), message, hashlib.sha1).hexdigest()
    assert parked.details.waitpoint_token.reveal() == f"k1:{digest}"


# --- seeding ------------------------------------------------------------------------------------


async def test_first_boot_installs_and_the_next_one_matches(engine: Engine) -> None:
    seed = engine.backend.secrets.seed_at_boot
    assert await seed(None) == SeedOutcome(empty=ALL)
    assert await seed(SECRET) == SeedOutcome(installed=ALL)
    async with untouched(engine):
        assert await seed(SECRET) == SeedOutcome(match=ALL)
        assert await seed(SECRET.upper()) == SeedOutcome(match=ALL)
        assert await seed(None) == SeedOutcome(match=ALL)
    waits = Waits(engine)
    for partition in (0, 17, ALL - 1):
        assert await waits.hash(store(partition)) == {"current_kid": "k1", "secret:k1": SECRET}


async def test_a_torn_partition_is_repaired_with_proof(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """A healthy partition of the same kid shows that the configured secret is the right one."""
    waits = Waits(engine)
    backend, call = engine.backend, engine.backend.transport.call
    await backend.secrets.rotate_waitpoint_hmac_secret_all("prod.7", SECRET)
    for partition in (3, 200):
        await call("HDEL", store(partition), "secret:prod.7")
    with caplog.at_level(logging.WARNING):
        outcome = await backend.secrets.seed_at_boot(SECRET)
    assert outcome == SeedOutcome(match=ALL - 2, repaired=2)
    assert [r.__dict__["action"] for r in caplog.records] == ["secret_repaired"]
    assert (await waits.hash(store(200)))["secret:prod.7"] == SECRET


async def test_a_torn_partition_of_the_first_kid(engine: Engine) -> None:
    backend, call = engine.backend, engine.backend.transport.call
    await backend.secrets.seed_at_boot(SECRET)
    for partition in range(ALL):
        await call("HDEL", store(partition), "secret:k1")
    assert await backend.secrets.seed_at_boot(None) == SeedOutcome(torn=ALL)
    assert await backend.secrets.seed_at_boot(SECRET) == SeedOutcome(repaired=ALL)


async def test_a_torn_partition_without_proof_is_refused(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    backend, call = engine.backend, engine.backend.transport.call
    await backend.secrets.rotate_waitpoint_hmac_secret_all("prod.7", SECRET)
    await call("HDEL", store(3), "secret:prod.7")
    with caplog.at_level(logging.WARNING):
        async with untouched(engine):
            # The others keep another secret under this kid: the configured one is not it.
            assert await backend.secrets.seed_at_boot(OTHER) == SeedOutcome(
                mismatch=ALL - 1, torn=1
            )
    actions = {r.__dict__["action"]: r.levelno for r in caplog.records}
    assert actions["secret_torn"] == logging.ERROR


async def test_all_torn_is_no_proof(engine: Engine) -> None:
    backend, call = engine.backend, engine.backend.transport.call
    await backend.secrets.rotate_waitpoint_hmac_secret_all("prod.7", SECRET)
    for partition in range(ALL):
        await call("HDEL", store(partition), "secret:prod.7")
    async with untouched(engine):
        assert await backend.secrets.seed_at_boot(SECRET) == SeedOutcome(torn=ALL)


async def test_seeding_reports_other_secrets_and_repairs(engine: Engine) -> None:
    backend, call = engine.backend, engine.backend.transport.call
    await backend.secrets.rotate_waitpoint_hmac_secret(9, "app-1", OTHER)
    assert await backend.secrets.seed_waitpoint_hmac_secret("app-1", SECRET) == Seeded(
        "app-1", (9,)
    )
    await call("DEL", store(9))
    await call("HDEL", store(4), "secret:app-1")
    assert await backend.secrets.seed_waitpoint_hmac_secret("app-1", SECRET) == Seeded("app-1")
    assert await Waits(engine).hash(store(4)) == {"current_kid": "app-1", "secret:app-1": SECRET}


async def test_a_rotation(engine: Engine) -> None:
    waits = await Waits.open(engine)
    await engine.freeze(await engine.now())
    now = await engine.now()
    done = await engine.backend.secrets.rotate_waitpoint_hmac_secret(0, "k2", OTHER.upper(), 5000)
    assert (done.status, done.previous_kid, done.gc_count) == ("rotated", "k1", 0)
    assert await waits.hash(store()) == {
        "current_kid": "k2",
        "secret:k2": OTHER,
        "secret:k1": SECRET,
        "expires_at:k1": str(now + 5000),
        "previous_kid": "k1",
        "previous_expires_at": str(now + 5000),
    }
    assert await waits.hash(store(1)) == {"current_kid": "k1", "secret:k1": SECRET}
    async with untouched(engine):
        again = await engine.backend.secrets.rotate_waitpoint_hmac_secret(0, "k2", OTHER, 9)
        assert again.status == "noop"
        problem = await refused(
            engine.backend.secrets.rotate_waitpoint_hmac_secret(0, "k2", THIRD), "rotation_conflict"
        )
        assert "k2" in str(problem)
        assert THIRD not in str(problem)
        # Still verifying under another secret.
        await refused(
            engine.backend.secrets.rotate_waitpoint_hmac_secret(0, "k1", THIRD), "rotation_conflict"
        )


async def test_a_first_rotation_on_an_empty_store(engine: Engine) -> None:
    done = await engine.backend.secrets.rotate_waitpoint_hmac_secret(0, "k9", SECRET, 0)
    assert (done.status, done.previous_kid, done.gc_count) == ("rotated", None, 0)
    assert await Waits(engine).hash(store()) == {"current_kid": "k9", "secret:k9": SECRET}


async def test_a_torn_current_kid_is_repaired(engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    await engine.backend.transport.call("HDEL", store(), "secret:k1")
    done = await engine.backend.secrets.rotate_waitpoint_hmac_secret(0, "k1", OTHER)
    assert done.status == "noop"
    assert await Waits(engine).hash(store()) == {"current_kid": "k1", "secret:k1": OTHER}


async def test_collection_spares_what_still_verifies_and_the_current_kid(engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    waits = Waits(engine)
    await engine.freeze(await engine.now())
    now = await engine.now()
    await waits.write(
        store(),
        **{
            "secret:edge": OTHER,
            "expires_at:edge": now,
            "secret:past": OTHER,
            "expires_at:past": now - 1,
            "secret:zero": OTHER,
            "expires_at:zero": 0,
            "secret:word": OTHER,
            "expires_at:word": "inf",
            "secret:none": OTHER,
            "expires_at:alone": now + 1,
        },
    )
    done = await engine.backend.secrets.rotate_waitpoint_hmac_secret(0, "k2", THIRD, 0)
    assert done.gc_count == 5
    left = await waits.hash(store())
    assert {name for name in left if name.startswith("secret:")} == {
        *("secret:edge", "secret:k1", "secret:k2")
    }
    assert "expires_at:alone" not in left
    assert "expires_at:k2" not in left


async def test_returning_to_a_kid_makes_it_current_for_good(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    partition = parked.handle.execution_id.partition
    rotate = engine.backend.secrets.rotate_waitpoint_hmac_secret
    await rotate(partition, "k2", OTHER, 1000)
    back = await rotate(partition, "k1", SECRET, 1000)
    assert (back.status, back.previous_kid) == ("rotated", "k2")
    fields = await waits.hash(store(partition))
    assert fields["current_kid"] == "k1"
    assert "expires_at:k1" not in fields
    await engine.advance(5000)
    await rotate(partition, "k3", THIRD, 100_000)
    assert "secret:k1" in await waits.hash(store(partition)), "its old expiry was forgotten"
    await waits.send(parked)


async def test_rotation_everywhere(engine: Engine) -> None:
    backend = engine.backend
    await backend.secrets.seed_at_boot(SECRET)
    await backend.secrets.rotate_waitpoint_hmac_secret(5, "k2", OTHER)
    await backend.secrets.rotate_waitpoint_hmac_secret(6, "k2", THIRD)
    await backend.transport.call("DEL", store(7))
    await backend.transport.call("SET", store(7), "not a hash")
    summary = await backend.secrets.rotate_waitpoint_hmac_secret_all("k2", OTHER, 1000)
    assert [entry.partition for entry in summary.entries] == list(range(ALL))
    statuses = {entry.partition: entry.status for entry in summary.entries}
    assert [statuses[p] for p in (4, 5, 6, 7, 8)] == [
        *("rotated", "noop", "conflict", "failed", "rotated")
    ]
    assert summary.rotated == ALL - 2
    assert summary.failed == (6, 7)
    for entry in summary.entries:
        assert OTHER not in repr(entry)
        assert SECRET not in repr(entry)
    await backend.transport.call("DEL", store(7))
    again = await backend.secrets.rotate_waitpoint_hmac_secret_all("k2", OTHER, 1000)
    assert [e.status for e in again.entries if e.status != "noop"] == ["conflict", "rotated"]


async def test_the_list_of_kids(engine: Engine) -> None:
    assert await engine.backend.secrets.list_waitpoint_hmac_kids() == HmacKids(None, ())
    waits = await Waits.open(engine)
    assert await engine.backend.secrets.list_waitpoint_hmac_kids() == HmacKids("k1", ())
    await waits.write(store(), **{"expires_at:ghost": 2**53 - 1, "secret:lost": OTHER})
    assert await engine.backend.secrets.list_waitpoint_hmac_kids() == HmacKids("k1", ())


async def test_invariant_of_the_current_kid(engine: Engine) -> None:
    """Whatever is done to the store, the current kid has a secret and no end."""
    waits = await Waits.open(engine)
    rotate = engine.backend.secrets.rotate_waitpoint_hmac_secret
    secrets = {"k1": SECRET, "k2": OTHER, "k3": THIRD}
    for step, kid in enumerate(["k2", "k1", "k3", "k3", "k2", "k1", "k2", "k3"] * 3):
        await rotate(0, kid, secrets[kid], 3 * step)
        await engine.advance(step)
        fields = await waits.hash(store())
        assert fields["current_kid"] == kid
        assert fields[f"secret:{kid}"] == secrets[kid]
        assert f"expires_at:{kid}" not in fields
