"""Admissions under a quota policy: window, slots, release, rollback (07 §10, 16.2 to 16.6)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from flowfabric.core.contracts.quotas import (
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    RateExceeded,
    Unlimited,
)
from flowfabric.core.errors import CorruptionError
from flowfabric.core.ids import ExecutionId, new_uuid
from tests.support.engine import Engine, refused, untouched
from tests.support.quotas import SLACK, SLOT, WINDOW, admit, policy, used, word

LAST = SLOT + SLACK


@pytest.fixture
async def at(engine: Engine) -> int:
    """A time at which the clock stands still."""
    now = await engine.now()
    await engine.freeze(now)
    return now


# --- the window -----------------------------------------------------------------------------------


async def test_the_window_slides(engine: Engine, at: int) -> None:
    name = await policy(engine, max_requests_per_window=2)
    assert await admit(engine, name) == "admitted"
    await engine.freeze(at + 20_000)
    assert await admit(engine, name) == "admitted"
    assert await admit(engine, name) == "rate 40000"
    await engine.freeze(at + WINDOW - 1)
    assert await admit(engine, name) == "rate 1"
    await engine.freeze(at + WINDOW)
    assert await admit(engine, name) == "admitted"
    assert await admit(engine, name) == "rate 20000"


async def test_a_denial_records_nothing(engine: Engine, at: int) -> None:
    name = await policy(engine, max_requests_per_window=1, max_concurrent=1)
    await admit(engine, name)
    async with untouched(engine):
        assert await admit(engine, name) == f"rate {WINDOW}"
    await engine.backend.quotas.update_quota_policy(name, max_requests_per_window=0)
    async with untouched(engine):
        assert await admit(engine, name) == f"concurrency {LAST}"


async def test_the_rate_is_tested_before_the_cap(engine: Engine, at: int) -> None:
    name = await policy(engine, max_requests_per_window=1, max_concurrent=1)
    await admit(engine, name)
    assert (await admit(engine, name)).startswith("rate ")


async def test_a_window_of_0_is_a_minute(engine: Engine, at: int) -> None:
    name = await policy(engine, window_seconds=0, max_requests_per_window=1)
    await admit(engine, name)
    assert await admit(engine, name) == f"rate {WINDOW}"


async def test_an_execution_counts_once_in_a_window(engine: Engine, at: int) -> None:
    name, execution_id = await policy(engine, max_requests_per_window=2), engine.new_id()
    assert await admit(engine, name, execution_id) == "admitted"
    assert await admit(engine, name, execution_id) == "already"
    await engine.backend.quotas.release_admission(name, execution_id)
    await engine.freeze(at + 1000)
    # A retry moves its entry instead of adding one.
    assert await admit(engine, name, execution_id) == "admitted"
    assert await used(engine, name) == (1, 0)
    assert await admit(engine, name) == "admitted"
    assert await admit(engine, name) == f"rate {WINDOW}"


async def test_a_retry_waits_for_a_place_as_others_do(engine: Engine, at: int) -> None:
    name, execution_id = await policy(engine, max_requests_per_window=1), engine.new_id()
    await admit(engine, name, execution_id)
    await engine.backend.quotas.release_admission(name, execution_id)
    assert await admit(engine, name, execution_id) == f"rate {WINDOW}"
    await engine.freeze(at + WINDOW)
    assert await admit(engine, name, execution_id) == "admitted"


async def test_a_guard_lives_as_long_as_its_place_in_the_window(engine: Engine, at: int) -> None:
    name, execution_id = await policy(engine, max_requests_per_window=1), engine.new_id()
    await admit(engine, name, execution_id)
    await engine.freeze(at + WINDOW - 1)
    assert await admit(engine, name, execution_id) == "already"
    await engine.freeze(at + WINDOW)
    assert await admit(engine, name, execution_id) == "admitted"


async def test_jitter_only_delays(engine: Engine, at: int) -> None:
    name = await policy(engine, max_requests_per_window=1, jitter_ms=3)
    await admit(engine, name)
    waits = {await admit(engine, name) for _ in range(200)}
    assert waits == {f"rate {WINDOW + extra}" for extra in range(4)}


# --- the slots ------------------------------------------------------------------------------------


async def test_a_cap_and_a_release(engine: Engine, at: int) -> None:
    name, first = await policy(engine, max_concurrent=2), engine.new_id()
    assert [await admit(engine, name, first), await admit(engine, name)] == ["admitted"] * 2
    assert await admit(engine, name) == f"concurrency {LAST}"
    await engine.backend.quotas.release_admission(name, first)
    assert await admit(engine, name) == "admitted"


async def test_a_slot_without_a_claim_ends_by_itself(engine: Engine, at: int) -> None:
    name = await policy(engine, max_concurrent=1)
    await admit(engine, name, slot_ttl_ms=2000)
    await engine.freeze(at + 2499)
    assert await admit(engine, name) == "concurrency 1"
    await engine.freeze(at + 2500)
    assert await admit(engine, name) == "admitted"


async def test_a_confirmed_slot_does_not(engine: Engine, at: int) -> None:
    quotas, execution_id = engine.backend.quotas, engine.new_id()
    name = await policy(engine, max_concurrent=1)
    await admit(engine, name, execution_id)
    await quotas.confirm_admission(name, execution_id)
    await quotas.confirm_admission(name, execution_id)
    await engine.freeze(at + 100 * WINDOW)
    assert await admit(engine, name) == "concurrency"
    await quotas.release_admission(name, execution_id)
    assert await admit(engine, name) == "admitted"


async def test_running_work_takes_its_slot_again_even_above_the_cap(
    engine: Engine, at: int
) -> None:
    name, late = await policy(engine, max_concurrent=1), engine.new_id()
    await admit(engine, name, late)
    await engine.freeze(at + LAST)
    assert await admit(engine, name) == "admitted"
    await engine.backend.quotas.confirm_admission(name, late)
    assert (await used(engine, name))[1] == 2
    assert (await admit(engine, name)).startswith("concurrency ")


async def test_the_first_slot_that_ends_decides_when_to_try_again(engine: Engine, at: int) -> None:
    quotas, running = engine.backend.quotas, engine.new_id()
    name = await policy(engine, max_concurrent=3)
    await admit(engine, name, running)
    await quotas.confirm_admission(name, running)
    await admit(engine, name, slot_ttl_ms=9000)
    await admit(engine, name, slot_ttl_ms=4000)
    assert await admit(engine, name) == f"concurrency {4000 + SLACK}"


async def test_admitting_again_extends_an_unconfirmed_slot(engine: Engine, at: int) -> None:
    name, execution_id = await policy(engine, max_concurrent=1), engine.new_id()
    await admit(engine, name, execution_id)
    await engine.freeze(at + 3000)
    assert await admit(engine, name, execution_id) == "already"
    assert await admit(engine, name) == f"concurrency {LAST}"
    await engine.backend.quotas.confirm_admission(name, execution_id)
    assert await admit(engine, name, execution_id) == "already"
    assert await admit(engine, name) == "concurrency"


async def test_admitting_again_never_shortens_a_slot(engine: Engine, at: int) -> None:
    """Whoever was admitted first counts on it until it ends."""
    name, execution_id = await policy(engine, max_concurrent=1), engine.new_id()
    await admit(engine, name, execution_id, slot_ttl_ms=9000)
    assert await admit(engine, name, execution_id, slot_ttl_ms=1000) == "already"
    assert await admit(engine, name) == f"concurrency {9000 + SLACK}"


async def test_an_admission_lasts_as_long_as_its_slot(engine: Engine, at: int) -> None:
    """When it has left the window, it counts again; only the first to be admitted may undo it."""
    name = await policy(engine, max_requests_per_window=1, max_concurrent=2)
    execution_id, quotas = engine.new_id(), engine.backend.quotas
    await admit(engine, name, execution_id, slot_ttl_ms=3 * WINDOW)
    await engine.freeze(at + WINDOW)
    assert await admit(engine, name, execution_id) == "already"
    assert await used(engine, name) == (1, 1)
    assert await admit(engine, name) == f"rate {WINDOW}"
    await engine.freeze(at + 2 * WINDOW)
    await admit(engine, name)
    assert await admit(engine, name, execution_id) == f"rate {WINDOW}"
    await quotas.confirm_admission(name, execution_id)
    # It runs: whoever asks for it now asks too late, and it counts no start.
    assert await admit(engine, name, execution_id) == "already"
    assert await used(engine, name) == (1, 2)


async def test_a_slot_that_ended_is_taken_again_without_a_second_entry(
    engine: Engine, at: int
) -> None:
    name = await policy(engine, max_requests_per_window=1, max_concurrent=1)
    execution_id = engine.new_id()
    await admit(engine, name, execution_id)
    await engine.freeze(at + LAST)
    assert await used(engine, name) == (1, 0)
    # The window is full, and this execution is in it.
    assert await admit(engine, name, execution_id) == "admitted"
    assert await used(engine, name) == (1, 1)
    await engine.freeze(at + WINDOW)
    assert (await used(engine, name))[0] == 0


async def test_only_other_executions_fill_the_cap(engine: Engine, at: int) -> None:
    name, execution_id = await policy(engine, max_concurrent=1), engine.new_id()
    await admit(engine, name, execution_id, slot_ttl_ms=10 * WINDOW)
    # Its place in the window has ended, the slot of its earlier run has not.
    await engine.freeze(at + WINDOW)
    assert await admit(engine, name, execution_id, run=1) == "admitted"
    assert await used(engine, name) == (1, 1)


async def test_a_cap_that_was_lowered(engine: Engine, at: int) -> None:
    name = await policy(engine, max_concurrent=3)
    ids = [engine.new_id() for _ in range(3)]
    await engine.backend.quotas.admit_many(name, ids)
    await engine.backend.quotas.confirm_many(name, ids)
    await engine.backend.quotas.update_quota_policy(name, max_concurrent=1)
    for execution_id in ids[:2]:
        await engine.backend.quotas.release_admission(name, execution_id)
        assert await admit(engine, name) == "concurrency"
    await engine.backend.quotas.release_admission(name, ids[2])
    assert await admit(engine, name) == "admitted"


async def test_a_policy_without_a_cap_keeps_no_slots(engine: Engine, at: int) -> None:
    name, execution_id = await policy(engine, max_requests_per_window=5), engine.new_id()
    await admit(engine, name, execution_id)
    async with untouched(engine):
        await engine.backend.quotas.confirm_admission(name, execution_id)
    assert await used(engine, name) == (1, 0)


async def test_a_policy_without_limits_records_nothing(engine: Engine) -> None:
    name = await policy(engine)
    async with untouched(engine):
        assert await admit(engine, name) == "admitted"
        assert await engine.backend.quotas.admit_many(name, [engine.new_id()]) == [Unlimited()]


# --- release and rollback -------------------------------------------------------------------------


async def test_a_release_repeated_frees_no_other_slot(engine: Engine, at: int) -> None:
    name, first = await policy(engine, max_concurrent=1), engine.new_id()
    await admit(engine, name, first)
    await engine.backend.quotas.release_admission(name, first)
    second = engine.new_id()
    assert await admit(engine, name, second) == "admitted"
    async with untouched(engine):
        await engine.backend.quotas.release_admission(name, first)
        await engine.backend.quotas.release_admission(name, engine.new_id())
    assert (await admit(engine, name)).startswith("concurrency ")


async def test_a_release_keeps_the_place_in_the_window(engine: Engine, at: int) -> None:
    name = await policy(engine, max_requests_per_window=2, max_concurrent=1)
    execution_id = engine.new_id()
    await admit(engine, name, execution_id)
    await engine.backend.quotas.release_admission(name, execution_id)
    assert await used(engine, name) == (1, 0)


async def test_a_rollback_frees_both(engine: Engine, at: int) -> None:
    quotas, execution_id = engine.backend.quotas, engine.new_id()
    name = await policy(engine, max_requests_per_window=1, max_concurrent=1)
    (answer,) = await quotas.admit_many(name, [execution_id])
    assert isinstance(answer, Admitted)
    await quotas.release_many(name, [execution_id], rollback=answer.request_id)
    assert await used(engine, name) == (0, 0)
    assert await admit(engine, name) == "admitted"


async def test_a_rollback_undoes_only_what_its_call_recorded(engine: Engine, at: int) -> None:
    quotas, execution_id = engine.backend.quotas, engine.new_id()
    name = await policy(engine, max_requests_per_window=1, max_concurrent=1)
    (first,) = await quotas.admit_many(name, [execution_id])
    assert isinstance(first, Admitted)
    # Another scheduler picked the same candidate, and relies on the admission.
    assert await quotas.admit_many(name, [execution_id]) == [AlreadyAdmitted()]
    async with untouched(engine):
        await quotas.release_many(name, [execution_id], rollback=first.request_id)
    # The run ended and the execution is admitted again: a late rollback must not undo that.
    await quotas.release_admission(name, execution_id)
    await engine.freeze(at + WINDOW)
    assert await admit(engine, name, execution_id) == "admitted"
    async with untouched(engine):
        await quotas.release_many(name, [execution_id], rollback=first.request_id)


# --- batches --------------------------------------------------------------------------------------


async def test_a_batch_answers_in_order(engine: Engine, at: int) -> None:
    quotas, known = engine.backend.quotas, engine.new_id()
    name = await policy(engine, max_requests_per_window=3)
    await admit(engine, name, known)
    fresh = [engine.new_id() for _ in range(3)]
    answers = await quotas.admit_many(name, [fresh[0], known, fresh[1], fresh[2], fresh[0]])
    assert [word(answer) for answer in answers] == [
        *("admitted", "already", "admitted", f"rate {WINDOW}", "admitted")
    ]
    assert await used(engine, name) == (3, 0)


async def test_a_batch_fills_the_cap_and_no_more(engine: Engine, at: int) -> None:
    name = await policy(engine, max_concurrent=2)
    answers = await engine.backend.quotas.admit_many(name, [engine.new_id() for _ in range(4)])
    assert [word(each) for each in answers] == [*["admitted"] * 2, *[f"concurrency {LAST}"] * 2]
    assert await engine.backend.quotas.admit_many(name, []) == []


async def test_a_large_batch_goes_in_parts(engine: Engine, at: int) -> None:
    quotas = engine.backend.quotas
    name = await policy(engine, max_requests_per_window=400, max_concurrent=300)
    ids = [engine.new_id() for _ in range(520)]
    answers = await quotas.admit_many(name, ids)
    assert [type(each) for each in answers[:300]] == [Admitted] * 300
    assert {type(each) for each in answers[300:]} == {ConcurrencyExceeded}
    await quotas.confirm_many(name, ids[:300])
    await quotas.release_many(name, ids)
    assert await used(engine, name) == (300, 0)
    answers = await quotas.admit_many(name, [engine.new_id() for _ in range(101)])
    assert {type(each) for each in answers[:100]} == {Admitted}
    assert type(answers[100]) is RateExceeded


async def test_a_missing_policy_limits_nothing(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    quotas, unknown, ids = engine.backend.quotas, new_uuid(), [engine.new_id(), engine.new_id()]
    async with untouched(engine):
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert await quotas.admit_many(unknown, ids) == [Unlimited(), Unlimited()]
        await quotas.confirm_many(unknown, ids)
        await quotas.release_many(unknown, ids)
        await quotas.note_blocked(unknown, ids)
        await quotas.forget_blocked(unknown, ids)
        assert (await quotas.blocked(unknown)).entries == ()
    (warning,) = [r for r in caplog.records if getattr(r, "action", "") == "quota_missing"]
    assert unknown in warning.getMessage()


async def test_a_malformed_policy_id_admits_nobody(engine: Engine) -> None:
    answers = await engine.backend.quotas.admit_many("openai", [engine.new_id()] * 2)
    assert [type(each) for each in answers] == [CorruptionError] * 2


@pytest.mark.parametrize("ttl", [0, -1, 1.5, None, True, 2**60])
async def test_the_life_of_a_slot_is_checked(engine: Engine, ttl: Any) -> None:
    name = await policy(engine, max_concurrent=1)
    await refused(
        engine.backend.quotas.check_admission(name, engine.new_id(), slot_ttl_ms=ttl),
        "invalid_input",
    )


# --- executions that wait -------------------------------------------------------------------------


async def test_executions_that_wait_are_listed_oldest_first(engine: Engine, at: int) -> None:
    quotas, name = engine.backend.quotas, await policy(engine, max_concurrent=1)
    ids = sorted(engine.new_id() for _ in range(6))
    await quotas.note_blocked(name, ids[3:])
    await engine.freeze(at + 1)
    # Noted twice, an execution keeps its place.
    await quotas.note_blocked(name, ids[:4])
    expected = [*ids[3:], *ids[:3]]
    assert list((await quotas.blocked(name)).entries) == expected
    found: list[ExecutionId] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await quotas.blocked(name, 2, cursor)
        found += page.entries
        cursor = page.next_cursor
    assert found == expected
    await quotas.forget_blocked(name, expected[:5])
    await quotas.forget_blocked(name, expected[:1])
    assert (await quotas.blocked(name)).entries == (expected[5],)


class Openings:
    """What a policy told of its openings."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[tuple[str, int | None]] = []
        engine.backend.quotas.on_quota_opened = self

    async def __call__(self, quota_policy_id: str, headroom: int | None) -> None:
        self.seen.append((quota_policy_id, headroom))

    def take(self) -> list[tuple[str, int | None]]:
        taken, self.seen = self.seen, []
        return taken


