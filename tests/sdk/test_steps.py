"""Recording steps of a claimed task, and reading them."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.steps import AlreadyRecorded, Recorded, StepError
from flowfabric.core.errors import TaskFinishedError
from flowfabric.sdk.client import Client
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import claimed


async def test_a_task_records_and_reads(engine: Engine, make_worker: MakeWorker) -> None:
    task, child = await claimed(await make_worker(), engine), engine.new_id()
    assert await task.record_step("fetch", result=b"r", codec="json", took_ms=5) == Recorded(1)
    await task.record_step("send", status="failed", error=StepError("x"))
    timer = await task.record_step("nap", kind="timer", status="pending", fire_in_ms=50)
    assert isinstance(timer, Recorded)
    assert timer.fire_at is not None
    await task.record_step("at", kind="timer", status="pending", fire_at=timer.fire_at)
    await task.record_step("sub", kind="child", status="pending", child_execution_id=child)
    page = await task.read_steps(1, 3)
    assert [step.step_key for step in page.steps] == ["send", "nap", "at"]
    assert page.next_after_seq == 4
    everything = await Client(engine.backend).steps(task.execution_id)
    assert everything == await task.read_steps()
    first, *_, last = everything.steps
    assert (first.codec, first.finished_at) == ("json", first.started_at + 5)
    assert last.child_execution_id == child
    await task.complete()
    with pytest.raises(TaskFinishedError):
        await task.record_step("late")


async def test_the_next_claim_has_the_steps(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    await task.record_step("fetch", result=b"r")
    await task.delay_execution(1)
    again = await worker.claim()
    assert again is not None
    assert again.claim.steps == await again.read_steps()
    known = await again.record_step("fetch", result=b"other")
    assert isinstance(known, AlreadyRecorded)
    assert known.record.result == b"r"
    assert not known.record.belongs_to(again.lease_epoch, again.attempt_index)
    await again.complete()


async def test_a_lost_reply_finds_its_own_record(
    engine: Engine, make_worker: MakeWorker, proxy: FaultProxy
) -> None:
    task = await claimed(await make_worker(proxy.url), engine)
    proxy.drop_next_reply(b"ff_record_step")
    outcome = await task.record_step("fetch", result=b"r")
    assert proxy.dropped == 1
    assert isinstance(outcome, AlreadyRecorded)
    assert outcome.record.belongs_to(task.lease_epoch, task.attempt_index)
    assert [step.result for step in (await task.read_steps()).steps] == [b"r"]
    await task.complete()
