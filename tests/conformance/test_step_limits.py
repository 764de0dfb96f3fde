"""How many step records an execution may have, and how large they may be (11 §17.1)."""

from __future__ import annotations

import asyncio

from flowfabric.core.contracts.steps import AlreadyRecorded, Recorded, StepError
from tests.conformance.test_steps import LARGEST, record
from tests.support.engine import Engine, refused, untouched
from tests.support.leases import running


async def test_at_most_ten_thousand_records(engine: Engine) -> None:
    handle = await running(engine)
    await record(engine, handle, "first", status="pending")
    for start in range(1, 10_000, 999):
        numbers = range(start, start + 999) if start < 9991 else range(9991, 10_000)
        await asyncio.gather(*(record(engine, handle, f"k{n}") for n in numbers))
    async with untouched(engine):
        error = await refused(record(engine, handle, "one more"), "step_limit_exceeded")
        assert error.details == ("the limit is 10000 records per execution",)
        assert isinstance(await record(engine, handle, "k9999"), AlreadyRecorded)
    assert await record(engine, handle, "first", result=b"r") == Recorded(1)
    page = await engine.backend.steps.read_steps(handle.execution_id, 9_999)
    assert [step.seq for step in page.steps] == [10_000]


async def test_at_most_sixteen_megabytes(engine: Engine) -> None:
    handle = await running(engine)
    await record(engine, handle, "open", status="pending")
    failure = StepError("r" * 8000, "c" * 192)
    await record(engine, handle, "failed", status="failed", error=failure)
    for n in range(63):
        await record(engine, handle, f"k{n}", result=bytes(LARGEST))
    left = LARGEST - 8192
    async with untouched(engine):
        for key in ("open", "new"):
            too_much = record(engine, handle, key, result=bytes(left + 1))
            error = await refused(too_much, "step_limit_exceeded")
            assert error.details == ("the limit is 16777216 bytes per execution",)
        # The size of one result is checked first.
        await refused(record(engine, handle, "new", result=bytes(LARGEST + 1)), "payload_too_large")
        assert isinstance(
            await record(engine, handle, "k0", result=bytes(LARGEST)), AlreadyRecorded
        )
    assert await record(engine, handle, "open", result=bytes(left)) == Recorded(1)
    assert await record(engine, handle, "empty") == Recorded(66)
    async with untouched(engine):
        await refused(record(engine, handle, "byte", result=b"x"), "step_limit_exceeded")
