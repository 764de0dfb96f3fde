"""Which namespaces a claim serves, and how it shares between them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Candidate, Claim, ClaimedMany
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion
from tests.support.claims import GPU, claim_many, ids
from tests.support.engine import TTL, Engine, untouched
from tests.support.leases import mark


async def fill(engine: Engine, lane: str, **counts: int) -> dict[str, list[ExecutionId]]:
    """So many executions of each namespace, in the order in which claims take them."""
    made: dict[str, list[ExecutionId]] = defaultdict(list)
    for namespace, count in counts.items():
        for _ in range(count):
            made[namespace].append(await engine.create(lane=lane, namespace=namespace))
            await engine.advance(1)
    return made


def namespaces(claims: Sequence[Claim]) -> list[str]:
    return [claim.namespace for claim in claims]


# --- isolation -----------------------------------------------------------------------


@pytest.mark.parametrize("served", ["default", "acme", "other"])
async def test_a_worker_takes_only_work_of_its_namespaces(engine: Engine, served: str) -> None:
    made = await fill(engine, "default", default=1, acme=1, other=1)
    claimed = await claim_many(engine, namespaces=[served])
    assert ids(claimed.claims) == made[served]
    assert claimed.remaining == 0
    async with untouched(engine):
        assert await claim_many(engine, namespaces=[served]) == ClaimedMany([], 0)
        assert await claim_many(engine, namespaces=["nobody"]) == ClaimedMany([], 0)
    assert set(namespaces((await claim_many(engine)).claims)) == set(made) - {served}


async def test_work_of_others_is_not_counted_as_left(engine: Engine) -> None:
    made = await fill(engine, "default", default=5, acme=2)
    claimed = await claim_many(engine, 1, namespaces=["acme"])
    assert (ids(claimed.claims), claimed.remaining) == (made["acme"][:1], 1)


@pytest.mark.parametrize("namespace", ["default", "other"])
async def test_admission_opens_no_other_namespace(engine: Engine, namespace: str) -> None:
    execution_id = await engine.create(namespace=namespace)
    claim = engine.backend.claims.claim_admitted
    async with untouched(engine):
        want = engine.want(namespaces=["acme"])
        assert await claim(want, execution_id.tag, [Candidate(execution_id)]) == []
    assert len(await claim(engine.want(), execution_id.tag, [Candidate(execution_id)])) == 1


async def test_requirements_and_tasks_hold_in_every_namespace(engine: Engine) -> None:
    gpu = await engine.create(policy=GPU, namespace="acme")
    await engine.create(policy=GPU)
    assert await claim_many(engine, namespaces=["acme"]) == ClaimedMany([], 0)
    wanted: dict[str, Any] = {"capabilities": ["gpu"], "namespaces": ["acme"]}
    assert (await claim_many(engine, tasks=["x"], **wanted)).unknown_tasks == ("job",)
    assert await claim_many(engine, tasks=["job"], namespaces=["acme"]) == ClaimedMany([], 0)
    assert ids((await claim_many(engine, tasks=["job"], **wanted)).claims) == [gpu]


async def test_a_lost_execution_stays_in_its_namespace(engine: Engine) -> None:
    lost = await engine.create(namespace="acme")
    await engine.claim(namespaces=["acme"])
    await engine.advance(TTL + 1)
    await mark(engine, [lost])
    assert await engine.claim_all(namespaces=["default"]) == []
    (claim,) = await engine.claim_all(namespaces=["default", "acme"])
    assert (claim.execution_id, claim.handle.kind) == (lost, "reclaimed")


async def test_a_completing_worker_claims_only_from_its_namespaces(engine: Engine) -> None:
    made = await fill(engine, "default", default=2, acme=2)
    request = engine.want(namespaces=["acme"])
    (first,) = (await engine.backend.claims.claim_many(request, engine.new_id().tag, 1)).claims
    done = [Completion(first.handle)]
    _, claimed = await engine.backend.claims.complete_and_claim(
        first.execution_id.tag, done, request, 5
    )
    assert [first.execution_id, *ids(claimed.claims)] == made["acme"]


async def test_scans_show_one_namespace_or_all(engine: Engine) -> None:
    made = await fill(engine, "default", default=2, acme=2)
    scan = engine.backend.claims.scan_eligible_executions
    tag = engine.new_id().tag
    assert await scan("default", tag, 10, namespaces=["acme"]) == made["acme"]
    assert await scan("default", tag, 10) == [*made["default"], *made["acme"]]
    first = await scan("default", tag, 3, ())
    assert await scan("default", tag, 3, ()) != first
    assert set(first[:2]) == {made["default"][0], made["acme"][0]}


def test_a_request_without_namespaces_must_say_so() -> None:
    with pytest.raises(ValidationError, match="pass None for all"):
        ClaimRequest("default", "w", "w-1", namespaces=())
    with pytest.raises(ValidationError, match="write"):
        ClaimRequest("default", "w", "w-1", namespaces="acme")  # pyright: ignore[reportArgumentType]


# --- fair shares ---------------------------------------------------------------------


class Shares:
    """Deficit round robin with equal weights: what each claim should get."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[ExecutionId]] = defaultdict(list)
        self.served: list[str] = []

    def claim(self, served: Sequence[str] | None, count: int) -> list[ExecutionId]:
        taken: list[ExecutionId] = []
        if self.open(served) == ["default"]:
            # Nobody competes with it, so it does not use up a turn.
            queue = self.waiting["default"]
            taken, self.waiting["default"] = queue[:count], queue[count:]
        while len(taken) < count and (names := self.open(served)):
            # The one that has gone longest without; those that never got one come first.
            rank = {name: place for place, name in enumerate(self.served, 1)}
            name = min(names, key=lambda each: rank.get(each, 0))
            self.served = [*(each for each in self.served if each != name), name]
            taken.append(self.waiting[name].pop(0))
        return taken

    def open(self, served: Sequence[str] | None) -> list[str]:
        return sorted(
            name
            for name, queue in self.waiting.items()
            if queue and (served is None or name in served)
        )


