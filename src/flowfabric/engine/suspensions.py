"""Suspending attempts, delivering signals, resuming."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.core.conditions import (
    Condition,
    check_bindings,
    check_tree,
    condition_json,
    referenced_waitpoint_keys,
)
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.suspension import (
    Accepted,
    AlreadySatisfiedSuspension,
    Duplicate,
    FreshWaitpoint,
    PendingWaitpoint,
    Resumed,
    ResumePolicy,
    SignalOutcome,
    Suspended,
    SuspendOutcome,
    SuspensionDetails,
    UsePending,
    WaitpointDetails,
)
from flowfabric.core.errors import StateError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId, WaitpointToken, new_uuid, validate_text, validate_uuid
from flowfabric.core.state import PublicState
from flowfabric.engine.calls import Calls, text
from flowfabric.engine.leases import positive_ms

__all__ = ["Suspensions"]

log = logging.getLogger(__name__)

_MAX_WAITPOINTS = 64
_MAX_KEY_BYTES = 256
_MAX_NAME_BYTES = 256
_MAX_FIELD_BYTES = 512
_MAX_SIGNAL_BYTES = 65_536
_MAX_TIME = 2**53 - 1
_PAST_TOLERANCE_MS = 600_000
_CLOCK_DOUBT_MS = 3_600_000
_BEHAVIORS = {
    "fail",
    "cancel",
    "expire",
    "auto_resume",
    "auto_resume_with_timeout_signal",
    "escalate",
}
_REQUESTERS = {"worker", "operator", "policy", "system_timeout_policy"}
_TRIGGERS = {"signal", "operator", "auto_resume"}
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
        waitpoints: Sequence[Binding] = (),
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
        the same idempotency key (default: the suspension id) gives the first answer.
        """
        if handle.kind == "suspended":
            raise StateError("already_suspended", op="suspend")
        bindings = list(waitpoints) or _fresh(condition)
        await self._check_suspend(condition, bindings, timeout_at)
        behavior = timeout_behavior or "fail"
        if behavior not in _BEHAVIORS:
            raise invalid_input(
                "timeout_behavior", f"must be one of {', '.join(sorted(_BEHAVIORS))}"
            )
        if requested_by not in _REQUESTERS:
            raise invalid_input("requested_by", f"must be one of {', '.join(sorted(_REQUESTERS))}")
        identity = (
            new_uuid() if suspension_id is None else validate_uuid(suspension_id, "suspension_id")
        )
        options = {
            "suspension_id": identity,
            "waitpoints": [_binding(binding) for binding in bindings],
            "referenced": referenced_waitpoint_keys(condition),
            "condition": condition_json(condition),
            "policy": _policy_json(resume_policy or ResumePolicy()).decode(),
            "reason_code": reason_code,
            "requested_by": requested_by,
            "timeout_at": timeout_at,
            "timeout_behavior": behavior,
            "behavior_given": timeout_behavior is not None,
            "pointer": continuation_metadata_pointer,
            "idem": identity if idempotency_key is None else idempotency_key,
        }
        options = {name: value for name, value in options.items() if value is not None}
        execution_id = handle.execution_id
        args = (execution_id, handle.wire, _pack(options))
        reply = await self.fcall("ff_suspend", execution_id.tag, args, op="suspend")
        details = _details(reply[3:])
        if reply[2] == b"already_satisfied":
            return AlreadySatisfiedSuspension(details)
        return Suspended(details, msgspec.structs.replace(handle, kind="suspended"))

    async def suspend_by_triple(
        self, execution_id: ExecutionId, fence: Fence, **arguments: Any
    ) -> SuspendOutcome:
        """`suspend` for services that hold a fence but no handle."""
        execution_id = self.checked(execution_id)
        epoch = "" if fence.lease_epoch is None else fence.lease_epoch
        index = "" if fence.attempt_index is None else fence.attempt_index
        handle = Handle(
            execution_id=execution_id,
            lease=f"{fence.lease_id}/{epoch}",
            attempt=f"{fence.attempt_id}/{index}",
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
            await self._check_timeout(timeout_at)
        check_tree(condition)
        if len(bindings) > _MAX_WAITPOINTS:
            raise ValidationError("invalid_input", "too_many_waitpoints")
        seen: set[str] = set()
        for binding in bindings:
            validate_uuid(binding.waitpoint_id, "waitpoint_id")
            names = [binding.waitpoint_id]
            if isinstance(binding, FreshWaitpoint):
                if len(binding.waitpoint_key.encode()) > _MAX_KEY_BYTES:
                    raise ValidationError("invalid_input", "waitpoint_key_too_long")
                names.append(binding.waitpoint_key)
            for name in names:
                if name in seen:
                    raise ValidationError("invalid_input", f"duplicate_waitpoint_binding: {name}")
                seen.add(name)

    async def _check_timeout(self, timeout_at: int) -> None:
        """A time long past is a mistake. The server's clock decides, asked only when in doubt."""
        if isinstance(timeout_at, bool) or not 0 < timeout_at <= _MAX_TIME:
            raise invalid_input("timeout_at", "must be milliseconds since 1970")
        if timeout_at + _PAST_TOLERANCE_MS > time.time() * 1000 + _CLOCK_DOUBT_MS:
            return
        if timeout_at + _PAST_TOLERANCE_MS < await self._server_time():
            raise ValidationError("invalid_input", "timeout_at_in_past")

    async def _server_time(self) -> int:
        reply = await self.fcall("ff_scan_due", "{fp:0}", (1, 0, 0), op="suspend")
        return int(reply[2])

    # --- waitpoints -----------------------------------------------------------------

    async def create_waitpoint(
        self, handle: Handle, waitpoint_key: str, expires_in_ms: int
    ) -> PendingWaitpoint:
        """A waitpoint that buffers signals until a suspension uses it; the lease is kept."""
        if not waitpoint_key or len(waitpoint_key.encode()) > _MAX_KEY_BYTES:
            raise ValidationError("invalid_waitpoint_key", f"must be 1 to {_MAX_KEY_BYTES} bytes")
        args = (
            handle.execution_id,
            handle.wire,
            new_uuid(),
            waitpoint_key,
            positive_ms(expires_in_ms, "expires_in"),
        )
        tag = handle.execution_id.tag
        reply = await self.fcall("ff_create_waitpoint", tag, args, op="create_waitpoint")
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
        wire = "" if handle is None else handle.wire
        args = (execution_id, validate_uuid(waitpoint_id, "waitpoint_id"), reason, wire, "0")
        reply = await self.fcall("ff_close_waitpoint", execution_id.tag, args, op="close_waitpoint")
        if reply[2] == b"closed" and reply[3] == b"active":
            log.warning(
                "an active waitpoint was closed: something else must end the pause now",
                extra={"action": "waitpoint_closed", "execution_id": execution_id},
            )
        return reply[2] == b"closed"

    # --- signals --------------------------------------------------------------------

    async def deliver_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        waitpoint_token: WaitpointToken | str,
        signal_name: str,
        *,
        payload: bytes | None = None,
        payload_encoding: str = "json",
        signal_category: str = "default",
        source_type: str = "external",
        source_identity: str = "",
        correlation_id: str = "",
        idempotency_key: str = "",
        target_scope: str = "waitpoint",
        signal_id: str | None = None,
        created_at: int | None = None,
        dedup_ttl_ms: int = 86_400_000,
        resume_delay_ms: int = 0,
        max_signals_per_execution: int | None = None,
        signal_maxlen: int = 1000,
    ) -> SignalOutcome:
        """Deliver an authenticated message to a waitpoint; resumes when it satisfies."""
        raw = (
            waitpoint_token.reveal()
            if isinstance(waitpoint_token, WaitpointToken)
            else waitpoint_token
        )
        options = _signal_options(
            signal_name,
            payload,
            payload_encoding=payload_encoding,
            category=signal_category,
            source_type=source_type,
            source_identity=source_identity,
            correlation_id=correlation_id,
            idempotency_key=idempotency_key,
            target_scope=target_scope,
        )
        options["dedup_ttl_ms"] = dedup_ttl_ms
        options["resume_delay_ms"] = resume_delay_ms
        options["maxlen"] = signal_maxlen
        if max_signals_per_execution is not None:
            options["max_signals"] = max_signals_per_execution
        if created_at is not None:
            options["created_at"] = created_at
        execution_id = self.checked(execution_id)
        validate_uuid(waitpoint_id, "waitpoint_id")
        identity = new_uuid() if signal_id is None else validate_uuid(signal_id, "signal_id")
        if not raw:
            raise ValidationError("missing_token", op="deliver_signal")
        return await self._signal(execution_id, waitpoint_id, identity, raw, options, payload)

    async def _signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        signal_id: str,
        token: str,
        options: dict[str, Any],
        payload: bytes | None,
        *,
        vouched: bool = False,
    ) -> SignalOutcome:
        args = (
            execution_id,
            waitpoint_id,
            signal_id,
            token,
            _pack(options),
            "0" if payload is None else "1",
            payload or b"",
            "1" if vouched else "0",
        )
        reply = await self.fcall("ff_signal", execution_id.tag, args, op="deliver_signal")
        known = text(reply[3])
        if reply[2] == b"accepted":
            return Accepted(known, text(reply[4]))
        # The signal id is minted per call: meeting it again means that our own reply was lost.
        if known == signal_id and not options["idempotency_key"]:
            return Accepted(known, await self._effect(execution_id, known))
        return Duplicate(known)

    async def _effect(self, execution_id: ExecutionId, signal_id: str) -> str:
        key = f"ff:signal:{execution_id.tag}:{signal_id}"
        stored: Any = await self.transport.call("HGET", key, "observed_effect", key=key)
        return text(stored)

    async def deliver_approval_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        signal_name: str,
        *,
        idempotency_suffix: str = "",
        decided_by: str = "",
        payload: bytes | None = None,
        lane_id: str = "",
        signal_dedup_ttl_ms: int = 86_400_000,
        maxlen: int = 1000,
        max_signals_per_execution: int | None = None,
    ) -> SignalOutcome:
        """An operator decides: the engine vouches, no token is needed."""
        execution_id = self.checked(execution_id)
        validate_uuid(waitpoint_id, "waitpoint_id")
        if lane_id:
            await self._check_lane(execution_id, lane_id)
        options = _signal_options(
            signal_name,
            payload,
            payload_encoding="json",
            category="approval",
            source_type="operator",
            source_identity=decided_by,
            correlation_id="",
            idempotency_key=f"approval:{signal_name}:{idempotency_suffix or decided_by}",
            target_scope="execution",
        )
        options |= {"dedup_ttl_ms": signal_dedup_ttl_ms, "resume_delay_ms": 0, "maxlen": maxlen}
        if max_signals_per_execution is not None:
            options["max_signals"] = max_signals_per_execution
        return await self._signal(
            execution_id, waitpoint_id, new_uuid(), "", options, payload, vouched=True
        )

    async def _check_lane(self, execution_id: ExecutionId, lane_id: str) -> None:
        key = f"ff:exec:{execution_id.tag}:{execution_id}:core"
        stored: Any = await self.transport.call("HGET", key, "lane_id", key=key)
        lane = "default" if stored is None else text(stored)
        if lane != lane_id:
            raise invalid_input("lane_id", f"lane_mismatch: the execution is on {lane}")

    async def resume_execution(
        self, execution_id: ExecutionId, *, trigger_type: str = "operator", resume_delay_ms: int = 0
    ) -> Resumed:
        """End a pause by hand, whatever its condition says."""
        if trigger_type not in _TRIGGERS:
            raise invalid_input("trigger_type", f"must be one of {', '.join(sorted(_TRIGGERS))}")
        if resume_delay_ms < 0:
            raise invalid_input("resume_delay_ms", "must not be negative")
        execution_id = self.checked(execution_id)
        args = (execution_id, trigger_type, resume_delay_ms)
        # Repeating it would find the execution resumed: the caller reads the state instead.
        reply = await self.fcall(
            "ff_resume", execution_id.tag, args, op="resume_execution", replay_safe=False
        )
        return Resumed(PublicState(text(reply[2])))

    # --- for scanners ---------------------------------------------------------------

    async def expire_suspension(self, tag: str, ids: Sequence[str]) -> list[str]:
        """Carry out what due suspensions want; each is checked again."""
        reply = await self.fcall("ff_expire_suspension", tag, tuple(ids), op="expire_suspension")
        return [text(answer) for answer in reply[2]]

    async def expire_waitpoint(self, tag: str, waitpoint_id: str) -> str:
        """Close a pending waitpoint that nobody used in time."""
        args = ("", waitpoint_id, "never_committed", "", "1")
        reply = await self.fcall("ff_close_waitpoint", tag, args, op="expire_waitpoint")
        return text(reply[2])


