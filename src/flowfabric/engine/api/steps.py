"""Durable steps: recording what a handler has done, and reading it (11 §17.1)."""

from typing import Any, Protocol, cast, get_args

import msgspec

from flowfabric.core import ids
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.steps import (
    StepError,
    StepKind,
    StepOutcome,
    StepPage,
    StepStatus,
)
from flowfabric.core.errors import invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.core.text import FAILURE_REASON_LIMIT
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern

MAX_PAGE = 1000
MAX_RESULT_BYTES = 262_144
_MAX_KEY_BYTES = 512
_MAX_LABEL_BYTES = 64
_MAX_CATEGORY_BYTES = 256
_KINDS: tuple[str, ...] = get_args(StepKind)
_STATUSES: tuple[str, ...] = get_args(StepStatus)


class NewStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step to record, whose form is correct."""

    step_key: str
    kind: StepKind
    status: StepStatus
    result: bytes | None
    codec: str
    error: StepError
    took_ms: int
    fire_at: int | None
    fire_in_ms: int | None
    child_execution_id: str | None


class Steps(Concern, Protocol):
    """What the handlers of an execution have done, by key. It survives attempts."""

    async def record_step(
        self,
        execution_id: ExecutionId,
        fence: Handle | Fence,
        step_key: str,
        *,
        kind: StepKind = "step",
        status: StepStatus = "done",
        result: bytes | None = None,
        codec: str = "",
        error: StepError | None = None,
        took_ms: int = 0,
        fire_at: int | None = None,
        fire_in_ms: int | None = None,
        child_execution_id: ExecutionId | None = None,
    ) -> StepOutcome:
        """Record a step under a key. The first record wins; `AlreadyRecorded` returns it.

        A pending record is replaced once, by a `done` or `failed` one of the same kind. A repeat
        after a lost reply finds its own record; check with `StepRecord.belongs_to`. The store
        records when the step finished; `took_ms` is how long before that it started.
        """
        step = NewStep(
            step_key=ids.validate_text(step_key, "step_key", limit=_MAX_KEY_BYTES, required=True),
            kind=cast("StepKind", check.one_of(kind, "kind", _KINDS)),
            status=cast("StepStatus", check.one_of(status, "status", _STATUSES)),
            result=None if result is None else check.binary(result, "result"),
            codec=ids.validate_text(codec, "codec", limit=_MAX_LABEL_BYTES),
            error=_checked_error(error, status),
            took_ms=check.whole(took_ms, "took_ms", 0),
            fire_at=None if fire_at is None else check.timestamp(fire_at, "fire_at", low=0),
            fire_in_ms=None if fire_in_ms is None else check.whole(fire_in_ms, "fire_in_ms", 0),
            child_execution_id=_checked_child(child_execution_id),
        )
        _check_parts(step)
        return await self._record(execution_id, fence, step)

    async def _record(
        self, execution_id: ExecutionId, fence: Handle | Fence, step: NewStep
    ) -> StepOutcome:
        """Store a step whose form was checked."""
        ...

    async def read_steps(
        self, execution_id: ExecutionId, after_seq: int = 0, limit: int = MAX_PAGE
    ) -> StepPage:
        """Records in the order in which they were made, at most 1,000 at a time.

        A page ends early after 1 MiB. A claim carries the first page.
        """
        ...


def _checked_error(error: Any, status: Any) -> StepError:
    if error is None:
        if status == "failed":
            raise invalid_input("error", "is required for a step that failed")
        return StepError("")
    if status != "failed":
        raise invalid_input("error", f"cannot be set for a step that is {status}")
    given = check.instance(error, StepError, "error")
    category = ids.validate_text(given.category, "error.category", limit=_MAX_CATEGORY_BYTES)
    return StepError(check.reason(given.reason, "error.reason", FAILURE_REASON_LIMIT), category)


def _checked_child(child: Any) -> str | None:
    return None if child is None else ExecutionId.parse(child, "child_execution_id")


def _check_parts(step: NewStep) -> None:
    """Raise an error for values that a step of this kind and status cannot have."""
    if step.result is not None and step.status != "done":
        raise invalid_input("result", f"cannot be set for a step that is {step.status}")
    times = [each for each in (step.fire_at, step.fire_in_ms) if each is not None]
    if step.kind == "timer" and step.status == "pending":
        if len(times) != 1:
            raise invalid_input("fire_at", "a pending timer needs either fire_at or fire_in_ms")
    elif times:
        name = "fire_at" if step.fire_at is not None else "fire_in_ms"
        raise invalid_input(name, "can be set only for a pending timer")
    if step.child_execution_id is not None and step.kind != "child":
        raise invalid_input("child_execution_id", 'can be set only for a step of kind "child"')
