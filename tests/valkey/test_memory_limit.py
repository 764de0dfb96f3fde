"""At the server's memory limit no work comes in, but what is stored can end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from flowfabric.core.contracts.executions import Cancelled
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import TransportError
from tests.support.engine import Engine
from tests.valkey.mutation import private_engine, private_server

__all__ = ["private_engine", "private_server"]


@pytest.fixture
async def full(private_engine: Engine) -> AsyncGenerator[Engine]:
    """An engine with two running and two waiting executions, whose server then fills up."""
    call = private_engine.backend.transport.call
    await private_engine.advance(0)
    for _ in range(4):
        await private_engine.create(policy={"retry_policy": {"max_retries": 1}})
    yield private_engine
    await call("CONFIG", "SET", "maxmemory", "0")


async def fill(engine: Engine) -> None:
    await engine.backend.transport.call("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(TransportError) as refused:
        await engine.create()
    assert refused.value.kind == "out_of_memory"


async def test_work_continues_and_ends(full: Engine) -> None:
    first, second = (await full.claim()).handle, (await full.claim()).handle
    await fill(full)
    backend = full.backend
    await backend.leases.renew_lease(first.execution_id, first, 60_000)
    await backend.executions.complete(first, b"kept")
    assert (await backend.reads.get_execution_result(first.execution_id)) == b"kept"
    await backend.executions.fail(second, "no luck", "transient")
    third = (await full.claim()).handle
    await backend.executions.delay(third, 1)
    fourth = (await full.claim()).handle
    assert isinstance(await backend.executions.cancel_execution(fourth.execution_id), Cancelled)
    await full.advance(90_000_000)
    verdicts = await backend.upkeep.trim_retention(
        first.execution_id.tag, "default", [first.execution_id]
    )
    assert verdicts == ["purged"]


TAKES_IN = {
    *("ff_create", "ff_replay", "ff_signal", "ff_append", "ff_set_tags", "ff_create_waitpoint"),
    *("ff_create_flow", "ff_submit_flow", "ff_extend_flow", "ff_spawn", "ff_add_to_flow"),
    "ff_budget_create",
    *("ff_stage_edge", "ff_apply_edge", "ff_set_join", "ff_set_flow_tags", "ff_replay_flow"),
    *("ff_quota_create", "ff_record_step"),
}


async def test_only_what_takes_something_in_is_refused(engine: Engine) -> None:
    listed: Any = await engine.backend.transport.call("FUNCTION", "LIST")
    (library,) = listed
    refused = {
        function[b"name"].decode()
        for function in library[b"functions"]
        if not {b"allow-oom", b"no-writes"} & {*function[b"flags"]}
    }
    assert {name for name in refused if not name.startswith("ff_test_")} == TAKES_IN


async def test_handlers_and_their_watchers_are_not_affected(full: Engine) -> None:
    backend = full.backend
    handle = (await full.claim()).handle
    await backend.streams.append_frame(handle, Frame(payload=b"said before"))
    await fill(full)
    await backend.executions.progress(handle, 50, "half")
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert [frame.payload for frame in page.frames] == [b"said before"]
    assert await backend.wakeups.ring_waiting({handle.execution_id.tag: ["default"]}) == 1
    await backend.lanes.set_lane_state("default", "paused", "out of memory")


async def test_a_worker_can_start(full: Engine) -> None:
    await fill(full)
    await full.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["default"], namespace="another"
    )
    await full.backend.meta.prepare()
    assert await full.backend.workers.heartbeat_worker("w-1", "another")


async def test_a_lease_that_ran_out_is_offered_again(full: Engine) -> None:
    lost = (await full.claim()).handle.execution_id
    await fill(full)
    await full.advance(3_600_000)
    assert await full.backend.upkeep.mark_lease_expired_if_due(lost.tag, [lost]) == [
        "marked_expired"
    ]
