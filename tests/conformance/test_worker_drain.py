"""Draining workers, their leases, and workers that are declared dead (04 §9)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Candidate, Claim, Granted, NotReclaimable
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.api.workers import Draining, NotRegistered
from tests.support.engine import LANE, TTL, Engine, refused, untouched
from tests.support.leases import paused

W1: dict[str, Any] = {
    "worker_id": "w",
    "worker_instance_id": "w-1",
    "lanes": [LANE],
    "namespaces": ["*"],
}
PAIR: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}


def serving(namespaces: list[str]) -> dict[str, Any]:
    return W1 | {"namespaces": namespaces}


async def test_a_draining_worker_gets_nothing_more(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**W1)
    held = await engine.running()
    waiting = await engine.create()
    assert await backend.workers.drain_worker("w-1") == Draining(1)
    claimed = await backend.claims.claim_many(engine.want(), waiting.tag, 10)
    assert (claimed.claims, claimed.remaining, claimed.draining) == ([], 0, True)
    _, claimed = await backend.claims.complete_and_claim(waiting.tag, (), engine.want(), 5)
    assert (claimed.claims, claimed.draining) == ([], True)
    await refused(backend.claims.issue_claim_grant(waiting, **PAIR), "execution_not_eligible")
    admitted = [Candidate(waiting)]
    assert await backend.claims.claim_admitted(engine.want(), waiting.tag, admitted) == []
    # What it runs goes on, and others get the rest.
    await backend.leases.renew(held)
    await backend.executions.complete(held)
    (other,) = await engine.claim_all(instance="w-2")
    assert other.execution_id == waiting


async def test_what_a_draining_worker_releases_goes_to_others(engine: Engine) -> None:
    """The claim that is part of a completion answers nothing, too."""
    await engine.backend.workers.register_worker(**W1)
    held, waiting = await engine.running(), await engine.create()
    await engine.backend.workers.drain_worker("w-1")
    outcomes, claimed = await engine.backend.claims.complete_and_claim(
        waiting.tag, [Completion(held)], engine.want(), 5
    )
    assert outcomes == [None]
    assert (claimed.claims, claimed.draining) == ([], True)
    assert [claim.execution_id for claim in await engine.claim_all(instance="w-2")] == [waiting]


async def test_no_grant_to_reclaim_either(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**W1)
    handle = await engine.running()
    await backend.leases.revoke_lease(handle.execution_id)
    await backend.workers.drain_worker("w-1")
    outcome = await backend.claims.issue_reclaim_grant(handle.execution_id, **PAIR)
    assert outcome.kind == "not_reclaimable"
    other: dict[str, Any] = PAIR | {"worker_instance_id": "w-2"}
    outcome = await backend.claims.issue_reclaim_grant(handle.execution_id, **other)
    assert isinstance(outcome, Granted)


async def test_the_worker_and_operators_are_told(engine: Engine) -> None:
    backend = engine.backend
    assert await backend.workers.drain_worker("w-1") == NotRegistered()
    await backend.workers.register_worker(**W1)
    beat = await backend.workers.heartbeat_worker("w-1")
    assert beat is not None
    assert not beat.draining
    await backend.workers.drain_worker("w-1")
    beat = await backend.workers.heartbeat_worker("w-1")
    assert beat is not None
    assert beat.draining
    (entry,) = await backend.workers.list_workers()
    assert entry.draining
    # Registering again, as a worker does with new tasks, is no way out of it.
    assert await backend.workers.register_worker(**W1) == "refreshed"
    assert (await backend.workers.list_workers())[0].draining


async def test_a_new_process_of_that_name_works_again(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**W1)
    waiting = await engine.create()
    await backend.workers.drain_worker("w-1")
    assert await engine.claim_all() == []
    await backend.workers.mark_worker_dead("w-1")
    assert await backend.workers.register_worker(**W1) == "registered"
    assert not (await backend.workers.list_workers())[0].draining
    assert [claim.execution_id for claim in await engine.claim_all()] == [waiting]


@pytest.mark.parametrize(
    "bad",
    [{"timeout_ms": -1}, {"timeout_ms": 1.5}, {"worker_instance_id": "a b"}, {"namespace": ""}],
)
async def test_a_drain_is_validated(engine: Engine, bad: dict[str, Any]) -> None:
    given: dict[str, Any] = {"worker_instance_id": "w-1"} | bad
    async with untouched(engine):
        await refused(engine.backend.workers.drain_worker(**given), "invalid_input")


# --- namesakes --------------------------------------------------------------------------


async def namesakes(engine: Engine) -> dict[str, Any]:
    """A process "same" in two namespaces, each with a lease and work that waits."""
    held: dict[str, Any] = {}
    for namespace in ("a", "b"):
        await engine.backend.workers.register_worker(
            worker_id="w", worker_instance_id="same", lanes=[LANE], namespace=namespace
        )
        await engine.create(namespace=namespace)
        held[namespace] = (await engine.claim(instance="same", namespaces=[namespace])).handle
        await engine.create(namespace=namespace)
    return held


async def owner(engine: Engine, execution_id: Any) -> str:
    info = await engine.backend.reads.read_execution_info(execution_id)
    return info.state_vector.ownership_state.value


async def test_a_drain_concerns_the_namespaces_that_the_worker_serves(engine: Engine) -> None:
    backend = engine.backend
    held = await namesakes(engine)
    tag = held["a"].execution_id.tag
    assert await backend.workers.drain_worker("same", "a") == Draining(1)
    want = engine.want(instance="same", namespaces=["a"])
    claimed = await backend.claims.claim_many(want, tag, 5)
    assert (claimed.claims, claimed.draining) == ([], True)
    # A process that serves all namespaces and has the same name gets the work of the others.
    both = await backend.claims.claim_many(engine.want(instance="same"), tag, 5)
    assert [claim.namespace for claim in both.claims] == ["b"]
    assert not both.draining
    waiting = await engine.create(namespace="b")
    mine: dict[str, Any] = PAIR | {"worker_instance_id": "same"}
    assert (await backend.claims.issue_claim_grant(waiting, **mine)).execution_id == waiting
    (entry,) = await backend.workers.list_workers("b")
    assert not entry.draining
    # Both at once: each is drained on its own, and the end of one leaves the other.
    await backend.workers.drain_worker("same", "b")
    await backend.workers.mark_worker_dead("same", "a")
    want = engine.want(instance="same", namespaces=["b"])
    assert (await backend.claims.claim_many(want, tag, 5)).draining
    want = engine.want(instance="same", namespaces=["a"])
    assert len((await backend.claims.claim_many(want, tag, 5)).claims) == 1


async def test_a_drain_in_the_default_namespace_leaves_the_others(engine: Engine) -> None:
    for namespace in ("default", "b"):
        await engine.backend.workers.register_worker(
            worker_id="w", worker_instance_id="same", lanes=[LANE], namespace=namespace
        )
        await engine.create(namespace=namespace)
    await engine.backend.workers.drain_worker("same")
    (claim,) = await engine.claim_all(instance="same", namespaces=["default", "b"])
    assert claim.namespace == "b"


async def test_leases_of_a_namesake_are_not_revoked(engine: Engine) -> None:
    backend = engine.backend
    held = await namesakes(engine)
    for outcome in ("marked", "not_registered"):
        found = await backend.workers.mark_worker_dead("same", "a", revoke_leases=True)
        assert found == outcome
        assert await owner(engine, held["a"].execution_id) == "lease_revoked"
        assert await owner(engine, held["b"].execution_id) == "leased"


async def test_a_dead_worker_of_several_namespaces_loses_all_its_leases(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**serving(["a", "b"]))
    ids = [(await engine.running(namespace=name)).execution_id for name in ("a", "b", "c")]
    await backend.workers.mark_worker_dead("w-1", revoke_leases=True)
    states = [await owner(engine, each) for each in ids]
    assert states == ["lease_revoked", "lease_revoked", "leased"]


async def test_a_draining_worker_that_serves_more_gets_nothing_of_it(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**serving(["a"]))
    await backend.workers.drain_worker("w-1")
    await backend.workers.register_worker(**serving(["a", "b"]))
    (drain,) = await backend.upkeep.list_drains()
    assert drain.namespaces == ("a", "b")


async def test_a_grant_that_a_draining_worker_holds_is_of_no_use(engine: Engine) -> None:
    """Claims by this process answer nothing, whatever way they take."""
    backend = engine.backend
    await backend.workers.register_worker(**W1)
    lost = await engine.running()
    await backend.leases.revoke_lease(lost.execution_id)
    reclaim = await backend.claims.issue_reclaim_grant(lost.execution_id, **PAIR)
    assert isinstance(reclaim, Granted)
    grant = await backend.claims.issue_claim_grant(await engine.create(), **PAIR)
    resumable = (await paused(engine, lane="second")).execution_id
    resume = await backend.claims.issue_claim_grant(resumable, **PAIR)
    await backend.workers.drain_worker("w-1")
    using: dict[str, Any] = PAIR | {"lease_ttl_ms": TTL}
    await refused(backend.claims.claim_execution(grant, **using), "execution_not_leaseable")
    await refused(
        backend.claims.claim_resumed_execution(resume, **using), "execution_not_leaseable"
    )
    refusal = await backend.claims.reclaim_execution(reclaim.grant, **using)
    assert isinstance(refusal, NotReclaimable)
    await backend.workers.mark_worker_dead("w-1")
    await backend.claims.claim_execution(grant, **using)
    taken = await backend.claims.reclaim_execution(reclaim.grant, **using)
    assert isinstance(taken, Claim)


# --- leases -----------------------------------------------------------------------------


async def test_leases_of_a_worker_in_pages(engine: Engine) -> None:
    handles = [await engine.running(lane=lane) for lane in ("a", "b", "c", LANE, LANE)]
    await engine.create()
    await engine.claim(instance="w-2")
    listing = engine.backend.workers.list_worker_leases
    everything = await listing("w-1")
    assert everything.cursor is None
    ids = [entry.execution_id for entry in everything.entries]
    assert (len(ids), ids) == (5, sorted(ids))
    entry = everything.entries[0]
    held = {handle.execution_id: handle for handle in handles}[entry.execution_id]
    assert (entry.lease_id, entry.lease_epoch) == (held.lease_id, held.lease_epoch)
    assert await engine.now() < entry.expires_at_ms <= await engine.now() + TTL
    first = await listing("w-1", limit=2)
    assert (len(first.entries), first.cursor) == (2, ids[1])
    rest = await listing("w-1", first.cursor or "", 10)
    assert [each.execution_id for each in rest.entries] == ids[2:]
    assert await listing("nobody") == await listing("w-1", limit=0)
    await refused(listing("w-1", after="x"), "invalid_cursor")


async def test_a_dead_worker_may_lose_its_leases(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**W1)
    handles = [await engine.running(), await engine.running(lane="mails")]
    assert await backend.workers.mark_worker_dead("w-1", reason="node lost") == "marked"
    for handle in handles:
        await backend.leases.renew(handle)
    # The registration is gone; its leases can still be revoked.
    again = await backend.workers.mark_worker_dead("w-1", reason="node lost", revoke_leases=True)
    assert again == "not_registered"
    for handle in handles:
        info = await backend.reads.read_execution_info(handle.execution_id)
        assert info.state_vector.ownership_state.value == "lease_revoked"
    revoked = [e for e in await engine.events(handles[0].execution_id) if e.type == "revoked"]
    assert [event.get("reason") for event in revoked] == ["node lost"]
    assert (await engine.claim(instance="w-2")).handle.kind == "reclaimed"
    assert (await backend.workers.list_worker_leases("w-1")).entries == ()


async def test_an_expired_lease_is_listed_until_it_is_taken(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(TTL + 1)
    listed = await engine.backend.workers.list_worker_leases("w-1")
    assert [entry.lease_id for entry in listed.entries] == [handle.lease_id]
