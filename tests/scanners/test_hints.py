from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.scanners import DueHints
from tests.support.engine import LANE, Engine
from tests.support.scanning import create_delayed
from tests.support.sdk import until


@pytest.fixture
async def hints(engine: Engine) -> AsyncIterator[DueHints]:
    started = DueHints(engine.backend)
    started.start()
    yield started
    await started.stop()


async def _waiting(engine: Engine, execution_id: ExecutionId) -> bool:
    return await engine.backend.reads.read_execution_state(execution_id) is PublicState.WAITING


async def test_promoted_at_its_time_without_any_scanner(engine: Engine, hints: DueHints) -> None:
    due = await engine.now() + 150
    one = await engine.create(delay_until=due)
    hints.hint(LANE, one.tag, one, due)
    await until(lambda: _waiting(engine, one))
    assert 0 <= await engine.now() - due < 300
    assert len(hints) == 0


async def test_the_earliest_first_whatever_the_order_of_hints(
    engine: Engine, hints: DueHints
) -> None:
    now = await engine.now()
    late = await engine.create(delay_until=now + 60_000)
    soon = await engine.create(delay_until=now + 50)
    hints.hint(LANE, late.tag, late, now + 60_000)
    hints.hint(LANE, soon.tag, soon, now + 50)
    await until(lambda: _waiting(engine, soon))
    assert not await _waiting(engine, late)
    assert len(hints) == 1


async def test_many_at_once_over_lanes(engine: Engine, hints: DueHints) -> None:
    ids = await create_delayed(engine, 150, in_ms=60)
    due = await engine.now() + 60
    other = await engine.create(lane="other", delay_until=due)
    for one in ids:
        hints.hint(LANE, one.tag, one, due)
    hints.hint("other", other.tag, other, due)

    async def done() -> bool:
        return all(await asyncio.gather(*(_waiting(engine, one) for one in [*ids, other])))

    await until(done)


async def test_a_hint_that_comes_too_early_is_tried_again(engine: Engine, hints: DueHints) -> None:
    due = await engine.now() + 100
    one = await engine.create(delay_until=due)
    # The server's clock is set back after the hints learned it, and then moves on.
    hints.hint(LANE, one.tag, engine.new_id(), due - 100)
    await until(lambda: len(hints) == 0)
    await engine.advance(-40)
    hints.hint(LANE, one.tag, one, due)
    await until(lambda: _waiting(engine, one))


async def test_a_hint_with_a_wrong_time_is_given_up(engine: Engine, hints: DueHints) -> None:
    one = await engine.create(delay_until=await engine.now() + 60_000)
    hints.hint(LANE, one.tag, one, 1)
    await until(lambda: len(hints) == 0)
    assert not await _waiting(engine, one)


async def test_far_ahead_is_left_to_the_promoter(engine: Engine, hints: DueHints) -> None:
    hints.hint(LANE, "{fp:0}", engine.new_id(), await engine.now() + 3_600_000)
    await until(lambda: len(hints) == 0)
