"""Python and Lua build the same key names and mean the same by a state code."""

from __future__ import annotations

import inspect
from itertools import product

import pytest

from flowfabric.core import keys
from flowfabric.core.state import CODE_LETTERS, StateVector, index_suffix, violations
from flowfabric.engine.calls import text
from tests.support.engine import Engine

TAG = "{fp:42}"
ID = "{fp:42}:11111111-2222-4333-8444-555555555555"
LANES = ["default", "a:b", "100%", "%3A", "a,b c", "x" * 64]

CASES: dict[str, list[tuple[str, ...]]] = {
    **{
        name: [(ID,)]
        for name in (
            *("core", "payload", "result", "policy", "tags", "history", "grant", "steps"),
            "unresolved",
        )
    },
    "attempt": [(ID, "0"), (ID, "4294967295")],
    "idem": [("default", "k"), ("tenant", "a:b{c}ü")],
    "index": [("all_executions",), ("lease_expiry",)],
    "lane": [(lane, name) for lane in LANES for name in ("delayed", "blocked:budget")],
    "eligible": [*((lane,) for lane in LANES), ("default", "cuda,gpu"), ("a:b", "x")],
    "worker_leases": [("host-1:7",)],
    "last_claim": [("default", "w-1"), ("a:b", "w-1")],
    "events": [()],
}


async def built_by_lua(engine: Engine, name: str, *args: str) -> str:
    reply = await engine.backend.fcall("ff_test_key", TAG, (name, *args), op="test")
    return text(reply[2])


@pytest.mark.parametrize("name", sorted(CASES))
async def test_keys(engine: Engine, name: str) -> None:
    for args in CASES[name]:
        # Twice: Lua remembers names it has built.
        for _ in range(2):
            assert await built_by_lua(engine, name, *args) == getattr(keys, name)(TAG, *args)


async def test_doorbell_and_lane_part(engine: Engine) -> None:
    for lane in LANES:
        assert await built_by_lua(engine, "wake", lane) == keys.wake(lane)
        reply = await engine.backend.fcall("ff_test_key", lane, ("lane_part",), op="test")
        assert text(reply[2]) == keys.lane_part(lane)
        assert keys.lane_of(keys.lane_part(lane)) == lane


def test_every_tagged_name_is_compared() -> None:
    tagged = {
        name
        for name, function in inspect.getmembers(keys, inspect.isfunction)
        if not name.startswith("_") and "tag" in inspect.signature(function).parameters
    }
    assert tagged == set(CASES)


def test_lane_names_cannot_collide() -> None:
    built = {keys.lane(TAG, lane, "delayed") for lane in LANES}
    assert len(built) == len(LANES)
    assert keys.lane(TAG, "a:blocked", "x") != keys.lane(TAG, "a", "blocked:x")


# --- states -------------------------------------------------------------------------------------


async def by_lua(engine: Engine, member: str, *args: str) -> str:
    reply = await engine.backend.fcall("ff_test_state", TAG, (member, *args), op="test")
    return text(reply[2])


@pytest.mark.parametrize("member", ["NEW", "ACTIVE", "EXPIRED", "REVOKED", "COMPLETED", "FAILED"])
async def test_constants_are_valid_states(engine: Engine, member: str) -> None:
    assert violations(StateVector.from_code(await by_lua(engine, member))) == []


async def test_built_states_are_valid(engine: Engine) -> None:
    built = [
        *[await by_lua(engine, "eligible", attempt) for attempt in "fitp"],
        *[await by_lua(engine, "delayed", "d", attempt) for attempt in "fi"],
        await by_lua(engine, "delayed", "b", "t"),
        await by_lua(engine, "delayed", "r", "i"),
        await by_lua(engine, "waiting_children", "i"),
        *[await by_lua(engine, "terminal", outcome, "r", "x") for outcome in "sfcxk"],
        await by_lua(engine, "terminal", "c", "f"),
        await by_lua(engine, "terminal", "c", "p"),
    ]
    for code in built:
        assert violations(StateVector.from_code(code)) == [], code


async def test_every_state_means_the_same(engine: Engine) -> None:
    """All letters of the dimensions that decide, blocking and attempt taken in turn."""
    phases, owners, eligibilities, blockings, outcomes, attempts = (
        list(letters) for letters in CODE_LETTERS.values()
    )
    for n, (phase, eligibility, outcome) in enumerate(product(phases, eligibilities, outcomes)):
        code = (
            phase
            + owners[n % len(owners)]
            + eligibility
            + blockings[n % len(blockings)]
            + outcome
            + attempts[n % len(attempts)]
        )
        vector = StateVector.from_code(code)
        assert await by_lua(engine, "public", code) == vector.public_state.value
        assert await by_lua(engine, "phase_name", code) == vector.lifecycle_phase.value
        assert await by_lua(engine, "outcome_name", code) == vector.terminal_outcome.value
        if index_suffix(vector):
            assert await by_lua(engine, "index_suffix", code) == index_suffix(vector)