def _fresh(condition: Condition) -> list[Binding]:
    """A new waitpoint for every key the condition names; one of its own when it names none."""
    keys = referenced_waitpoint_keys(condition)
    if keys:
        return [FreshWaitpoint(new_uuid(), key) for key in keys]
    identity = new_uuid()
    return [FreshWaitpoint(identity, f"wpk:{identity}")]


def _binding(binding: Binding) -> list[str]:
    if isinstance(binding, UsePending):
        return ["pending", binding.waitpoint_id, ""]
    return ["fresh", binding.waitpoint_id, binding.waitpoint_key]


def _details(parts: Sequence[Any]) -> SuspensionDetails:
    waitpoints = tuple(
        WaitpointDetails(text(parts[i]), text(parts[i + 1]), WaitpointToken(text(parts[i + 2])))
        for i in range(1, len(parts), 3)
    )
    return SuspensionDetails(text(parts[0]), waitpoints)


def _signal_options(
    signal_name: str,
    payload: bytes | None,
    *,
    category: str,
    source_type: str,
    source_identity: str,
    correlation_id: str,
    idempotency_key: str,
    target_scope: str,
    payload_encoding: str,
) -> dict[str, Any]:
    """Checked against the limits that need no look at storage."""
    validate_text(signal_name, "signal_name", limit=_MAX_NAME_BYTES, required=True)
    for field, value in (
        ("signal_category", category),
        ("source_type", source_type),
        ("source_identity", source_identity),
        ("correlation_id", correlation_id),
        ("idempotency_key", idempotency_key),
    ):
        validate_text(value, field, limit=_MAX_FIELD_BYTES)
    if target_scope not in ("waitpoint", "execution"):
        raise invalid_input("target_scope", "must be waitpoint or execution")
    if payload is not None and len(payload) > _MAX_SIGNAL_BYTES:
        raise ValidationError(
            "payload_too_large", f"a signal carries at most {_MAX_SIGNAL_BYTES} bytes"
        )
    return {
        "name": signal_name,
        "category": category,
        "source_type": source_type,
        "source_identity": source_identity,
        "correlation_id": correlation_id,
        "idempotency_key": idempotency_key,
        "target_scope": target_scope,
        "payload_encoding": payload_encoding if payload is not None else "",
    }
