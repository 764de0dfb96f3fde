"""Suspending attempts, making and closing waitpoints, resuming."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.core.conditions import (
    Condition,
    check_bindings,
    check_tree,
    check_types,
    condition_json,
    referenced_waitpoint_keys,
)
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.suspension import (
    AlreadySatisfiedSuspension,
    FreshWaitpoint,
    PendingWaitpoint,
    Resumed,
    ResumePolicy,
    Suspended,
    SuspendOutcome,
    SuspensionDetails,
    UsePending,
    WaitpointDetails,
)
from flowfabric.core.errors import StateError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId, WaitpointToken, new_uuid, validate_text, validate_uuid
from flowfabric.core.state import PublicState
from flowfabric.engine.arguments import (
    MAX_EXACT,
    each_stored,
    fence_text,
    flag,
    held,
    instance,
    listed,
    one_of,
    positive_ms,
    whole,
)
from flowfabric.engine.calls import Calls, decoding, proof, text, unreadable

__all__ = ["Suspensions"]

log = logging.getLogger(__name__)

_MAX_WAITPOINTS = 64
_EXPIRED_AT_ONCE = 20  # Each may close that many waitpoints.
_MAX_KEY_BYTES = 256
_MAX_POINTER_BYTES = 65_536
_PAST_TOLERANCE_MS = 600_000
_BEHAVIORS = (
    *("fail", "cancel", "expire", "auto_resume", "auto_resume_with_timeout_signal"),
    "escalate",
)
_REQUESTERS = ("worker", "operator", "policy", "system_timeout_policy")
_FLAGS = (
    *("consume_matched_signals", "retain_signal_buffer_until_closed"),
    "close_waitpoint_on_resume",
)
_TRIGGERS = ("signal", "operator", "auto_resume")
_CLOSED = ([b"closed", b"pending"], [b"closed", b"active"], [b"already_closed"])
_pack = msgspec.msgpack.Encoder().encode
_policy_json = msgspec.json.Encoder().encode

Binding = FreshWaitpoint | UsePending


class Suspensions(Calls):
    """Everything that pauses an attempt and lets it go on."""

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
        idempotency_key: str | None = None,
    ) -> SuspendOutcome:
        """Give the lease back until the condition, the timeout or an operator ends the pause.

        Without `waitpoints` a fresh one is made for every key the condition names. A repeat with
        the same idempotency key (default: the suspension id) gives the first answer; the empty
        key means none, and then a lost reply cannot be repaired.
        """
        if instance(handle, Handle, "handle").kind == "suspended":
            raise StateError("already_suspended", op="suspend")
        execution_id = self.checked(handle.execution_id)
        check_types(condition)
        bindings = _fresh(condition) if waitpoints is None else _named(waitpoints)
        await self._check_suspend(condition, bindings, timeout_at)
        options = _options(
            reason_code, requested_by, timeout_behavior, resume_policy, idempotency_key
        )
        options["pointer"] = validate_text(
            continuation_metadata_pointer, "continuation_metadata_pointer", limit=_MAX_POINTER_BYTES
        )
        identity = (
            new_uuid() if suspension_id is None else validate_uuid(suspension_id, "suspension_id")
        )
        options["idem"] = identity if idempotency_key is None else idempotency_key
        options["suspension_id"] = identity
        options["waitpoints"] = [_binding(binding) for binding in bindings]
        options["referenced"] = referenced_waitpoint_keys(condition)
        options["condition"] = condition_json(condition)
        if timeout_at is not None:
            options["timeout_at"] = timeout_at
        reply = await self.fcall(
            "ff_suspend",
            execution_id.tag,
            (execution_id, proof(handle), _pack(options)),
            op="suspend",
            replay_safe=bool(options["idem"]),
        )
        with decoding(reply, "ff_suspend", "suspend", execution_id):
            return _suspend_outcome(handle, reply)

    async def suspend_by_triple(
        self, execution_id: ExecutionId, fence: Fence, **arguments: Any
    ) -> SuspendOutcome:
        """`suspend` for services that hold a fence but no handle."""
        execution_id = self.checked(execution_id)
        lease_id, epoch, attempt_id, index = fence_text(fence).split("/")
        handle = Handle(
            execution_id=execution_id,
            lease=f"{lease_id}/{epoch}",
            attempt=f"{attempt_id}/{index}",
            lease_ttl_ms=0,
            lane_id="default",
            worker_instance_id="",
        )
        return await self.suspend(handle, **arguments)

    async def _check_suspend(
        self, condition: Condition, bindings: Sequence[Binding], timeout_at: int | None
    ) -> None:
        keys = [b.waitpoint_key if isinstance(b, FreshWaitpoint) else None for b in bindings]
        check_bindings(condition, keys, timeout_given=timeout_at is not None)
        if timeout_at is not None:
            # Whether it is past is for the engine's clock to say.
            whole(timeout_at, "timeout_at", -MAX_EXACT)
        try:
            check_tree(condition)
            _check_limits(bindings)
        except ValidationError:
            # A time long past is refused first, by the engine's clock. A call that goes through
            # has it checked there; one that stops here has to ask.
            if (
                timeout_at is not None
                and timeout_at + _PAST_TOLERANCE_MS < await self.server_time_ms()
            ):
                raise ValidationError("invalid_input", "timeout_at_in_past") from None
            raise

    # --- waitpoints -----------------------------------------------------------------

    async def create_waitpoint(
        self, handle: Handle, waitpoint_key: str, expires_in_ms: int
    ) -> PendingWaitpoint:
        """A waitpoint that buffers signals until a suspension uses it; the lease is kept."""
        held(handle)
        try:
            validate_text(waitpoint_key, "waitpoint_key", limit=_MAX_KEY_BYTES, required=True)
        except ValidationError as error:
            raise ValidationError("invalid_waitpoint_key", error.detail) from None
        args = (
            handle.execution_id,
            proof(handle),
            new_uuid(),
            waitpoint_key,
            positive_ms(expires_in_ms, "expires_in_ms"),
        )
        tag = handle.execution_id.tag
        reply = await self.fcall("ff_create_waitpoint", tag, args, op="create_waitpoint")
        with decoding(reply, "ff_create_waitpoint", "create_waitpoint", handle.execution_id):
            return PendingWaitpoint(text(reply[2]), text(reply[3]), WaitpointToken(text(reply[4])))

    async def close_waitpoint(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        reason: str = "proactive_close",
        *,
        handle: Handle | None = None,
    ) -> bool:
        """Close a waitpoint; False when it was closed already. Workers pass their handle."""
        execution_id = self.checked(execution_id)
        args = (
            execution_id,
            validate_uuid(waitpoint_id, "waitpoint_id"),
            validate_text(reason, "reason", required=True),
            "" if handle is None else proof(held(handle)),
        )
        reply = await self.fcall("ff_close_waitpoint", execution_id.tag, args, op="close_waitpoint")
        if reply[2:] not in _CLOSED:
            raise unreadable(reply, "ff_close_waitpoint", "close_waitpoint", execution_id)
        if reply[-1] == b"active":
            log.warning(
                "an active waitpoint was closed: something else must end the pause now",
                extra={
                    "action": "waitpoint_closed",
                    "execution_id": execution_id,
                    "waitpoint_id": waitpoint_id,
                },
            )
        return reply[2] == b"closed"

    async def resume_execution(
        self, execution_id: ExecutionId, *, trigger_type: str = "operator", resume_delay_ms: int = 0
    ) -> Resumed:
        """End a pause by hand, whatever its condition says."""
        one_of(trigger_type, "trigger_type", _TRIGGERS)
        whole(resume_delay_ms, "resume_delay_ms", 0)
        execution_id = self.checked(execution_id)
        args = (execution_id, trigger_type, resume_delay_ms)
        # Repeating it would find the execution resumed: the caller reads the state instead.
        reply = await self.fcall(
            "ff_resume", execution_id.tag, args, op="resume_execution", replay_safe=False
        )
        with decoding(reply, "ff_resume", "resume_execution", execution_id):
            return Resumed(PublicState(text(reply[2])))

    # --- for scanners ---------------------------------------------------------------

    async def expire_suspension(self, tag: str, ids: Sequence[str]) -> list[str]:
        """Carry out what due suspensions want; each is checked again."""
        names, tag = each_stored(ids, "ids"), self.checked_tag(tag)
        verdicts: list[str] = []
        for start in range(0, len(names), _EXPIRED_AT_ONCE):
            part = names[start : start + _EXPIRED_AT_ONCE]
            verdicts += await self.ask_each("ff_expire_suspension", tag, *part)
        return verdicts

    async def expire_waitpoints(self, tag: str, ids: Sequence[str]) -> list[str]:
        """Close pending waitpoints that nobody used in time; each is checked again."""
        names = each_stored(ids, "ids")
        return await self.ask_each("ff_expire_waitpoint", self.checked_tag(tag), *names)


def _fresh(condition: Condition) -> list[Binding]:
    """A new waitpoint for every key the condition names; one of its own when it names none."""
    keys = referenced_waitpoint_keys(condition)
    if keys:
        return [FreshWaitpoint(new_uuid(), key) for key in keys]
    return _named([FreshWaitpoint(new_uuid())])


def _named(bindings: Sequence[Binding]) -> list[Binding]:
    """The bindings; a primary one without a key is named after its id."""
    named: list[Binding] = listed(bindings, "waitpoints")[:]
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
    ids: set[str] = set()
    keys: set[str] = set()
    for binding in bindings:
        validate_uuid(binding.waitpoint_id, "waitpoint_id")
        _refuse_twice(binding.waitpoint_id, ids)
        if isinstance(binding, FreshWaitpoint):
            validate_text(binding.waitpoint_key, "waitpoint_key", limit=_MAX_POINTER_BYTES)
            if len(binding.waitpoint_key.encode()) > _MAX_KEY_BYTES:
                raise ValidationError("invalid_input", "waitpoint_key_too_long")
            _refuse_twice(binding.waitpoint_key, keys)


def _refuse_twice(name: str, seen: set[str]) -> None:
    if name in seen:
        raise ValidationError("invalid_input", f"duplicate_waitpoint_binding: {name}")
    seen.add(name)


def _options(
    reason_code: str,
    requested_by: str,
    timeout_behavior: str | None,
    resume_policy: ResumePolicy | None,
    idempotency_key: str | None,
) -> dict[str, Any]:
    """What needs no look at the condition."""
    behavior = "fail" if timeout_behavior is None else timeout_behavior
    one_of(behavior, "timeout_behavior", _BEHAVIORS)
    one_of(requested_by, "requested_by", _REQUESTERS)
    if idempotency_key is not None:
        validate_text(idempotency_key, "idempotency_key")
    policy = ResumePolicy()
    if resume_policy is not None:
        policy = instance(resume_policy, ResumePolicy, "resume_policy")
        for name in _FLAGS:
            flag(getattr(policy, name), name)
    if policy.resume_target != "runnable":
        raise invalid_input("resume_policy", "resume_target must be runnable")
    if policy.resume_delay_ms is not None:
        whole(policy.resume_delay_ms, "resume_delay_ms", 0)
    return {
        "policy": _policy_json(policy).decode(),
        "reason_code": validate_text(reason_code, "reason_code"),
        "requested_by": requested_by,
        "timeout_behavior": behavior,
        "behavior_given": timeout_behavior is not None,
    }


def _binding(binding: Binding) -> list[str]:
    if isinstance(binding, UsePending):
        return ["pending", binding.waitpoint_id, ""]
    return ["fresh", binding.waitpoint_id, binding.waitpoint_key]


def _suspend_outcome(handle: Handle, reply: Sequence[Any]) -> SuspendOutcome:
    word, attempt, lane, instance = (text(part) for part in reply[2:6])
    if word == "already_satisfied":
        # A pending waitpoint is bound alone.
        return AlreadySatisfiedSuspension(_details(reply[6:10]), text(reply[10]))
    if word != "suspended":
        raise ValueError(word)
    parked = msgspec.structs.replace(
        handle, attempt=attempt, lane_id=lane, worker_instance_id=instance, kind="suspended"
    )
    return Suspended(_details(reply[6:]), parked)


def _details(parts: Sequence[Any]) -> SuspensionDetails:
    waitpoints = tuple(
        WaitpointDetails(text(parts[i]), text(parts[i + 1]), WaitpointToken(text(parts[i + 2])))
        for i in range(1, len(parts), 3)
    )
    return SuspensionDetails(text(parts[0]), waitpoints)
