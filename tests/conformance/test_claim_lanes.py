"""Lanes: registry, states, settings, and what waits in them (04 §1, §3, S8, S9, S12)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from tests.support.engine import Engine, refused, untouched

GPU: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu"]}}


# --- registry ------------------------------------------------------------------------


async def test_a_first_submission_registers_its_lane(engine: Engine) -> None:
    assert (await engine.backend.lanes.list_lanes())[0] == ["default"]
    await refused(engine.backend.lanes.get_lane("new lane"), "lane_not_found")
    await engine.create(lane="new lane")
    assert (await engine.backend.lanes.list_lanes())[0] == ["default", "new lane"]
    settings = await engine.backend.lanes.get_lane("new lane")
    assert (settings.state, settings.reason) == ("active", "")
    assert (settings.priority_weight_ms, settings.reclaim_grace_ms) == (10**12, 0)
    assert settings.emit_renewals is False


async def test_lanes_are_listed_by_name_in_pages(engine: Engine) -> None:
    for lane in ("b", "a", "c", "d"):
        await engine.backend.lanes.set_lane_state(lane, "active")
    backend = engine.backend
    assert await backend.lanes.list_lanes(limit=2) == (["a", "b"], "b")
    assert await backend.lanes.list_lanes("b", 2) == (["c", "d"], "d")
    assert await backend.lanes.list_lanes("d", 2) == (["default"], None)
    assert await backend.lanes.list_lanes("default", 2) == ([], None)
    assert await backend.lanes.list_lanes(limit=5) == (["a", "b", "c", "d", "default"], None)
    assert await backend.lanes.list_lanes(limit=0) == ([], None)


@pytest.mark.parametrize("lane", ["", "x" * 65, "tab\t", "ü"])
async def test_lane_names_are_checked_everywhere(engine: Engine, lane: str) -> None:
    backend = engine.backend
    async with untouched(engine):
        await refused(backend.lanes.get_lane(lane), "invalid_input")
        await refused(backend.lanes.set_lane_state(lane, "paused"), "invalid_input")
        await refused(backend.lanes.set_lane_config(lane, reclaim_grace_ms=1), "invalid_input")
        await refused(backend.claims.scan_eligible_executions(lane, "{fp:0}", 1), "invalid_input")


@pytest.mark.parametrize("state", ["", "Active", "closed"])
async def test_an_unknown_state_is_refused(engine: Engine, state: str) -> None:
    async with untouched(engine):
        await refused(engine.backend.lanes.set_lane_state("default", state), "invalid_input")


@pytest.mark.parametrize("state", ["draining", "disabled"])
async def test_a_lane_that_takes_nothing_names_its_state(engine: Engine, state: str) -> None:
    await engine.create()  # so that lane and partition are registered
    await engine.backend.lanes.set_lane_state("default", state)
    async with untouched(engine):
        error = await refused(engine.create(), "lane_not_accepting")
    assert error.detail == state


# --- settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"priority_weight_ms": 0},
        {"priority_weight_ms": 10**12 + 1},
        {"priority_weight_ms": True},
        {"reclaim_grace_ms": -1},
        {"reclaim_grace_ms": 10**12 + 1},
        {"priority_weight_ms": 1.5},
        {"reclaim_grace_ms": "5"},
        {"emit_renewals": "no"},
    ],
)
async def test_settings_out_of_range_are_refused(engine: Engine, bad: dict[str, Any]) -> None:
    async with untouched(engine):
        await refused(engine.backend.lanes.set_lane_config("default", **bad), "invalid_input")


async def test_a_reason_is_text(engine: Engine) -> None:
    number: Any = 5
    async with untouched(engine):
        await refused(
            engine.backend.lanes.set_lane_state("mails", "paused", number), "invalid_input"
        )
    assert (
        await engine.backend.lanes.set_lane_state("mails", "paused", "odd \ud800 one") == "active"
    )
    assert await engine.backend.lanes.set_lane_state("mails", "draining", "x" * 5000) == "paused"
    assert len((await engine.backend.lanes.get_lane("mails")).reason) == 4096


async def test_settings_are_kept_one_by_one(engine: Engine) -> None:
    backend = engine.backend
    await backend.lanes.set_lane_config("default", priority_weight_ms=60_000)
    await backend.lanes.set_lane_config("default", reclaim_grace_ms=5, emit_renewals=True)
    await backend.lanes.set_lane_state("default", "paused")
    settings = await backend.lanes.get_lane("default")
    assert (settings.priority_weight_ms, settings.reclaim_grace_ms) == (60_000, 5)
    assert (settings.emit_renewals, settings.state) == (True, "paused")


async def test_a_smaller_weight_lets_age_win(engine: Engine) -> None:
    """With a minute a point, five points are worth five minutes of waiting."""
    await engine.backend.lanes.set_lane_config("default", priority_weight_ms=60_000)
    start = await engine.now()
    await engine.freeze(start)
    old = await engine.create()
    await engine.freeze(start + 4 * 60_000)
    urgent = await engine.create(priority=5)
    await engine.freeze(start + 6 * 60_000)
    late = await engine.create(priority=5)
    claims = await engine.claim_all()
    assert [claim.execution_id for claim in claims] == [urgent, old, late]


# --- what waits ------------------------------------------------------------------------


async def test_scanning_shows_what_waits_in_order_and_reserves_nothing(engine: Engine) -> None:
    made: list[ExecutionId] = []
    for policy in (None, GPU, None, GPU):
        made.append(await engine.create(policy=policy))
        await engine.advance(2)
    urgent = await engine.create(priority=1)
    await engine.create(delay_until=await engine.now() + 60_000)
    tag, backend = urgent.tag, engine.backend
    async with untouched(engine):
        assert await backend.claims.scan_eligible_executions("default", tag, 10) == [urgent, *made]
        assert await backend.claims.scan_eligible_executions("default", tag, 3) == [
            urgent,
            *made[:2],
        ]
        assert await backend.claims.scan_eligible_executions("default", tag, 0) == []
        assert await backend.claims.scan_eligible_executions("elsewhere", tag, 10) == []
