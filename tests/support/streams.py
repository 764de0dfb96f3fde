"""What stream tests share: frames, stored state, waiting tails, ways an attempt ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.streams import AppendOutcome, Frame
from flowfabric.core.state import ExpireReason
from tests.support.engine import TTL, Engine, refused
from tests.support.executions import ATTEMPT_TIMEOUT, DEADLINE, POLICY, expire, mark

SECRET = "ab" * 32
SUSPENDED_FOR = 60_000
NO_RETRY: dict[str, Any] = {"retry_policy": {"max_retries": 0, "retry_on_timeout": True}}
RETRY_ON_TIMEOUT: dict[str, Any] = {
    **POLICY,
    "retry_policy": {**POLICY["retry_policy"], "retry_on_timeout": True},
}


def frames(*payloads: bytes | str, **fields: Any) -> list[Frame]:
    return [Frame(payload=p.encode() if isinstance(p, str) else p, **fields) for p in payloads]


async def append(engine: Engine, handle: Handle, payload: bytes | str, **how: Any) -> AppendOutcome:
    (frame,) = frames(payload)
    return await engine.backend.streams.append_frame(handle, frame, **how)


async def payloads(engine: Engine, handle: Handle, **how: Any) -> list[bytes]:
    bounds: dict[str, Any] = {"count_limit": 10_000} | how
    page = await engine.backend.streams.read_stream(
        handle.execution_id, handle.attempt_index, **bounds
    )
    return [frame.payload for frame in page.frames]


def holder(handle: Handle, **changes: Any) -> Handle:
    """The same handle, of somebody who is not quite the same."""
    fence: Fence = handle.fence
    lease_id = changes.pop("lease_id", fence.lease_id)
    epoch = changes.pop("epoch", fence.lease_epoch)
    attempt_id = changes.pop("attempt_id", fence.attempt_id)
    index = changes.pop("index", fence.attempt_index)
    return msgspec.structs.replace(
        handle, lease=f"{lease_id}/{epoch}", attempt=f"{attempt_id}/{index}", **changes
    )


# --- how attempts end ---------------------------------------------------------------------------

End = Callable[[Engine, Handle], Awaitable[Any]]


class Ending(msgspec.Struct):
    """One way an attempt ends: what it needs, what happens, and what readers are told."""

    reason: str
    end: End
    policy: Mapping[str, Any] = msgspec.field(default_factory=lambda: POLICY)
    before: End | None = None


async def _complete(engine: Engine, handle: Handle) -> None:
    await engine.backend.executions.complete(handle)


async def _complete_by_operator(engine: Engine, handle: Handle) -> None:
    await engine.backend.executions.cancel_execution(handle.execution_id, "enough")


async def _fail(engine: Engine, handle: Handle) -> None:
    await engine.backend.executions.fail(handle, "broken", "permanent")


async def _fail_and_retry(engine: Engine, handle: Handle) -> None:
    await engine.backend.executions.fail(handle, "broken", "transient")


async def _cancel_by_holder(engine: Engine, handle: Handle) -> None:
    await engine.backend.executions.cancel(handle, "enough")


async def _attempt_timeout(engine: Engine, handle: Handle) -> None:
    await engine.advance(ATTEMPT_TIMEOUT)
    await expire(engine, handle.execution_id, ExpireReason.ATTEMPT_TIMEOUT)


async def _deadline(engine: Engine, handle: Handle) -> None:
    await engine.advance(DEADLINE)
    assert await expire(engine, handle.execution_id, ExpireReason.EXECUTION_DEADLINE) == "expired"


async def _mark(engine: Engine, handle: Handle) -> None:
    await engine.advance(TTL)
    assert await mark(engine, handle.execution_id) == "marked_expired"


async def _late_write(engine: Engine, handle: Handle) -> None:
    await engine.advance(TTL)
    await refused(engine.backend.executions.complete(handle), "lease_expired")


async def _revoke(engine: Engine, handle: Handle) -> None:
    await engine.backend.leases.revoke_lease(handle.execution_id)


async def _reclaim(engine: Engine, handle: Handle) -> None:
    del handle
    claim = await engine.claim(instance="w-2")
    assert claim.handle.attempt_index == 1


async def _over_the_cap(engine: Engine, handle: Handle) -> None:
    assert await engine.claim_all(1, instance="w-2") == []
    assert (await engine.vector(handle.execution_id)).lifecycle_phase == "terminal"


async def _suspend(engine: Engine, handle: Handle) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    await engine.backend.suspensions.suspend(handle, condition=Single("approval", "go"))


def _suspend_with(behavior: str) -> End:
    async def suspend(engine: Engine, handle: Handle) -> None:
        await engine.backend.secrets.seed_at_boot(SECRET)
        await engine.backend.suspensions.suspend(
            handle,
            condition=Single("approval", "go"),
            timeout_at=await engine.now() + SUSPENDED_FOR,
            timeout_behavior=behavior,
        )

    return suspend


async def _suspension_timeout(engine: Engine, handle: Handle) -> None:
    await engine.advance(SUSPENDED_FOR)
    execution_id = handle.execution_id
    (verdict,) = await engine.backend.suspensions.expire_suspension(
        execution_id.tag, [execution_id]
    )
    assert verdict in {"fail", "cancel", "expire"}


ENDINGS: dict[str, Ending] = {
    "complete": Ending("attempt_success", _complete),
    "fail": Ending("attempt_failure", _fail),
    "fail with a retry": Ending("attempt_failure", _fail_and_retry),
    "cancel by the holder": Ending("attempt_cancelled", _cancel_by_holder),
    "cancel by an operator": Ending("attempt_cancelled", _complete_by_operator),
    "cancel while suspended": Ending("attempt_cancelled", _complete_by_operator, before=_suspend),
    "cancel after the lease": Ending("attempt_cancelled", _complete_by_operator, before=_mark),
    "attempt timeout": Ending("expired", _attempt_timeout),
    "attempt timeout with a retry": Ending("expired", _attempt_timeout, RETRY_ON_TIMEOUT),
    "attempt timeout as failure": Ending(
        "expired", _attempt_timeout, NO_RETRY | {"timeout_policy": POLICY["timeout_policy"]}
    ),
    "deadline": Ending("expired", _deadline),
    "deadline while suspended": Ending("expired", _deadline, before=_suspend),
    "lease expiry": Ending("lease_expired", _mark),
    "lease expiry found by a write": Ending("lease_expired", _late_write),
    "revoke": Ending("lease_revoked", _revoke),
    "reclaim": Ending("reclaimed", _reclaim, before=_mark),
    "reclaim after revoke": Ending("reclaimed", _reclaim, before=_revoke),
    "reclaim over the cap": Ending(
        "max_reclaims_exceeded", _over_the_cap, {"max_reclaim_count": 0}, before=_mark
    ),
    "suspension timeout, fail": Ending(
        "suspension_timeout", _suspension_timeout, before=_suspend_with("fail")
    ),
    "suspension timeout, cancel": Ending(
        "suspension_timeout", _suspension_timeout, before=_suspend_with("cancel")
    ),
    "suspension timeout, expire": Ending(
        "suspension_timeout", _suspension_timeout, before=_suspend_with("expire")
    ),
}

# Those that end an attempt which readers already saw closed, by the loss of its lease.
SECOND = ("reclaim", "reclaim after revoke", "reclaim over the cap", "cancel after the lease")
FIRST: Sequence[str] = [name for name in ENDINGS if name not in SECOND]
