"""Invariants over random lives, and a clock that steps back."""

from __future__ import annotations

import random

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import ExpireReason
from tests.support.engine import LANE, Engine
from tests.support.executions import POLICY
from tests.support.state_rules import violations
from tests.support.storage import indexes

LIVE = ("created", "started", "suspended")
STEPS = 150
TERMINAL_INDEX = {f"lane:{LANE}:terminal"}


class Walk:
    """Random operations on a few executions, with everything remembered that must not change."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.backend = engine.backend
        self.random = random.Random(seed)
        self.ids: list[ExecutionId] = []
        self.handles: list[Handle] = []
        self.epochs: dict[ExecutionId, int] = {}
        self.ends: dict[tuple[ExecutionId, int], tuple[str, int | None]] = {}

    async def step(self) -> None:
        operations = [self._create, self._claim, self._worker, self._operator, self._time]
        weights = [2, 4, 5, 2, 2]
        (operation,) = self.random.choices(operations, weights)
        try:
            await operation()
        except EngineError as error:
            # Old handles and ended executions are refused; anything else is a fault.
            assert error.group in {"contention", "state"}, error  # noqa: PT017

    async def _create(self) -> None:
        if len(self.ids) < 6:
            self.ids.append(await self.engine.create(policy=POLICY, priority=len(self.ids)))

    async def _claim(self) -> None:
        claims = await self.engine.claim_all(2)
        self.handles += [claim.handle for claim in claims]

    async def _worker(self) -> None:
        if not self.handles:
            return
        handle = self.random.choice(self.handles[-6:])
        match self.random.randrange(8):
            case 0:
                await self.backend.executions.complete(handle, b"r")
            case 1 | 2:
                await self.backend.executions.fail(handle, "x", "transient")
            case 3:
                await self.backend.executions.fail(handle, "x", "permanent")
            case 4:
                await self.backend.executions.delay(handle, await self.engine.now() + 500)
            case 5:
                await self.engine.block(handle.execution_id)
                await self.backend.executions.wait_children(handle)
            case 6:
                await self.backend.executions.cancel(handle)
            case _:
                await self.backend.leases.renew(handle)

    async def _operator(self) -> None:
        if not self.ids:
            return
        execution_id = self.random.choice(self.ids)
        match self.random.randrange(5):
            case 0:
                await self.backend.executions.cancel_execution(execution_id)
            case 1 | 2:
                await self.backend.executions.replay_execution(execution_id)
            case 3:
                await self.backend.leases.revoke_lease(execution_id)
            case _:
                await self.backend.executions.change_priority(
                    execution_id, self.random.randrange(10)
                )

    async def _time(self) -> None:
        await self.engine.advance(self.random.choice([1, 400, 1500, 25_000, 40_000]))
        if not self.ids:
            return
        tag = self.ids[0].tag
        self.random.shuffle(order := list(self.ids))
        await self.backend.upkeep.mark_lease_expired_if_due(tag, order)
        await self.backend.upkeep.promote_delayed(tag, LANE, order)
        await self.backend.upkeep.expire_execution(tag, ExpireReason.ATTEMPT_TIMEOUT, order)

    async def check(self) -> None:
        for execution_id in self.ids:
            await self._check(execution_id)

    async def _check(self, execution_id: ExecutionId) -> None:
        info = await self.backend.reads.read_execution_info(execution_id)
        assert violations(info.state_vector) == []
        terminal = info.state_vector.lifecycle_phase.value == "terminal"
        assert (info.completed_at is not None) == terminal
        result = await self.backend.reads.get_execution_result(execution_id)
        assert (result is not None) == (info.public_state.value == "completed")
        assert info.retry_count <= 5
        held = await indexes(self.engine, execution_id)
        if terminal:
            assert set(held) == TERMINAL_INDEX
        attempts = await self.backend.reads.read_attempts(execution_id)
        assert len(attempts) == info.total_attempt_count
        running = [a for a in attempts if a.attempt_state in LIVE]
        assert len(running) <= 1
        assert not (terminal and running)
        for attempt in attempts:
            assert (attempt.attempt_state not in LIVE) == (attempt.ended_at is not None)
            if attempt.attempt_state not in LIVE:
                end = (attempt.attempt_state, attempt.ended_at)
                assert self.ends.setdefault((execution_id, attempt.attempt_index), end) == end
        epoch = max((a.lease_epoch for a in attempts), default=0)
        assert epoch >= self.epochs.get(execution_id, 0)
        self.epochs[execution_id] = epoch
        feed = await self.engine.events(execution_id)
        completions = sum(event.type == "completion" for event in feed)
        assert completions == info.replay_count + int(terminal)


@pytest.mark.parametrize("seed", range(4))
async def test_random_lives(engine: Engine, seed: int) -> None:
    walk = Walk(engine, seed)
    for step in range(STEPS):
        await walk.step()
        if step % 5 == 0:
            await walk.check()
    await walk.check()
    assert len(walk.handles) > 5
