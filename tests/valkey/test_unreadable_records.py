"""A record that cannot be read: every call says which field, and writes nothing (02 §16)."""

from __future__ import annotations

import string
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import CorruptionError
from flowfabric.core.state import CODE_LETTERS
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.engine import TTL, Engine, unchanged
from tests.support.executions import Case
from tests.support.leases import OTHER, WORKER, a_grant, lapsed
from tests.support.storage import write

pytestmark = pytest.mark.corrupts

Call = Callable[[ValkeyBackend, Handle], Awaitable[Any]]

CALLS: dict[str, Call] = {
    "complete": lambda b, h: b.executions.complete(h, b"r"),
    "renew": lambda b, h: b.leases.renew(h),
    "fail": lambda b, h: b.executions.fail(h, "x", "transient"),
    "cancel": lambda b, h: b.executions.cancel_execution(h.execution_id),
    "worker cancel": lambda b, h: b.executions.cancel(h),
    "delay": lambda b, h: b.executions.delay(h, 1),
    "release_unknown": lambda b, h: b.executions.release_unknown(h, "job"),
    "wait_children": lambda b, h: b.executions.wait_children(h),
    "progress": lambda b, h: b.executions.progress(h, 5),
    "revoke": lambda b, h: b.leases.revoke_lease(h.execution_id),
    "priority": lambda b, h: b.executions.change_priority(h.execution_id, 5),
    "replay": lambda b, h: b.executions.replay_execution(h.execution_id),
    "claim grant": lambda b, h: b.claims.issue_claim_grant(h.execution_id, **WORKER),
    "reclaim grant": lambda b, h: b.claims.issue_reclaim_grant(h.execution_id, **OTHER),
    "claim": lambda b, h: b.claims.claim_execution(
        a_grant(h.execution_id), **WORKER, lease_ttl_ms=TTL
    ),
    "resumed claim": lambda b, h: b.claims.claim_resumed_execution(
        a_grant(h.execution_id), **WORKER, lease_ttl_ms=TTL
    ),
    "fused claim": lambda b, h: b.claims.issue_grant_and_claim(
        h.execution_id, lease_duration_ms=TTL
    ),
    "create waitpoint": lambda b, h: b.waitpoints.create_waitpoint(h, "k", 1000),
    "record step": lambda b, h: b.steps.record_step(h.execution_id, h, "s"),
    "resume": lambda b, h: b.suspensions.resume_execution(h.execution_id),
}
USING_THE_LEASE = (
    "complete",
    "renew",
    "fail",
    "worker cancel",
    "delay",
    "release_unknown",
    "wait_children",
    "progress",
    "create waitpoint",
    "record step",
)


@pytest.mark.parametrize("state", ["qqqqqq", "alnnn", "alnnnr!", "xlnnnr"])
@pytest.mark.parametrize("name", sorted(CALLS))
async def test_an_unknown_state(engine: Engine, name: str, state: str) -> None:
    handle = await engine.running()
    await write(engine, handle.execution_id, state=state)
    error = await unchanged(engine, lambda: CALLS[name](engine.backend, handle))
    assert isinstance(error, CorruptionError), error
    assert error.detail == f"{handle.execution_id}: state: '{state}' is not a state code"


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_a_missing_state(engine: Engine, name: str) -> None:
    handle = await engine.running()
    core = keys.core(handle.execution_id.tag, handle.execution_id)
    await engine.backend.transport.call("HDEL", core, "state")
    error = await unchanged(engine, lambda: CALLS[name](engine.backend, handle))
    assert isinstance(error, CorruptionError), error
    assert error.detail == f"{handle.execution_id}: state: is missing"


