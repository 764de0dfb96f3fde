"""Whatever waits and whoever claims: each gets what it covers, the best of it first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowfabric.core.ids import ExecutionId, new_uuid
from tests.support.claims import claim_many
from tests.support.engine import TTL, Engine
from tests.support.leases import mark

TOKENS = ["a", "a1", "a.b", "b"]
"""Some begin like others."""
SPACES = ["default", "a", "b"]
WEIGHT_MS = 2
"""So small that age and priority both matter."""


class Work(msgspec.Struct, frozen=True):
    needs: frozenset[str]
    namespace: str
    priority: int
    arrives_after: int


class Worker(msgspec.Struct, frozen=True):
    offers: frozenset[str]
    serves: frozenset[str] | None
    count: int

    def covers(self, work: Work) -> bool:
        serves = self.serves is None or work.namespace in self.serves
        return serves and work.needs <= self.offers


tokens = st.frozensets(st.sampled_from(TOKENS))
works = st.builds(
    Work, tokens, st.sampled_from(SPACES), st.integers(0, 3), arrives_after=st.integers(0, 2)
)
workers = st.builds(
    Worker,
    tokens | st.just(frozenset(TOKENS)),
    st.none() | st.frozensets(st.sampled_from(SPACES), min_size=1),
    st.integers(1, 6),
)
rounds = st.lists(
    st.tuples(
        st.lists(works, min_size=1, max_size=6),
        st.lists(workers, min_size=1, max_size=3),
        st.booleans(),
    ),
    min_size=2,
    max_size=5,
)


class Lane:
    """One lane, and what waits there by score, the best of each namespace first."""

    def __init__(self, engine: Engine, now: int) -> None:
        self.engine, self.now, self.lane = engine, now, new_uuid()
        self.waiting: dict[ExecutionId, tuple[int, Work]] = {}
        self.held: dict[ExecutionId, tuple[int, Work]] = {}

    async def submit(self, work: Work) -> None:
        await self.move(work.arrives_after)
        routing = {"required_capabilities": sorted(work.needs)}
        execution_id = await self.engine.create(
            lane=self.lane,
            namespace=work.namespace,
            priority=work.priority,
            policy={"routing_requirements": routing},
        )
        self.waiting[execution_id] = (self.now - WEIGHT_MS * work.priority, work)

    async def claim(self, worker: Worker) -> None:
        queues: dict[str, list[ExecutionId]] = defaultdict(list)
        for execution_id in sorted(self.waiting, key=lambda each: (self.waiting[each][0], each)):
            work = self.waiting[execution_id][1]
            if worker.covers(work):
                queues[work.namespace].append(execution_id)
        claimed = await claim_many(
            self.engine,
            worker.count,
            lane=self.lane,
            capabilities=worker.offers,
            namespaces=worker.serves,
        )
        covered = sum(map(len, queues.values()))
        assert len(claimed.claims) == min(worker.count, covered)
        assert (claimed.remaining > 0) == (covered > worker.count)
        for claim in claimed.claims:
            assert claim.execution_id == queues[claim.namespace].pop(0)
            self.held[claim.execution_id] = self.waiting.pop(claim.execution_id)

    async def lose_all(self) -> None:
        """All leases expire."""
        await self.move(TTL + 1)
        await mark(self.engine, self.held)
        self.waiting |= self.held
        self.held.clear()

    async def move(self, ms: int) -> None:
        self.now += ms
        await self.engine.freeze(self.now)


@settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rounds=rounds)
async def test_a_claim_takes_the_best_of_what_the_worker_covers(
    engine: Engine, rounds: Sequence[tuple[list[Work], list[Worker], bool]]
) -> None:
    lane = Lane(engine, await engine.now())
    await engine.backend.lanes.set_lane_config(lane.lane, priority_weight_ms=WEIGHT_MS)
    for works, workers, lost in rounds:
        for work in works:
            await lane.submit(work)
        for worker in workers:
            await lane.claim(worker)
        if lost and lane.held:
            await lane.lose_all()
