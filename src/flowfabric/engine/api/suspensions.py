"""Pausing attempts until a condition is met."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from flowfabric.core import conditions
from flowfabric.core.conditions import Condition
from flowfabric.core.contracts import suspension
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.suspension import FreshWaitpoint, ResumePolicy, UsePending
from flowfabric.core.errors import StateError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId, new_uuid, validate_text, validate_uuid
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern

MAX_KEY_BYTES = 256
"""The longest waitpoint key."""
Binding = FreshWaitpoint | UsePending
_FLAGS = [field.name for field in msgspec.structs.fields(ResumePolicy) if field.type is bool]
_REQUESTERS = ("worker", "operator", "policy", "system_timeout_policy")
TIMEOUT_BEHAVIORS = (
    *("fail", "cancel", "expire", "auto_resume", "auto_resume_with_timeout_signal"),
    "escalate",
)
_MAX_WAITPOINTS = 64
_PAST_TOLERANCE_MS = 600_000
_MAX_POINTER_BYTES = 65_536
_policy_json = msgspec.json.Encoder().encode


class Suspensions(Concern, Protocol):
    """Pausing attempts until a condition is met."""

    async def suspend(
        self,
        handle: Handle,
        *,
        condition: Condition,
        waitpoints: Sequence[Binding] | None = None,
        suspension_id: str | None = None,
        reason_code: str = "waiting_for_signal",
        requested_by: str = "worker",
        timeout_at: int | None = None,
        timeout_behavior: str | None = None,
        resume_policy: ResumePolicy | None = None,
        continuation_metadata_pointer: str = "",
        prompt: str | None = None,
        details: Any = None,
        idempotency_key: str | None = None,
    ) -> suspension.SuspendOutcome:
        """Release the lease until the condition, the timeout or an operator ends the pause.

        Without `waitpoints`, every key that the condition names gets a new one. A repeat with the
        same idempotency key (default: the suspension id) returns the first answer. With an empty
        key, the call cannot be repeated after a lost reply.

        `prompt` (at most 1,024 bytes) and `details` (at most 8 KiB of JSON) describe the question
        to people. Without them, a waitpoint that was handed out with a question keeps it.
        """
        if check.instance(handle, Handle, "handle").kind == "suspended":
            raise StateError("already_suspended", op="suspend")
        condition = conditions.checked_condition(condition)
        bindings = _fresh(condition) if waitpoints is None else _named(waitpoints)
        await self._check(condition, bindings, timeout_at)
        behavior = "fail" if timeout_behavior is None else timeout_behavior
        identity = check.uuid(suspension_id, "suspension_id")
        repeat_key = identity if idempotency_key is None else idempotency_key
        pointer = continuation_metadata_pointer
        options: dict[str, Any] = {
            "timeout_behavior": check.one_of(behavior, "timeout_behavior", TIMEOUT_BEHAVIORS),
            "behavior_given": timeout_behavior is not None,
            "requested_by": check.one_of(requested_by, "requested_by", _REQUESTERS),
            "idem": validate_text(repeat_key, "idempotency_key"),
            "policy": _policy(ResumePolicy() if resume_policy is None else resume_policy),
            "reason_code": validate_text(reason_code, "reason_code"),
            "pointer": validate_text(
                pointer, "continuation_metadata_pointer", limit=_MAX_POINTER_BYTES
            ),
            "suspension_id": identity,
            "waitpoints": [
                ["pending", binding.waitpoint_id, ""]
                if isinstance(binding, UsePending)
                else ["fresh", binding.waitpoint_id, binding.waitpoint_key]
                for binding in bindings
            ],
            "referenced": conditions.referenced_waitpoint_keys(condition),
            "condition": conditions.condition_json(condition),
            **check.question(prompt, details),
        }
        if timeout_at is not None:
            options["timeout_at"] = timeout_at
        return await self._suspend(handle, options)

    async def _check(
        self, condition: Condition, bindings: Sequence[Binding], timeout_at: int | None
    ) -> None:
        keys = [b.waitpoint_key if isinstance(b, FreshWaitpoint) else None for b in bindings]
        conditions.check_bindings(condition, keys, timeout_given=timeout_at is not None)
        if timeout_at is not None:
            check.whole(timeout_at, "timeout_at", -check.MAX_EXACT)
        try:
            conditions.check_tree(condition)
            _check_limits(bindings)
        except ValidationError:
            # Checked first by the engine's clock: a time long past is an error.
            if timeout_at is not None and timeout_at + _PAST_TOLERANCE_MS < await self._now_ms():
                raise ValidationError("invalid_input", "timeout_at_in_past") from None
            raise

    async def _suspend(self, handle: Handle, options: dict[str, Any]) -> suspension.SuspendOutcome:
        """Store a suspension whose form was checked."""
        ...

    async def _now_ms(self) -> int:
        """The engine's clock."""
        ...

    async def suspend_by_triple(
        self, execution_id: ExecutionId, fence: Fence, **arguments: Any
    ) -> suspension.SuspendOutcome:
        """`suspend` for services that hold a fence but no handle."""
        lease_id, epoch, attempt_id, index = check.fence(fence).split("/")
        handle = Handle(
            execution_id=ExecutionId(execution_id),
            lease=f"{lease_id}/{epoch}",
            attempt=f"{attempt_id}/{index}",
            lease_ttl_ms=0,
            lane_id="default",
            worker_instance_id="",
        )
        return await self.suspend(handle, **arguments)

    async def resume_execution(
        self, execution_id: ExecutionId, *, trigger_type: str = "operator", resume_delay_ms: int = 0
    ) -> suspension.Resumed:
        """End a suspension by hand, even if its condition is not met."""
        ...

    async def expire_suspension(self, tag: str, ids: Sequence[str]) -> list[str]:
        """Apply the timeout behavior of due suspensions; each is checked again."""
        ...

    async def expire_waitpoints(self, tag: str, ids: Sequence[str]) -> list[str]:
        """Close pending waitpoints that were not used in time; each is checked again."""
        ...

    async def list_suspended(
        self, *, partition: int | None = None, cursor: str = "", limit: int = 100
    ) -> suspension.SuspendedPage:
        """Suspended executions by partition, timeout and id; those without a timeout last."""
        ...