async def test_claims_share_as_the_model_does(engine: Engine) -> None:
    """Any order of arrivals, claims of any size, for workers of any namespaces."""
    lane, model, names = new_uuid(), Shares(), ["a", "b", "c", "default"]
    for _ in range(60):
        if random.random() < 0.5:
            name = random.choice(names)
            made = await fill(engine, lane, **{name: random.randint(1, 8)})
            model.waiting[name] += made[name]
        else:
            served = random.choice([None, random.sample(names, random.randint(1, 4))])
            count = random.randint(1, 9)
            claimed = await claim_many(engine, count, lane=lane, namespaces=served)
            assert ids(claimed.claims) == model.claim(served, count)


async def test_a_noisy_namespace_delays_others_by_one_turn(engine: Engine) -> None:
    lane = new_uuid()
    await fill(engine, lane, noisy=30)
    quiet = await fill(engine, lane, quiet=3)
    taken = [await engine.claim(lane=lane) for _ in range(6)]
    assert [claim.execution_id for claim in taken if claim.namespace == "quiet"] == quiet["quiet"]
    # A share that is not used goes to the others.
    assert namespaces(await engine.claim_all(9, lane=lane)) == ["noisy"] * 9


async def test_workers_that_serve_others_take_no_turns_away(engine: Engine) -> None:
    lane = new_uuid()
    await fill(engine, lane, a=10, b=10, c=10)
    taken: list[Claim] = []
    for _ in range(6):
        taken.append(await engine.claim(lane=lane, namespaces=["a", "c"]))
        await engine.claim(lane=lane, namespaces=["b"])
    assert namespaces(taken) == ["a", "c"] * 3


async def test_a_share_is_not_lost_to_executions_that_cannot_be_claimed(engine: Engine) -> None:
    lane = new_uuid()
    made = await fill(engine, lane, a=20, b=20)
    for execution_id in made["a"][:18]:
        await engine.backend.claims.issue_claim_grant(
            execution_id, worker_id="x", worker_instance_id="x-1"
        )
    taken = [await engine.claim(lane=lane) for _ in range(4)]
    assert namespaces(taken) == ["a", "b", "a", "b"]


async def test_priorities_hold_within_a_namespace(engine: Engine) -> None:
    lane = new_uuid()
    low = await engine.create(lane=lane, namespace="a")
    high = await engine.create(lane=lane, namespace="a", priority=5)
    other = await engine.create(lane=lane, namespace="b")
    assert ids(await engine.claim_all(lane=lane)) == [high, other, low]


# --- any worker, any work ------------------------------------------------------------


async def test_a_claim_takes_exactly_what_the_worker_covers(engine: Engine) -> None:
    """Whatever it requires and offers; checked against sets."""
    tokens, spaces, kinds = ["a", "b", "c"], ["default", "x", "y"], ["job", "mail"]
    for _ in range(25):
        lane, waiting = new_uuid(), dict[ExecutionId, tuple[str, frozenset[str], str]]()
        for _ in range(random.randint(1, 12)):
            space, kind = random.choice(spaces), random.choice(kinds)
            needs = random.sample(tokens, random.randint(0, 3))
            policy = {"routing_requirements": {"required_capabilities": needs}}
            execution_id = await engine.create(
                lane=lane, namespace=space, policy=policy, execution_kind=kind
            )
            waiting[execution_id] = (space, frozenset(needs), kind)
        for _ in range(4):
            offered = random.sample(tokens, random.randint(0, 3))
            served = random.choice([None, random.sample(spaces, random.randint(1, 3))])
            known = random.choice([None, random.sample(kinds, 1)])
            expected = {
                execution_id
                for execution_id, (space, needs, kind) in waiting.items()
                if needs.issubset(offered)
                and (served is None or space in served)
                and (known is None or kind in known)
            }
            claimed = await claim_many(
                engine, lane=lane, capabilities=offered, tasks=known, namespaces=served
            )
            # Without a mark of its own, a worker does not take what others left for its task.
            found = set(ids(claimed.claims))
            assert found <= expected
            if known is not None:
                assert found == expected
            for execution_id in found:
                del waiting[execution_id]
