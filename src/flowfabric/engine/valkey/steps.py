"""Durable steps on Valkey."""

from collections.abc import Sequence
from typing import Any, cast

from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.steps import (
    AlreadyRecorded,
    Recorded,
    StepError,
    StepOutcome,
    StepPage,
    StepRecord,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api import check
from flowfabric.engine.api.steps import MAX_PAGE, MAX_RESULT_BYTES, NewStep, Steps
from flowfabric.engine.valkey.calls import FunctionCalls, proof, text

_UNREAD = StepPage((), 0)


class ValkeySteps(Steps):
    """`Steps` on Valkey."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def _record(
        self, execution_id: ExecutionId, fence: Handle | Fence, step: NewStep
    ) -> StepOutcome:
        # The function rejects a result that is too long, so do not send all of it.
        result = (step.result or b"")[: MAX_RESULT_BYTES + 1]
        args = (
            *(proof(fence), step.step_key, step.kind, step.status),
            *("0" if step.result is None else "1", result, step.codec),
            *(step.error.reason, step.error.category, step.took_ms),
            *("" if each is None else each for each in (step.fire_at, step.fire_in_ms)),
            step.child_execution_id or "",
        )
        return await self._calls.ask_about(execution_id, "ff_record_step", args, _outcome)

    async def read_steps(
        self, execution_id: ExecutionId, after_seq: int = 0, limit: int = MAX_PAGE
    ) -> StepPage:
        after = check.whole(after_seq, "after_seq", 0)
        most = min(check.whole(limit, "limit", 0), MAX_PAGE)
        return await self._calls.ask_about(
            execution_id, "ff_read_steps", (after, most), lambda reply: _page(reply[2:4])
        )


def _outcome(reply: list[Any]) -> StepOutcome:
    if reply[2] == b"already":
        return AlreadyRecorded(_record_of(reply[3]))
    return Recorded(int(reply[3]), reply[4])


def _page(parts: Sequence[Any]) -> StepPage:
    rows, following = parts
    return StepPage(tuple(map(_record_of, rows)), None if following is None else int(following))


def claimed_page(parts: Sequence[Any]) -> StepPage:
    """The steps in a claim. If unreadable, a later read of the steps reports the error."""
    try:
        return _page(parts)
    except (LookupError, TypeError, ValueError, AttributeError):
        return _UNREAD


def _record_of(row: Sequence[Any]) -> StepRecord:
    """One record from its positional form."""
    (seq, key, kind, status, codec, result, reason, category, *rest) = row
    attempt_index, lease_epoch, started_at, finished_at, fire_at, child = rest[:6]
    failure = StepError(text(reason or b""), text(category or b""))
    return StepRecord(
        step_key=text(key),
        seq=seq,
        kind=cast("Any", text(kind)),
        status=cast("Any", text(status)),
        codec="" if codec is None else text(codec),
        result=result,
        error=failure if status == b"failed" else None,
        attempt_index=attempt_index,
        lease_epoch=lease_epoch,
        started_at=started_at,
        finished_at=finished_at,
        fire_at=fire_at,
        child_execution_id=None if child is None else ExecutionId.trusted(text(child)),
    )
