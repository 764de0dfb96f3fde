"""Quota policies: create, update, status, listing (07 §10, §11, 16.13, 16.16)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.quotas import QuotaExists, QuotaLimits, QuotaStatus
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import new_uuid, quota_id
from flowfabric.core.state import PublicState
from tests.support.admission import claimed, limited
from tests.support.engine import Engine, refused, untouched
from tests.support.quotas import SLACK, SLOT, WINDOW, admit, policy, used

MAX = 2**53 - 1
LIMITS: dict[str, Any] = {
    "window_seconds": 30,
    "max_requests_per_window": 7,
    "max_concurrent": 3,
    "jitter_ms": 200,
}


async def test_a_policy_is_stored(engine: Engine) -> None:
    await engine.freeze(await engine.now())
    name = await policy(engine, **LIMITS)
    status = await engine.backend.quotas.get_quota_status(name)
    assert status == QuotaStatus(quota_policy_id=name, **LIMITS, created_at=await engine.now())
    assert await engine.backend.quotas.read_quota_policy_limits(name) == QuotaLimits(**LIMITS)


async def test_a_policy_may_have_a_name(engine: Engine) -> None:
    quotas, policy_id = engine.backend.quotas, quota_id("openai")
    await quotas.create_quota_policy(policy_id, name="openai")
    assert (await quotas.get_quota_status(policy_id)).name == "openai"
    await quotas.create_quota_policy(policy_id, name="other")
    assert (await quotas.get_quota_status(policy_id)).name == "openai"
    async with untouched(engine):
        error = await refused(
            quotas.create_quota_policy(new_uuid(), name="x" * 257), "invalid_input"
        )
    assert error.detail == "name: must be at most 256 bytes, got 257"


async def test_an_existing_policy_keeps_its_limits(engine: Engine) -> None:
    quotas = engine.backend.quotas
    name = await policy(engine, **LIMITS)
    async with untouched(engine):
        assert await quotas.create_quota_policy(name, **LIMITS) == QuotaExists(name)
        for field in LIMITS:
            other: dict[str, Any] = LIMITS | {field: 1}
            outcome = await quotas.create_quota_policy(name, **other)
            assert outcome == QuotaExists(name, differs=True)


@pytest.mark.parametrize("value", [-1, MAX + 1, True, 1.5, "5", None])
@pytest.mark.parametrize("field", LIMITS)
async def test_a_limit_is_a_whole_number(engine: Engine, field: str, value: Any) -> None:
    quotas, existing = engine.backend.quotas, await policy(engine)
    async with untouched(engine):
        error = await refused(
            quotas.create_quota_policy(new_uuid(), **{field: value}), "invalid_quota_spec"
        )
        assert error.detail == f"{field}: must be a whole number from 0 to {MAX}, got {value!r}"
        if value is not None:
            await refused(
                quotas.update_quota_policy(existing, **{field: value}), "invalid_quota_spec"
            )


async def test_the_largest_limits(engine: Engine) -> None:
    name = await policy(engine, **dict.fromkeys(LIMITS, MAX))
    assert await admit(engine, name) == "admitted"
    status = await engine.backend.quotas.get_quota_status(name)
    assert (status.window_seconds, status.max_concurrent) == (MAX, MAX)
    assert (status.window_count, status.slots_held, status.retry_after_ms) == (1, 1, 0)


async def test_the_longest_window(engine: Engine) -> None:
    """One that began before 1970 holds no more than its limit, and its wait can be stored."""
    name = await policy(
        engine, window_seconds=MAX, max_requests_per_window=1, max_concurrent=0, jitter_ms=MAX
    )
    both = {await limited(engine, quota=name), await limited(engine, quota=name)}
    (started,) = await claimed(engine)
    (denied,) = both - {started}
    waiting = await engine.backend.reads.describe_execution(denied)
    assert waiting is not None
    assert (waiting.public_state, waiting.retry_at) == (PublicState.RATE_LIMITED, MAX)


async def test_an_update_changes_only_what_is_given(engine: Engine) -> None:
    quotas = engine.backend.quotas
    name = await policy(engine, **LIMITS)
    for field, before in LIMITS.items():
        await quotas.update_quota_policy(name, **{field: 5})
        # Once more, which changes nothing.
        await quotas.update_quota_policy(name, **{field: 5})
        changed = await quotas.read_quota_policy_limits(name)
        assert changed == QuotaLimits(**(LIMITS | {field: 5}))
        await quotas.update_quota_policy(name, **{field: before})


async def test_an_update_without_a_limit_is_refused(engine: Engine) -> None:
    name = await policy(engine)
    async with untouched(engine):
        error = await refused(engine.backend.quotas.update_quota_policy(name), "invalid_quota_spec")
    assert "pass one of window_seconds, max_requests_per_window" in error.detail


async def test_an_update_keeps_the_window_and_the_slots(engine: Engine) -> None:
    name = await policy(engine, max_requests_per_window=2, max_concurrent=2)
    assert [await admit(engine, name) for _ in range(2)] == ["admitted"] * 2
    await engine.backend.quotas.update_quota_policy(name, max_requests_per_window=3)
    assert await used(engine, name) == (2, 2)
    assert (await admit(engine, name)).startswith("concurrency ")
    await engine.backend.quotas.update_quota_policy(name, max_concurrent=0)
    assert await admit(engine, name) == "admitted"
    assert (await admit(engine, name)).startswith("rate ")


async def test_a_shorter_window_applies_at_once(engine: Engine) -> None:
    name = await policy(engine, max_requests_per_window=1)
    await admit(engine, name)
    await engine.advance(10_000)
    await engine.backend.quotas.update_quota_policy(name, window_seconds=5)
    assert await admit(engine, name) == "admitted"


async def test_unknown_policies(engine: Engine) -> None:
    quotas, unknown, execution_id = engine.backend.quotas, new_uuid(), engine.new_id()
    async with untouched(engine):
        for call in (
            quotas.update_quota_policy(unknown, jitter_ms=1),
            quotas.get_quota_status(unknown),
            quotas.check_admission(unknown, execution_id),
            quotas.confirm_admission(unknown, execution_id),
            quotas.release_admission(unknown, execution_id),
        ):
            await refused(call, "quota_policy_not_found")
        assert await quotas.read_quota_policy_limits(unknown) is None
        assert (await quotas.list_quota_policies()).entries == ()


@pytest.mark.parametrize("wrong", ["", "openai", "ABC", "3392DF6F-B701-5C6E-B310-E2E3A6747330"])
async def test_malformed_ids(engine: Engine, wrong: str) -> None:
    quotas, execution_id = engine.backend.quotas, engine.new_id()
    async with untouched(engine):
        for call in (
            quotas.create_quota_policy(wrong),
            quotas.update_quota_policy(wrong, jitter_ms=1),
            quotas.get_quota_status(wrong),
            quotas.read_quota_policy_limits(wrong),
            quotas.check_admission(wrong, execution_id),
        ):
            error = await refused(call, "invalid_input")
            assert error.detail.startswith("quota_policy_id: InvalidUuid")


async def test_the_status_counts_what_is_used(engine: Engine) -> None:
    await engine.freeze(now := await engine.now())
    name = await policy(engine, max_requests_per_window=2, max_concurrent=5)
    await admit(engine, name)
    await engine.freeze(now + 1000)
    status = await engine.backend.quotas.get_quota_status(name)
    assert (status.window_count, status.slots_held) == (1, 1)
    assert (status.oldest_entry_at, status.retry_after_ms) == (now, 0)
    await admit(engine, name)
    status = await engine.backend.quotas.get_quota_status(name)
    assert (status.window_count, status.retry_after_ms) == (2, WINDOW - 1000)
    # Slots without a claim end by themselves, entries of the window with it.
    await engine.freeze(now + SLOT + SLACK)
    status = await engine.backend.quotas.get_quota_status(name)
    assert (status.window_count, status.slots_held) == (2, 1)
    await engine.freeze(now + WINDOW + 1000)
    status = await engine.backend.quotas.get_quota_status(name)
    assert (status.window_count, status.oldest_entry_at) == (0, None)


async def test_the_status_says_when_a_slot_is_free(engine: Engine) -> None:
    await engine.freeze(await engine.now())
    name = await policy(engine, max_concurrent=1)
    execution_id = engine.new_id()
    await admit(engine, name, execution_id)
    status = await engine.backend.quotas.get_quota_status(name)
    assert status.retry_after_ms == SLOT + SLACK
    await engine.backend.quotas.confirm_admission(name, execution_id)
    assert (await engine.backend.quotas.get_quota_status(name)).retry_after_ms is None


async def test_policies_are_listed_in_the_order_of_their_ids(engine: Engine) -> None:
    quotas = engine.backend.quotas
    names = sorted([await policy(engine, max_requests_per_window=n) for n in range(1, 12)])
    page = await quotas.list_quota_policies()
    assert [row.quota_policy_id for row in page.entries] == names
    assert page.next_cursor is None
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        part = await quotas.list_quota_policies(cursor, limit=3)
        assert len(part.entries) <= 3
        found += [row.quota_policy_id for row in part.entries]
        cursor = part.next_cursor
    assert found == names
    assert (await quotas.list_quota_policies(limit=0)).entries == ()


async def test_a_cursor_of_another_listing_is_refused(engine: Engine) -> None:
    with pytest.raises(ValidationError, match="invalid_cursor"):
        await engine.backend.quotas.list_quota_policies("nonsense")


async def test_administration_is_told_to_operators(engine: Engine) -> None:
    async with await engine.backend.events.subscribe_operator_events() as feed:
        name = await policy(engine, max_requests_per_window=2)
        await engine.backend.quotas.update_quota_policy(name, max_concurrent=4, jitter_ms=0)
        created, updated = await anext(feed), await anext(feed)
    assert not isinstance(created, Exception)
    assert not isinstance(updated, Exception)
    assert (created.type, created.execution_id) == ("quota_created", None)
    assert created.fields == {
        "quota_policy_id": name,
        "window_seconds": 60,
        "max_requests_per_window": 2,
        "max_concurrent": 0,
        "jitter_ms": 0,
    }
    assert (updated.type, updated.fields) == (
        "quota_updated",
        {"quota_policy_id": name, "max_concurrent": 4},
    )
