"""What the engine refuses to suspend, in the order of its checks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.suspension import FreshWaitpoint, Suspended, UsePending
from flowfabric.core.ids import new_uuid
from tests.support.engine import Engine, refused, untouched
from tests.support.suspension import GO, Waits, all_of_waitpoints


def fence(handle: Handle, **changes: Any) -> Fence:
    return msgspec.structs.replace(handle.fence, **changes)


async def test_a_missing_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    ghost = engine.new_id()
    await refused(
        waits.backend.suspensions.suspend_by_triple(ghost, Fence("", None, "", None), condition=GO),
        "execution_not_found",
    )
    nonsense: Any = "nonsense"
    await refused(
        waits.backend.suspensions.suspend_by_triple(nonsense, handle.fence, condition=GO),
        "invalid_input",
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
            waits.backend.suspensions.suspend_by_triple(
                handle.execution_id, fence(handle, **changes), condition=GO
            ),
            code,
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


async def test_not_active_is_told_before_the_rest(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    fresh = msgspec.structs.replace(parked.handle, kind="fresh")
    async with untouched(engine):
        problem = await refused(
            waits.backend.suspensions.suspend(fresh, condition=GO), "execution_not_active"
        )
    assert problem.details == ("none", "1", "suspended", fresh.attempt_id)


async def test_pending_with_extras_is_told_before_the_pending_one_is_looked_up(
    engine: Engine,
) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    bindings = [UsePending(new_uuid()), FreshWaitpoint(new_uuid(), "l")]
    async with untouched(engine):
        await refused(
            waits.backend.suspensions.suspend(
                handle, condition=all_of_waitpoints("kl"), waitpoints=bindings
            ),
            "use_pending_with_extras_unsupported",
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
            waits.backend.suspensions.suspend(handle, condition=GO, waitpoints=[binding]),
            "waitpoint_already_exists",
        )


async def test_a_fresh_waitpoint_of_its_own_pending_one(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    binding = FreshWaitpoint(pending.waitpoint_id, "k")
    async with untouched(engine):
        await refused(
            waits.backend.suspensions.suspend(handle, condition=GO, waitpoints=[binding]),
            "waitpoint_already_exists",
        )