async def test_an_opening_is_told_if_executions_wait(engine: Engine, at: int) -> None:
    quotas, opened = engine.backend.quotas, Openings(engine)
    name = await policy(engine, max_requests_per_window=3, max_concurrent=2)
    first, second = engine.new_id(), engine.new_id()
    (answer, _) = await quotas.admit_many(name, [first, second])
    await quotas.release_many(name, [second])
    assert opened.take() == []
    await quotas.note_blocked(name, [engine.new_id()])
    assert opened.take() == []
    assert isinstance(answer, Admitted)
    await quotas.release_many(name, [first], rollback=answer.request_id)
    assert opened.take() == [(name, 2)]
    # Nothing was freed.
    await quotas.release_many(name, [first])
    assert opened.take() == []
    await quotas.update_quota_policy(name, max_concurrent=1)
    assert opened.take() == [(name, 1)]
    await quotas.update_quota_policy(name, max_requests_per_window=1)
    assert opened.take() == []
    await quotas.update_quota_policy(name, max_requests_per_window=0, max_concurrent=0)
    assert opened.take() == [(name, 2**53 - 1)]


async def test_a_failing_receiver_of_openings_fails_no_release(engine: Engine) -> None:
    quotas, name = engine.backend.quotas, await policy(engine, max_concurrent=1)
    first = engine.new_id()

    async def fail(*_: object) -> None:
        raise CorruptionError("corruption", "x: y: z")

    quotas.on_quota_opened = fail
    await admit(engine, name, first)
    await quotas.note_blocked(name, [engine.new_id()])
    await quotas.release_admission(name, first)
    assert await used(engine, name) == (1, 0)


async def test_an_opening_is_told_when_the_window_has_a_place(engine: Engine) -> None:
    """A release may free a slot while the window is full: nobody else would come back then."""
    quotas, told = engine.backend.quotas, asyncio.Event()

    async def opened(quota_policy_id: str, headroom: int | None) -> None:
        assert (quota_policy_id, headroom) == (name, None)
        told.set()

    quotas.on_quota_opened = opened
    name = await policy(engine, window_seconds=1, max_requests_per_window=1, max_concurrent=1)
    first = engine.new_id()
    await admit(engine, name, first)
    await quotas.note_blocked(name, [engine.new_id()])
    for _ in range(2):
        await quotas.confirm_admission(name, first)
        await quotas.release_admission(name, first)
    assert not told.is_set()
    async with asyncio.timeout(10):
        await told.wait()
    assert await admit(engine, name) == "admitted"
