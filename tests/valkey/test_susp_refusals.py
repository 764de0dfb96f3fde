"""What the engine refuses to suspend, in the order of its checks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import FreshWaitpoint, Suspended, UsePending
from flowfabric.core.ids import new_uuid
from tests.conformance.test_susp_refusals import fence
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import running
from tests.support.storage import record, write
from tests.support.suspension import GO, Waits


@pytest.mark.corrupts
async def test_a_record_without_an_attempt_index(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await write(engine, handle.execution_id, attempt=handle.attempt_id)
    async with untouched(engine):
        await refused(
            waits.backend.suspensions.suspend_by_triple(
                handle.execution_id, fence(handle, attempt_index=None), condition=GO
            ),
            "corruption",
        )


async def test_a_revoked_and_a_lapsed_lease(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await engine.backend.leases.revoke_lease(handle.execution_id)
    await engine.advance(TTL)
    async with untouched(engine):
        await refused(waits.backend.suspensions.suspend(handle, condition=GO), "lease_revoked")
    handle = await engine.running(lane="other")
    await engine.freeze(int((await record(engine, handle.execution_id))["lease_expires_at"]))
    await refused(waits.backend.suspensions.suspend(handle, condition=GO), "lease_expired")
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
            waits.backend.suspensions.suspend(
                handle, condition=GO, waitpoints=[UsePending(new_uuid())]
            ),
            "already_suspended",
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
async def test_a_malformed_extra_binding_is_reported_first(
    engine: Engine, extra: list[str]
) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    ghost = msgspec.structs.replace(handle, execution_id=engine.new_id())
    two = [["fresh", new_uuid(), "k"], extra]
    for holder in (handle, ghost):
        await refused(
            raw_suspend(waits, holder, waitpoints=two), "additional_waitpoint_binding_malformed"
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
    problem = await refused(waits.send(first), "invalid_token")
    assert problem.code == "invalid_token", "the old token does not reach the new waitpoint"
    await waits.send(second)
    neighbour = await running(engine)
    async with untouched(engine):
        await refused(
            waits.backend.suspensions.suspend(neighbour, condition=GO, waitpoints=[again]),
            "waitpoint_already_exists",
        )


async def test_nothing_is_written_without_a_usable_key(engine: Engine) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    store = f"ff:sec:{handle.execution_id.tag}:waitpoint_hmac"

    async def refuses(code: str) -> None:
        async with untouched(engine):
            await refused(waits.backend.suspensions.suspend(handle, condition=GO), code)
            await refused(waits.backend.waitpoints.create_waitpoint(handle, "k", 1000), code)

    await refuses("hmac_secret_not_initialized")
    await waits.write(store, current_kid="k1")
    await refuses("hmac_secret_not_initialized")
    for broken in ("", "abc", "zz" * 16, "ab cd"):
        await waits.write(store, **{"secret:k1": broken})
        await refuses("invalid_secret")
    await waits.write(store, **{"secret:k1": "ab" * 100})
    assert isinstance(await waits.backend.suspensions.suspend(handle, condition=GO), Suspended)
