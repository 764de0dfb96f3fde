"""Purging by an operator: finished executions only, at once and completely."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.streams import Frame
from tests.support.engine import Engine, refused, untouched
from tests.support.executions import Case

FINISHED = ("completed", "failed", "cancelled", "expired")


@pytest.mark.parametrize("state", FINISHED)
async def test_a_finished_execution_is_gone_at_once(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    await engine.backend.executions.purge_execution(case.execution_id)
    assert await engine.backend.reads.describe_execution(case.execution_id) is None
    assert (await engine.backend.listings.list_executions()).executions == ()
    await refused(
        engine.backend.executions.replay_execution(case.execution_id), "execution_not_found"
    )


@pytest.mark.parametrize("state", ["waiting", "delayed", "active", "paused_waiting"])
async def test_an_unfinished_execution_is_refused(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    async with untouched(engine):
        await refused(
            engine.backend.executions.purge_execution(case.execution_id), "execution_not_terminal"
        )


async def test_purging_again_changes_nothing(engine: Engine) -> None:
    case = await Case.make(engine, "completed")
    await engine.backend.executions.purge_execution(case.execution_id)
    async with untouched(engine):
        await engine.backend.executions.purge_execution(case.execution_id)


async def test_its_id_can_be_used_again(engine: Engine) -> None:
    handle = await engine.running(tags={"app.a": "1"}, input_payload=b"old")
    await engine.backend.streams.append_frame(handle, Frame(payload=b"x"))
    await engine.backend.executions.complete(handle, b"r")
    await engine.backend.executions.purge_execution(handle.execution_id)
    await engine.create(execution_id=handle.execution_id)
    claim = await engine.claim()
    assert (claim.attempt_index, claim.handle.lease_epoch) == (0, 1)
    assert await engine.backend.reads.get_execution_tags(handle.execution_id) == {}
    assert await engine.backend.reads.get_execution_result(handle.execution_id) is None