@pytest.mark.parametrize("name", USING_THE_LEASE)
@pytest.mark.parametrize("field", ["lease_expires_at", "lease"])
async def test_an_unreadable_lease(engine: Engine, name: str, field: str) -> None:
    handle = await engine.running()
    core = keys.core(handle.execution_id.tag, handle.execution_id)
    if field == "lease":
        await engine.backend.transport.call("HDEL", core, field)
        problem = "is missing though the execution is active"
    else:
        await write(engine, handle.execution_id, lease_expires_at="soon")
        problem = "'soon' is not a number"
    error = await unchanged(engine, lambda: CALLS[name](engine.backend, handle))
    assert isinstance(error, CorruptionError), error
    assert error.detail == f"{handle.execution_id}: {field}: {problem}"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("complete", "retention_ms"),
        ("cancel", "retention_ms"),
        ("cancel", "lease"),
        ("fail", "retry_count"),
        ("fail", "attempt"),
        ("delay", "created_at"),
        ("revoke", "priority"),
        ("wait_children", "created_at"),
    ],
)
async def test_nothing_is_half_done(engine: Engine, name: str, field: str) -> None:
    """The field is needed only after the first write."""
    case = await Case.make(engine, "active")
    await write(engine, case.execution_id, **{field: "soon"})
    error = await unchanged(engine, lambda: CALLS[name](engine.backend, case.held))
    assert isinstance(error, CorruptionError), error
    assert error.detail.startswith(f"{case.execution_id}: {field}: 'soon' is not ")


async def test_a_batch_names_the_field_too(engine: Engine) -> None:
    handle = await engine.running()
    await write(engine, handle.execution_id, lease_expires_at="soon")
    wanted = f"{handle.execution_id}: lease_expires_at: 'soon' is not a number"
    for outcome in (
        await engine.backend.executions.complete_many([Completion(handle)]),
        await engine.backend.leases.renew_many([handle]),
    ):
        assert [error.detail for error in outcome if isinstance(error, CorruptionError)] == [wanted]


async def test_what_is_no_record_at_all(engine: Engine) -> None:
    handle = await engine.running()
    core = keys.core(handle.execution_id.tag, handle.execution_id)
    await engine.backend.transport.call("SET", core, "text")
    error = await unchanged(
        engine, lambda: engine.backend.executions.cancel_execution(handle.execution_id)
    )
    assert isinstance(error, CorruptionError)
    assert error.detail == f"{handle.execution_id}: record: is not a hash"


async def test_other_stored_data(engine: Engine) -> None:
    handle = await engine.running()
    eid = handle.execution_id
    await write(engine, eid, deps="many")
    error = await unchanged(engine, lambda: engine.backend.executions.wait_children(handle))
    assert isinstance(error, CorruptionError)
    assert error.detail == f"{eid}: deps: 'many' are not counters"


async def test_a_claim_passes_by_what_it_cannot_read(engine: Engine) -> None:
    broken = await engine.create(
        priority=9, policy={"timeout_policy": {"attempt_timeout_ms": 5000}}
    )
    lost = await lapsed(engine, priority=8)
    whole = await engine.create()
    await write(engine, broken, attempt_timeout_ms="soon")
    await write(engine, lost.execution_id, lease="none", created_at="1")
    before = {eid: await _stored(engine, eid) for eid in (broken, lost.execution_id)}
    for _ in range(2):
        claims = await engine.claim_all(1)
        assert [claim.execution_id for claim in claims] in ([whole], [])
    assert {eid: await _stored(engine, eid) for eid in before} == before
    index = keys.eligible(broken.tag, "default")
    assert await engine.backend.transport.call("ZSCORE", index, broken) is not None


async def _stored(engine: Engine, execution_id: Any) -> Any:
    core = keys.core(execution_id.tag, execution_id)
    return await engine.backend.transport.call("HGETALL", core)


async def test_a_remembered_claim_of_what_has_become_unreadable(engine: Engine) -> None:
    await engine.create()
    other = await engine.create()
    want, request = engine.want(), "11111111-2222-4333-8444-555555555555"
    tag = other.tag
    first = await engine.backend.claims.claim_many(want, tag, 2, request_id=request)
    await write(engine, first.claims[0].execution_id, state="qqqqqq")
    repeated = await engine.backend.claims.claim_many(want, tag, 2, request_id=request)
    assert repeated.claims == first.claims[1:]


async def test_the_letters_of_both_languages(engine: Engine) -> None:
    """What Python reads as a state, the functions read, and nothing else."""
    base = "ruewnf"

    async def is_code(code: str) -> bool:
        reply = await engine.backend.calls.fcall(
            "ff_test_state", "{fp:0}", ("is_code", code), op="test"
        )
        return len(reply) > 2 and reply[2] == 1

    for place, letters in enumerate(CODE_LETTERS.values()):
        found = {
            letter
            for letter in string.printable
            if await is_code(base[:place] + letter + base[place + 1 :])
        }
        assert found == set(letters)
