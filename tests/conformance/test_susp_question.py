"""What a wait asks people: stored with it, shown wherever it is read, never part of a condition."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.conditions import AllOf, Single
from flowfabric.core.contracts.suspension import UsePending
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import ExecutionId
from tests.support.engine import Engine
from tests.support.suspension import Waits

PROMPT = "Deploy v2 to production?"
DETAILS = {"version": 2, "costs": [1.5, None], "note": "Grüße"}
ASKED = (PROMPT, DETAILS)
NOTHING = (None, None)


@pytest.fixture
async def waits(engine: Engine) -> Waits:
    return await Waits.open(engine)


def asked(read: Any) -> tuple[str | None, Any]:
    return read.prompt, read.details


async def open_questions(waits: Waits, execution_id: ExecutionId) -> dict[str, Any]:
    """By waitpoint key."""
    page = await waits.backend.waitpoints.list_pending_waitpoints(execution_id)
    assert page.damaged == ()
    return {one.waitpoint_key: asked(one) for one in page.entries}


async def test_every_read_of_a_suspended_execution_tells_what_is_asked(waits: Waits) -> None:
    backend = waits.backend
    both = AllOf((Single("legal"), Single("boss")))
    parked = await waits.park(both, prompt=PROMPT, details=DETAILS)
    execution_id = parked.handle.execution_id
    (entry,) = (await backend.suspensions.list_suspended()).entries
    snapshot = await backend.reads.describe_execution(execution_id)
    why = await backend.reads.explain_execution(execution_id)
    last = await backend.waitpoints.read_last_wait(execution_id)
    assert [asked(each) for each in (entry, snapshot, why, last)] == [ASKED] * 4
    assert await open_questions(waits, execution_id) == {"legal": ASKED, "boss": ASKED}
    assert why.waitpoints == tuple(one.waitpoint_id for one in parked.details.waitpoints)

    # The last wait keeps its question; the execution asks nothing any more.
    await backend.suspensions.resume_execution(execution_id)
    last = await backend.waitpoints.read_last_wait(execution_id)
    snapshot = await backend.reads.describe_execution(execution_id)
    why = await backend.reads.explain_execution(execution_id)
    assert [asked(each) for each in (last, snapshot, why)] == [ASKED, NOTHING, NOTHING]


async def test_the_next_wait_asks_its_own_question(waits: Waits) -> None:
    parked = await waits.park(prompt=PROMPT, details=DETAILS)
    await waits.send(parked)
    again = await waits.park(handle=(await waits.engine.claim()).handle)
    execution_id = again.handle.execution_id
    assert asked(await waits.backend.waitpoints.read_last_wait(execution_id)) == NOTHING
    assert await open_questions(waits, execution_id) == {"k": NOTHING}


async def test_a_waitpoint_that_is_handed_out_has_its_question_before_the_wait(
    waits: Waits,
) -> None:
    handle = await waits.engine.running()
    execution_id = handle.execution_id
    pending = await waits.backend.waitpoints.create_waitpoint(
        handle, "k", 60_000, prompt=PROMPT, details=DETAILS
    )
    assert await open_questions(waits, execution_id) == {"k": ASKED}
    assert asked(await waits.backend.reads.describe_execution(execution_id)) == NOTHING
    await waits.park(handle=handle, waitpoints=[UsePending(pending.waitpoint_id)])
    assert await open_questions(waits, execution_id) == {"k": ASKED}
    assert asked(await waits.backend.reads.describe_execution(execution_id)) == ASKED
    stored = await waits.waitpoint(execution_id, pending.waitpoint_id)
    assert not {"prompt", "details"} & stored.keys()


async def test_a_wait_replaces_the_whole_question_of_its_waitpoint(waits: Waits) -> None:
    handle = await waits.engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(
        handle, "k", 60_000, prompt=PROMPT, details=DETAILS
    )
    bound = [UsePending(pending.waitpoint_id)]
    await waits.park(handle=handle, waitpoints=bound, prompt="Really?")
    assert await open_questions(waits, handle.execution_id) == {"k": ("Really?", None)}


async def test_a_question_may_be_as_long_as_the_limits(waits: Waits) -> None:
    prompt, details = "ä" * 512, "d" * (8192 - 2)
    parked = await waits.park(prompt=prompt, details=details)
    snapshot = await waits.backend.reads.describe_execution(parked.handle.execution_id)
    assert asked(snapshot) == (prompt, details)


@pytest.mark.parametrize("details", [0, False, "", [], {}])
async def test_empty_details_are_details_and_an_empty_prompt_is_none(
    waits: Waits, details: Any
) -> None:
    parked = await waits.park(prompt="", details=details)
    snapshot = await waits.backend.reads.describe_execution(parked.handle.execution_id)
    assert asked(snapshot) == (None, details)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ({"prompt": "p" * 1025}, "prompt: must be at most 1024 bytes, got 1025"),
        ({"prompt": 7}, "prompt: "),
        ({"details": "d" * 8191}, "details: is 8193 bytes long as JSON; the limit is 8192"),
        ({"details": object()}, "details: cannot be written as JSON"),
        ({"details": nested(101)}, "details: nests too deeply"),
    ],
)
async def test_a_question_that_does_not_fit_is_refused(
    waits: Waits, question: dict[str, Any], problem: str
) -> None:
    handle = await waits.engine.running()
    for call in (
        waits.park(handle=handle, **question),
        waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000, **question),
    ):
        with pytest.raises(ValidationError) as caught:
            await call
        assert (caught.value.code, caught.value.detail.startswith(problem)) == (
            "invalid_input",
            True,
        ), caught.value.detail
    assert await waits.backend.reads.read_execution_state(handle.execution_id) == "active"
