"""What the engine refuses to suspend, in the order of its checks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import Single, all_of_waitpoints
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.suspension import FreshWaitpoint, Suspended, UsePending
from flowfabric.core.ids import new_uuid
from tests.engine.probes import fields, freeze, refused, running, untouched, write
from tests.support.engine import TTL, Engine
from tests.support.suspension import GO, Waits


def fence(handle: Handle, **changes: Any) -> Fence:
    return msgspec.structs.replace(handle.fence, **changes)


async def test_a_missing_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    ghost = engine.new_id()
    await refused(
        "execution_not_found",
        waits.backend.suspensions.suspend_by_triple(ghost, Fence("", None, "", None), condition=GO),
    )
    nonsense: Any = "nonsense"
    await refused(
        "invalid_input",
        waits.backend.suspensions.suspend_by_triple(nonsense, handle.fence, condition=GO),
    )


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"lease_id": "", "lease_epoch": None, "attempt_id": ""}, "fence_required"),
        ({"lease_id": ""}, "partial_fence_triple"),
        ({"lease_epoch": None}, "partial_fence_triple"),
        ({"attempt_id": ""}, "partial_fence_triple"),
        ({"lease_id": new_uuid()}, "stale_lease"),
        ({"lease_epoch": 2}, "stale_lease"),
        ({"attempt_id": new_uuid()}, "stale_lease"),
        ({"lease_id": new_uuid(), "attempt_index": 7}, "stale_lease"),
        ({"attempt_index": 7}, "invalid_lease_for_suspend"),
    ],
)
async def test_the_fence(engine: Engine, changes: dict[str, Any], code: str) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    async with untouched(engine):
        await refused(
            code,
            waits.backend.suspensions.suspend_by_triple(
                handle.execution_id, fence(handle, **changes), condition=GO
            ),
        )


async def test_by_triple_the_handle_comes_from_the_record(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(lane="gpu")
    outcome = await waits.backend.suspensions.suspend_by_triple(
        handle.execution_id, fence(handle, attempt_index=None), condition=GO
    )
    assert isinstance(outcome, Suspended)
    assert outcome.handle.attempt_index == 0
    assert outcome.handle.lane_id == "gpu"
    assert outcome.handle.worker_instance_id == "w-1"
    assert outcome.handle.lease == handle.lease
    assert outcome.handle.kind == "suspended"


@pytest.mark.corrupts
async def test_a_record_without_an_attempt_index(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await write(engine, handle.execution_id, attempt=handle.attempt_id)
    async with untouched(engine):
        await refused(
            "corruption",
            waits.backend.suspensions.suspend_by_triple(
                handle.execution_id, fence(handle, attempt_index=None), condition=GO
            ),
        )


async def test_not_active_is_told_before_the_rest(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    fresh = msgspec.structs.replace(parked.handle, kind="fresh")
    async with untouched(engine):
        problem = await refused(
            "execution_not_active", waits.backend.suspensions.suspend(fresh, condition=GO)
        )
    assert problem.details == ("none", "1", "suspended", fresh.attempt_id)


async def test_a_revoked_and_a_lapsed_lease(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await engine.backend.leases.revoke_lease(handle.execution_id)
    await engine.advance(TTL)
    async with untouched(engine):
        await refused("lease_revoked", waits.backend.suspensions.suspend(handle, condition=GO))
    handle = await engine.running(lane="other")
    await freeze(engine, int((await fields(engine, handle.execution_id))["lease_expires_at"]))
    await refused("lease_expired", waits.backend.suspensions.suspend(handle, condition=GO))
    vector = await engine.vector(handle.execution_id)
    assert vector.ownership_state == "lease_expired_reclaimable", "the refused call has marked it"


@pytest.mark.corrupts
async def test_an_open_suspension_is_not_replaced(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    key = f"ff:exec:{handle.execution_id.tag}:{handle.execution_id}:suspension:current"
    await waits.write(key, suspension_id=new_uuid())
    async with untouched(engine):
        await refused(
            "already_suspended",
            waits.backend.suspensions.suspend(
                handle, condition=GO, waitpoints=[UsePending(new_uuid())]
            ),
        )


async def test_a_closed_suspension_is_replaced(engine: Engine) -> None:
    waits = await Waits.open(engine)
    first = await waits.park()
    await waits.send(first)
    claim = await engine.claim()
    second = await waits.park(Single("other"), handle=claim.handle)
    assert second.details.suspension_id != first.details.suspension_id
    stored = await waits.suspension(claim.execution_id)
    assert stored["suspension_id"] == second.details.suspension_id
    assert "closed_at" not in stored
    members: Any = await engine.backend.transport.call(
        "SMEMBERS", f"ff:exec:{claim.execution_id.tag}:{claim.execution_id}:waitpoints"
    )
    assert len(members) == 2, "the old waitpoint stays in the index"


async def raw_suspend(waits: Waits, handle: Handle, **options: Any) -> Any:
    """The function itself, past the checks of the client."""
    known: dict[str, Any] = {
        "suspension_id": new_uuid(),
        "waitpoints": [["fresh", new_uuid(), "k"]],
        "referenced": ["k"],
        "condition": '{"Single":{"waitpoint_key":"k","matcher":"Wildcard"}}',
        "policy": "{}",
        "reason_code": "x",
        "requested_by": "worker",
        "timeout_behavior": "fail",
        "behavior_given": False,
        "pointer": "",
        "idem": "",
    }
    args = (handle.execution_id, handle.wire, msgspec.msgpack.encode(known | options))
    return await waits.backend.calls.fcall(
        "ff_suspend", handle.execution_id.tag, args, op="suspend"
    )


@pytest.mark.parametrize("extra", [["fresh", "", "x"], ["fresh", "x", ""]])
async def test_a_malformed_extra_binding_is_told_first(engine: Engine, extra: list[str]) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    ghost = msgspec.structs.replace(handle, execution_id=engine.new_id())
    two = [["fresh", new_uuid(), "k"], extra]
    for holder in (handle, ghost):
        await refused(
            "additional_waitpoint_binding_malformed", raw_suspend(waits, holder, waitpoints=two)
        )


async def test_pending_with_extras_is_told_before_the_pending_one_is_looked_up(
    engine: Engine,
) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    bindings = [UsePending(new_uuid()), FreshWaitpoint(new_uuid(), "l")]
    async with untouched(engine):
        await refused(
            "use_pending_with_extras_unsupported",
            waits.backend.suspensions.suspend(
                handle, condition=all_of_waitpoints("kl"), waitpoints=bindings
            ),
        )


@pytest.mark.parametrize("state", ["active", "pending"])
async def test_a_fresh_waitpoint_never_takes_a_live_ones_place(engine: Engine, state: str) -> None:
    waits = await Waits.open(engine)
    if state == "active":
        taken = (await waits.park()).details.waitpoint_id
    else:
        holder = await engine.running()
        taken = (await waits.backend.waitpoints.create_waitpoint(holder, "x", 1000)).waitpoint_id
    handle = await engine.running()
    binding = FreshWaitpoint(taken, "k")
    async with untouched(engine):
        await refused(
            "waitpoint_already_exists",
            waits.backend.suspensions.suspend(handle, condition=GO, waitpoints=[binding]),
        )


async def test_a_fresh_waitpoint_of_its_own_pending_one(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    binding = FreshWaitpoint(pending.waitpoint_id, "k")
    async with untouched(engine):
        await refused(
            "waitpoint_already_exists",
            waits.backend.suspensions.suspend(handle, condition=GO, waitpoints=[binding]),
        )


async def test_a_closed_waitpoint_may_be_replaced_by_its_own_execution_only(
    engine: Engine,
) -> None:
    waits = await Waits.open(engine)
    first = await waits.park()
    await waits.send(first)
    again = FreshWaitpoint(first.details.waitpoint_id, "k")
    claim = await engine.claim()
    await engine.advance(1)
    second = await waits.park(handle=claim.handle, waitpoints=[again])
    (stored,) = await waits.waitpoints(second)
    assert "signal_count" not in stored
    assert "close_reason" not in stored
    problem = await refused("invalid_token", waits.send(first))
    assert problem.code == "invalid_token", "the old token does not reach the new waitpoint"
    await waits.send(second)
    neighbour = await running(engine)
    async with untouched(engine):
        await refused(
            "waitpoint_already_exists",
            waits.backend.suspensions.suspend(neighbour, condition=GO, waitpoints=[again]),
        )


async def test_nothing_is_written_without_a_usable_key(engine: Engine) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    store = f"ff:sec:{handle.execution_id.tag}:waitpoint_hmac"

    async def refuses(code: str) -> None:
        async with untouched(engine):
            await refused(code, waits.backend.suspensions.suspend(handle, condition=GO))
            await refused(code, waits.backend.waitpoints.create_waitpoint(handle, "k", 1000))

    await refuses("hmac_secret_not_initialized")
    await waits.write(store, current_kid="k1")
    await refuses("hmac_secret_not_initialized")
    for broken in ("", "abc", "zz" * 16, "ab cd"):
        await waits.write(store, **{"secret:k1": broken})
        await refuses("invalid_secret")
    await waits.write(store, **{"secret:k1": "ab" * 100})
    assert isinstance(await waits.backend.suspensions.suspend(handle, condition=GO), Suspended)