def _fresh(condition: Condition) -> list[Binding]:
    """A new waitpoint for every key that the condition names; one waitpoint if it names none."""
    keys = conditions.referenced_waitpoint_keys(condition)
    if keys:
        return [FreshWaitpoint(new_uuid(), key) for key in keys]
    return _named([FreshWaitpoint(new_uuid())])


def _named(bindings: Sequence[Binding]) -> list[Binding]:
    """The bindings; a primary one without a key is named after its id."""
    named: list[Binding] = check.listed(bindings, "waitpoints")[:]
    for binding in named:
        if not isinstance(binding, FreshWaitpoint | UsePending):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid_input("waitpoints", "must be FreshWaitpoint or UsePending")
    if named and isinstance(named[0], FreshWaitpoint) and not named[0].waitpoint_key:
        identity = named[0].waitpoint_id
        named[0] = FreshWaitpoint(identity, f"wpk:{identity}")
    return named


def _check_limits(bindings: Sequence[Binding]) -> None:
    if len(bindings) > _MAX_WAITPOINTS:
        raise ValidationError("invalid_input", "too_many_waitpoints")
    seen: set[tuple[str, str]] = set()
    for binding in bindings:
        names = [("id", validate_uuid(binding.waitpoint_id, "waitpoint_id"))]
        if isinstance(binding, FreshWaitpoint):
            key = validate_text(binding.waitpoint_key, "waitpoint_key", limit=_MAX_POINTER_BYTES)
            if len(key.encode()) > MAX_KEY_BYTES:
                raise ValidationError("invalid_input", "waitpoint_key_too_long")
            names.append(("key", key))
        for name in names:
            if name in seen:
                raise ValidationError("invalid_input", f"duplicate_waitpoint_binding: {name[1]}")
            seen.add(name)


def _policy(policy: ResumePolicy) -> str:
    check.instance(policy, ResumePolicy, "resume_policy")
    for name in _FLAGS:
        check.flag(getattr(policy, name), name)
    if policy.resume_target != "runnable":
        raise invalid_input("resume_policy", "resume_target must be runnable")
    if policy.resume_delay_ms is not None:
        check.whole(policy.resume_delay_ms, "resume_delay_ms", 0)
    return _policy_json(policy).decode()
