"""Python and Lua build the same key names and mean the same by a state code."""

from __future__ import annotations

import inspect
import re
from itertools import product
from pathlib import Path

import pytest

import flowfabric
from flowfabric.core.state import CODE_LETTERS, StateVector
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import text
from tests.support import lua_keys
from tests.support.engine import Engine
from tests.support.state_rules import index_suffix, violations

TAG = "{fp:42}"
ID = "{fp:42}:11111111-2222-4333-8444-555555555555"
FLOW = "33333333-2222-4333-8444-555555555555"
WAITPOINT = "22222222-2222-4333-8444-555555555555"
LANES = ["default", "a:b", "100%", "%3A", "a,b c", "x" * 64]

CASES: dict[str, list[tuple[str, ...]]] = {
    **{
        name: [(ID,)]
        for name in (
            *("core", "payload", "result", "policy", "tags", "history", "grant", "steps"),
            *("suspension", "marks", "satisfiers", "met", "waitpoints"),
            *("pending_waitpoints", "signals"),
        )
    },
    **{
        name: [(ID, "0"), (ID, "4294967295")]
        for name in ("attempt", "summary", "stream", "stream_meta", "stream_closed")
    },
    **{
        name: [(FLOW,)]
        for name in ("flow", "members", "member_ids", "flow_tags", "edges", "held", "exits")
    },
    **{name: [(FLOW, ID)] for name in ("out", "into")},
    **{f"quota{part}": [(FLOW,)] for part in ("", "_window", "_guards", "_slots", "_blocked")},
    "suspend_dedup": [(ID,)],
    "waitpoint": [(WAITPOINT,)],
    "waitpoint_signals": [(WAITPOINT,)],
    "signal_dedup": [(WAITPOINT, "k"), (WAITPOINT, "a:b{c}ü")],
    "approval_dedup": [(WAITPOINT, "k"), (WAITPOINT, "a:b{c}ü")],
    "secrets": [()],
    "workers": [()],
    "drains": [()],
    "worker_alive": [("host-1:7",)],
    "worker_record": [("host-1:7",)],
    "worker_events": [()],
    "idem": [("default", "k"), ("tenant", "a:b{c}ü")],
    "index": [("all_executions",), ("lease_expiry",)],
    "lane_config": [(lane,) for lane in LANES],
    "lane": [(lane, name) for lane in LANES for name in ("delayed", "blocked:budget")],
    "eligible": [*((lane,) for lane in LANES), ("default", "cuda,gpu"), ("a:b", "x")],
    "reclaimable": [*((lane,) for lane in LANES), ("default", "cuda,gpu"), ("a:b", "x")],
    "worker_leases": [("host-1:7",)],
    "own_wake": [("w-1",)],
    "last_claim": [("default", "w-1"), ("a:b", "w-1")],
    "events": [()],
    **{name: [("billing",), ("a:b",)] for name in ("group", "group_members", "group_start")},
    "budget": [(FLOW,)],
    "budget_part": [(FLOW, "limits"), (FLOW, "by_exec:index")],
    "ledger": [(FLOW, ID)],
    **{name: [(FLOW, "k"), (FLOW, "a:b{c}ü")] for name in ("usage_mark", "settled")},
    "leader": [("",), ("0f",)],
    "leaders": [()],
}


def built_by_python(name: str, *args: str) -> str:
    return getattr(keys if hasattr(keys, name) else lua_keys, name)(*args)


async def built_by_lua(engine: Engine, name: str, *args: str, first: str = TAG) -> str:
    reply = await engine.backend.calls.fcall("ff_test_key", first, (name, *args), op="test")
    return text(reply[2])


@pytest.mark.parametrize("name", sorted(CASES))
async def test_keys(engine: Engine, name: str) -> None:
    for args in CASES[name]:
        # Twice: Lua remembers names it has built.
        for _ in range(2):
            assert await built_by_lua(engine, name, *args) == built_by_python(name, TAG, *args)


async def test_doorbell_and_lane_part(engine: Engine) -> None:
    for lane in LANES:
        assert await built_by_lua(engine, "wake", lane) == keys.wake(lane)
        assert await built_by_lua(engine, "lane_part", first=lane) == keys.lane_part(lane)
        assert keys.lane_of(keys.lane_part(lane)) == lane
        bell = keys.bell(lane, "acme gpu")
        assert await built_by_lua(engine, "bell", "acme gpu", first=lane) == bell
        assert keys.bell_parts(bell) == (lane, "acme gpu")
        assert await built_by_lua(engine, "ear", first=lane) == keys.ear(lane)
    assert keys.wake_tag(keys.wake(TAG)) == keys.wake_tag(keys.own_wake(TAG, "w-1")) == TAG


@pytest.mark.parametrize("name", ["signal", "signal_payload"])
async def test_names_that_begin_with_an_execution(engine: Engine, name: str) -> None:
    assert await built_by_lua(engine, name, WAITPOINT, first=ID) == getattr(keys, name)(
        ID, WAITPOINT
    )


def test_every_tagged_name_is_compared() -> None:
    tagged = {
        name
        for module in (keys, lua_keys)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and "tag" in inspect.signature(function).parameters
    }
    assert tagged == set(CASES)


def test_every_name_of_lua_is_compared() -> None:
    source = Path(flowfabric.__file__).parent / "lua" / "lib" / "20_keys.lua"
    written = set(re.findall(r"^(?:function )?K\.([a-z]\w*)", source.read_text(), re.MULTILINE))
    others = {"lane_part", "bell", "ear", "wake", "signal", "signal_payload"}
    assert written == set(CASES) | others


def test_lane_names_cannot_collide() -> None:
    built = {keys.lane(TAG, lane, "delayed") for lane in LANES}
    assert len(built) == len(LANES)
    assert keys.lane(TAG, "a:blocked", "x") != keys.lane(TAG, "a", "blocked:x")


# --- states -------------------------------------------------------------------------------------


async def by_lua(engine: Engine, member: str, *args: str) -> str:
    reply = await engine.backend.calls.fcall("ff_test_state", TAG, (member, *args), op="test")
    return text(reply[2])


@pytest.mark.parametrize("member", ["NEW", "ACTIVE", "EXPIRED", "REVOKED"])
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
