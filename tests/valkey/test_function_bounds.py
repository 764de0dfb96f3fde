"""Library functions that test_bounds.py does not cover stay short at their limits."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import flowfabric
from flowfabric.core.conditions import AllOf, Single
from flowfabric.core.contracts.executions import Created, NewExecution
from flowfabric.core.contracts.leases import Candidate, Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.policy import parse_policy
from flowfabric.engine.api.admission import Block
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from tests.support import lua_keys
from tests.support.engine import LANE, Engine
from tests.support.flows import without_followups
from tests.support.server_time import LONGEST_US, ONCE_US, assert_short, command, copy, times, uuids
from tests.support.suspension import Waits

_DRIVEN_IN = ("bounds", "function_bounds", "page_bounds", "flow_bounds")
_FILES = [f"test_{name}.py" for name in (*_DRIVEN_IN, "budget_bounds", "quota_bounds", "steps")]
MB = 1_048_576
TAGS = {f"app.t{n}": "x" * 4096 for n in range(128)}
CAPABILITIES = [f"capability-{n}" for n in range(256)]

ONE_RECORD = "reads and writes a fixed number of fields of one record"
CONSTANT = {
    "ff_ack_cancel": ONE_RECORD,
    "ff_add_to_flow": ONE_RECORD,
    "ff_change_priority": ONE_RECORD,
    "ff_create_flow": ONE_RECORD,
    "ff_promote_blocked": ONE_RECORD,
    "ff_set_join": ONE_RECORD,
    "ff_close_waitpoint": ONE_RECORD,
    "ff_create_waitpoint": ONE_RECORD,
    "ff_ask_parent": ONE_RECORD,
    "ff_delay": ONE_RECORD,
    "ff_group_lease": ONE_RECORD,
    "ff_hold_budget": ONE_RECORD,
    "ff_lead": ONE_RECORD,
    "ff_progress": ONE_RECORD,
    "ff_quota_create": ONE_RECORD,
    "ff_quota_update": ONE_RECORD,
    "ff_release_grant": ONE_RECORD,
    "ff_release_unknown": ONE_RECORD,
    "ff_resign": ONE_RECORD,
    "ff_revoke": ONE_RECORD,
    "ff_wait_children": ONE_RECORD,
    "ff_waitpoint_token": ONE_RECORD,
    "ff_worker_dead": ONE_RECORD,
    "ff_worker_drain": ONE_RECORD,
    "ff_refuse_claims": "its callers name one process",
    "ff_worker_heartbeat": ONE_RECORD,
    "ff_listen_here": "tests/cluster/test_doorbells.py measures it: only a cluster has it",
    "ff_version": "returns constants",
}
"""Functions whose cost depends on no list, no batch and no payload."""


def test_every_function_is_driven_to_its_limits() -> None:
    stored = Path(flowfabric.__file__).parent / "lua" / "functions"
    functions = {path.stem for path in stored.glob("*.lua")}
    here = Path(__file__)
    sources = "".join((here.with_name(name)).read_text() for name in _FILES)
    driven = set(re.findall(r'(?:assert_short|times)\(\s*engine, "(ff_\w+)"', sources))
    assert driven | set(CONSTANT) == functions
    assert not driven & set(CONSTANT)


def new(engine: Engine, **fields: Any) -> NewExecution:
    return NewExecution(execution_id=engine.new_id(), execution_kind="job", **fields)


async def loaded(engine: Engine) -> ExecutionId:
    """An execution with all that a claim carries."""
    required = {"required_capabilities": CAPABILITIES}
    return await engine.create(
        input_payload=b"x" * MB, tags=TAGS, policy={"routing_requirements": required}
    )


async def burdened(engine: Engine, waitpoints: int) -> Handle:
    """A running execution with many unused waitpoints."""
    handle = await engine.running(tags=TAGS)
    tag, execution_id = handle.execution_id.tag, handle.execution_id
    point = await engine.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    names = [new_uuid() for _ in range(waitpoints - 1)]
    for key in (lua_keys.waitpoints(tag, execution_id), keys.pending_waitpoints(tag, execution_id)):
        await command(engine, "SADD", key, *names)
    stored = keys.waitpoint(tag, point.waitpoint_id)
    await copy(engine, stored, (keys.waitpoint(tag, name) for name in names))
    return handle


# --- batches ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "size", "limit"), [(257, 1, "256 items"), (9, MB, "8388608 bytes")]
)
async def test_the_server_refuses_oversized_batches(
    engine: Engine, items: int, size: int, limit: str
) -> None:
    tag = engine.new_id().tag
    before = await engine.digest()
    creation = [
        part for _ in range(items) for part in (engine.new_id(), "job", b"x" * size, "", "")
    ]
    completion = [
        part for _ in range(items) for part in (engine.new_id(), "", "", "1", b"x" * size)
    ]
    for function, args in (("ff_create", ["", *creation]), ("ff_complete", [items, *completion])):
        with pytest.raises(EngineError) as caught:
            await engine.backend.calls.fcall(function, tag, args, op="test")
        assert (caught.value.code, caught.value.details) == ("batch_too_large", (limit,))
    assert await engine.digest() == before


async def test_large_tags_and_policies_travel_in_parts(engine: Engine) -> None:
    required = [
        parse_policy({"routing_requirements": {"required_capabilities": [f"{n}-{'x' * 4000}"]}})
        for n in range(64)
    ]

    async def create() -> None:
        items = [new(engine, tags=TAGS, policy=required[n]) for n in range(64)]
        outcomes = await engine.backend.executions.create_many(items)
        assert not [each for each in outcomes if isinstance(each, EngineError)]

    async def claim() -> None:
        assert len(await engine.claim_all(64, capabilities=[])) == 8

    async def create_plain() -> None:
        await engine.backend.executions.create_many([new(engine, tags=TAGS) for _ in range(16)])

    await assert_short(engine, "ff_create", create)
    await assert_short(engine, "ff_claim_many", claim, create_plain)


async def test_ending_many_executions_with_many_waitpoints_and_tags(engine: Engine) -> None:
    await Waits.open(engine)
    handles = [await burdened(engine, 400) for _ in range(16)]

    async def complete() -> None:
        items = [Completion(handle) for handle in handles]
        assert all(
            not isinstance(each, EngineError)
            for each in await engine.backend.executions.complete_many(items)
        )

    assert max(await times(engine, "ff_complete", complete)) <= ONCE_US


async def test_holding_many_back_and_letting_them_go(engine: Engine) -> None:
    admission = engine.backend.admission
    outcomes = await engine.backend.executions.create_many([new(engine) for _ in range(256)])
    ids = [each.execution_id for each in outcomes if isinstance(each, Created)]

    async def block() -> None:
        blocks = [
            Block(execution_id=each, reason="waiting_for_budget", detail="x" * 4096) for each in ids
        ]
        await admission.block_many(ids[0].tag, blocks)

    async def unblock() -> None:
        await admission.unblock_many(ids[0].tag, ids, "waiting_for_budget")

    await assert_short(engine, "ff_block", block, unblock)
    await assert_short(engine, "ff_unblock", unblock, block)
    assert len(await engine.claim_all(256)) == 256


async def test_claiming_and_returning_many_admitted(engine: Engine) -> None:
    admission, claims = engine.backend.admission, engine.backend.claims
    policy = parse_policy({"quota_policy_id": new_uuid(), "budget_ids": [new_uuid()]})
    await without_followups(engine)
    ids: list[ExecutionId] = []

    async def create() -> None:
        outcomes = await engine.backend.executions.create_many(
            [new(engine, policy=policy) for _ in range(256)]
        )
        ids[:] = [each.execution_id for each in outcomes if isinstance(each, Created)]

    async def claim() -> None:
        asked = [Candidate(each) for each in ids]
        held = await claims.claim_admitted(engine.want(), ids[0].tag, asked)
        items = [Completion(each.handle) for each in held]
        await engine.backend.executions.complete_many(items)

    async def create_and_claim() -> None:
        await create()
        await claim()

    async def deliver() -> None:
        await admission.deliver_returns(ids[0].tag)

    await assert_short(engine, "ff_claim_admitted", claim, create)
    await assert_short(engine, "ff_ack_returns", deliver, create_and_claim)


# --- one execution with all it may have -------------------------------------------


async def test_endings_of_a_burdened_execution(engine: Engine) -> None:
    await Waits.open(engine)
    backend = engine.backend

    async def fail() -> None:
        await backend.executions.fail(await burdened(engine, 1000), "no", "x")

    async def cancel() -> None:
        handle = await burdened(engine, 1000)
        await backend.executions.cancel_execution(handle.execution_id, source="operator_override")

    await assert_short(engine, "ff_fail", fail)
    await assert_short(engine, "ff_cancel", cancel)


async def test_joining_a_group_of_a_thousand(engine: Engine) -> None:
    async def join() -> None:
        for n in range(1000):
            args = ("g", f"member-{n}", 30_000, "start")
            await engine.backend.calls.fcall("ff_group_join", "{fp:0}", args, op="test")

    await assert_short(engine, "ff_group_join", join)


async def test_claims_by_grant(engine: Engine) -> None:
    backend = engine.backend
    worker: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}

    async def by_grant() -> None:
        execution_id = await loaded(engine)
        grant = await backend.claims.issue_claim_grant(
            execution_id, worker_capabilities=CAPABILITIES, **worker
        )
        await backend.claims.claim_execution(grant, lease_ttl_ms=1000, **worker)
        await engine.advance(2000)
        await backend.upkeep.mark_lease_expired_if_due(execution_id.tag, [execution_id])
        again: Any = await backend.claims.issue_reclaim_grant(
            execution_id, worker_capabilities=CAPABILITIES, **worker
        )
        await backend.claims.reclaim_execution(again.grant, lease_ttl_ms=1000, **worker)

    async def by_operator() -> None:
        await backend.claims.issue_grant_and_claim(await loaded(engine), lease_duration_ms=1000)

    await assert_short(engine, "ff_issue_claim_grant", by_grant)
    await assert_short(engine, "ff_claim_execution", by_grant)
    await assert_short(engine, "ff_issue_reclaim_grant", by_grant)
    await assert_short(engine, "ff_reclaim", by_grant)
    await assert_short(engine, "ff_grant_and_claim", by_operator)


async def test_resuming_from_many_waitpoints(engine: Engine) -> None:
    waits = await Waits.open(engine)
    backend = engine.backend
    worker: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
    condition = AllOf(tuple(Single(f"k{n}") for n in range(64)))

    async def resume() -> None:
        handle = await engine.running(tags=TAGS, input_payload=b"x" * MB)
        await waits.park(condition, handle=handle)
        await backend.suspensions.resume_execution(handle.execution_id)
        grant = await backend.claims.issue_claim_grant(handle.execution_id, **worker)
        await backend.claims.claim_resumed_execution(grant, lease_ttl_ms=1000, **worker)

    await assert_short(engine, "ff_resume", resume)
    await assert_short(engine, "ff_claim_resumed", resume)


async def test_tags_of_an_execution_have_a_limit(engine: Engine) -> None:
    execution_id = await engine.create()
    tags = TAGS

    async def tag() -> None:
        await engine.backend.executions.set_execution_tags(execution_id, tags)

    await assert_short(engine, "ff_set_tags", tag)
    for _ in range(3):  # Replacing tags takes no further room.
        await tag()
    tags = {f"b{name}": value for name, value in list(TAGS.items())[:120]}
    await tag()
    tags = {f"c{name}": value for name, value in TAGS.items()}
    with pytest.raises(EngineError, match=r"tag_limit_exceeded: 1048576 bytes"):
        await tag()
    flat = [part for n in range(129) for part in (f"t.{n}", "x")]
    with pytest.raises(EngineError, match=r"tag_limit_exceeded: 128 pairs"):
        await engine.backend.calls.fcall(
            "ff_set_tags", execution_id.tag, (execution_id, *flat), op="test"
        )


@pytest.mark.corrupts
async def test_replaying_what_left_much(engine: Engine) -> None:
    handle = await engine.running(policy={"max_replay_count": 1000})
    tag, execution_id = handle.execution_id.tag, handle.execution_id
    await command(engine, "SADD", lua_keys.waitpoints(tag, execution_id), *uuids(10_000))

    async def end() -> None:
        steps = [part for n in range(10_000) for part in (f"step{n}", "x" * 100)]
        for start in range(0, len(steps), 2000):
            part = steps[start : start + 2000]
            await command(engine, "HSET", lua_keys.steps(tag, execution_id), *part)
        (claim,) = await engine.claim_all(1) or [None]
        held = handle if claim is None else claim.handle
        await engine.backend.executions.complete(held, b"x" * MB)

    async def replay() -> None:
        await engine.backend.executions.replay_execution(execution_id)

    await assert_short(engine, "ff_replay", replay, end)


@pytest.mark.corrupts
async def test_deleting_what_executions_left(engine: Engine) -> None:
    ended: list[ExecutionId] = []
    for n in range(21):
        handle = await engine.running()
        execution_id, tag = handle.execution_id, handle.execution_id.tag
        await engine.backend.executions.complete(handle)
        ids = [f"{n:08d}{each[8:]}" for each in uuids(2000)]
        await command(engine, "SADD", lua_keys.waitpoints(tag, execution_id), *ids)
        await command(engine, "SET", "filler", "x" * 100)
        await copy(engine, "filler", (keys.waitpoint(tag, each) for each in ids))
        ended.append(execution_id)
    await engine.advance(90_000_000)
    tag, by_hand = ended[0].tag, ended.pop()

    async def purge_one() -> None:
        await engine.backend.executions.purge_execution(by_hand)

    async def trim() -> None:
        verdicts = await engine.backend.upkeep.trim_retention(tag, LANE, ended)
        assert verdicts == ["purging"] * 20

    async def create() -> None:
        item = NewExecution(execution_id=ended[0], execution_kind="job")
        with pytest.raises(EngineError, match="execution_being_deleted"):
            await engine.backend.executions.create_execution(item)
        outcome = await engine.backend.executions.create_execution(item)
        assert isinstance(outcome, Created)

    async def purge() -> None:
        while await engine.backend.upkeep.purge(tag):
            pass

    assert max(await times(engine, "ff_purge_execution", purge_one)) <= ONCE_US
    assert max(await times(engine, "ff_trim", trim)) <= ONCE_US
    assert max(await times(engine, "ff_create", create)) <= ONCE_US
    # All its calls delete as much, so the median tells how long one takes on a busy machine, too.
    assert median(await times(engine, "ff_purge", purge)) <= LONGEST_US
    assert await command(engine, "KEYS", "ff:wp:*") == []
