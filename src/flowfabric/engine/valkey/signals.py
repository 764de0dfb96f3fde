"""Delivering signals: with a waitpoint's token, or vouched for by the engine itself."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec

from flowfabric.core.conditions import OPERATOR
from flowfabric.core.contracts.suspension import Accepted, Duplicate, SignalOutcome
from flowfabric.core.errors import NotFoundError, ValidationError, invalid_input
from flowfabric.core.ids import (
    ExecutionId,
    WaitpointToken,
    new_uuid,
    validate_lane,
    validate_text,
    validate_uuid,
)
from flowfabric.engine.api.arguments import checked_bytes, checked_text, instance, one_of, whole
from flowfabric.engine.api.signals import Signals
from flowfabric.engine.valkey.calls import FunctionCalls, text

_decode = msgspec.json.Decoder().decode

_MAX_JSON_DEPTH = 100

_JSON = "json"

_MAX_SIGNAL_BYTES = 65_536

_MAX_NAME_BYTES = 256

_pack = msgspec.msgpack.Encoder().encode

_DAY_MS = 86_400_000

_MAX_FIELD_BYTES = 512


class ValkeySignals(Signals):
    """`Signals` on Valkey."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def deliver_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        waitpoint_token: WaitpointToken | str,
        signal_name: str,
        *,
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        signal_category: str = "default",
        source_type: str = "external",
        source_identity: str = "",
        correlation_id: str = "",
        idempotency_key: str = "",
        target_scope: str = "waitpoint",
        signal_id: str | None = None,
        created_at: int | None = None,
        dedup_ttl_ms: int = _DAY_MS,
        resume_delay_ms: int = 0,
        max_signals_per_execution: int | None = None,
        signal_maxlen: int = 1000,
    ) -> SignalOutcome:
        options = _options(
            signal_name,
            payload,
            payload_encoding=payload_encoding,
            category=signal_category,
            source_type=source_type,
            source_identity=source_identity,
            correlation_id=correlation_id,
            target_scope=target_scope,
        )
        if source_type == OPERATOR:
            raise invalid_input(
                "source_type", '"operator" is reserved: use deliver_approval_signal'
            )
        validate_text(idempotency_key, "idempotency_key", limit=_MAX_FIELD_BYTES)
        options["idempotency_key"] = idempotency_key
        options["resume_delay_ms"] = whole(resume_delay_ms, "resume_delay_ms", 0)
        if created_at is not None:
            options["created_at"] = whole(created_at, "created_at", 0)
        options["dedup_ttl_ms"] = whole(dedup_ttl_ms, "dedup_ttl_ms", 0)
        options["maxlen"] = whole(signal_maxlen, "signal_maxlen", 1)
        options |= _most(max_signals_per_execution)
        execution_id = self._calls.checked(execution_id)
        validate_uuid(waitpoint_id, "waitpoint_id")
        if signal_id is not None:
            validate_uuid(signal_id, "signal_id")
        raw = _revealed(waitpoint_token, "waitpoint_token")
        if not raw:
            raise ValidationError("missing_token", op="deliver_signal")
        return await self._signal(execution_id, waitpoint_id, signal_id, raw, options, payload)

    async def _signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        signal_id: str | None,
        token: str,
        options: dict[str, Any],
        payload: bytes | None,
        *,
        vouched: bool = False,
    ) -> SignalOutcome:
        identity = new_uuid() if signal_id is None else signal_id
        args = (
            execution_id,
            waitpoint_id,
            identity,
            token.encode(errors="surrogatepass"),
            _pack(options),
            "0" if payload is None else "1",
            payload or b"",
            "1" if vouched else "0",
        )

        def outcome(reply: list[Any]) -> SignalOutcome:
            known, effect = text(reply[3]), reply[4]
            # An id minted for this very call and known already: our own reply was lost.
            if reply[2] == b"accepted" or (signal_id is None and known == identity):
                return Accepted(known, text(effect))
            return Duplicate(known)

        return await self._calls.ask(
            "ff_signal", execution_id.tag, args, outcome, op="deliver_signal"
        )

    async def deliver_approval_signal(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        signal_name: str,
        *,
        idempotency_suffix: str = "",
        decided_by: str = "",
        payload: bytes | None = None,
        payload_encoding: str | None = None,
        lane_id: str = "",
        signal_dedup_ttl_ms: int = _DAY_MS,
        maxlen: int = 1000,
        max_signals_per_execution: int | None = None,
    ) -> SignalOutcome:
        validate_text(decided_by, "decided_by", limit=_MAX_FIELD_BYTES)
        options = _options(
            signal_name,
            payload,
            payload_encoding=payload_encoding,
            category="approval",
            source_type=OPERATOR,
            source_identity=decided_by,
            correlation_id="",
            target_scope="execution",
        )
        validate_text(idempotency_suffix, "idempotency_suffix", limit=_MAX_FIELD_BYTES)
        options["idempotency_key"] = f"approval:{signal_name}:{idempotency_suffix or decided_by}"
        options["dedup_ttl_ms"] = whole(signal_dedup_ttl_ms, "signal_dedup_ttl_ms", 0)
        options["maxlen"] = whole(maxlen, "maxlen", 1)
        options |= _most(max_signals_per_execution)
        if checked_text(lane_id, "lane_id"):
            options["lane"] = validate_lane(lane_id)
        execution_id = self._calls.checked(execution_id)
        validate_uuid(waitpoint_id, "waitpoint_id")
        return await self._signal(
            execution_id, waitpoint_id, None, "", options, payload, vouched=True
        )

    async def read_waitpoint_token(
        self, execution_id: ExecutionId, waitpoint_id: str
    ) -> WaitpointToken | None:
        return await self._stored_token(execution_id, waitpoint_id)

    async def _stored_token(
        self, execution_id: ExecutionId, waitpoint_id: str
    ) -> WaitpointToken | None:
        execution_id = self._calls.checked(execution_id)
        args = (execution_id, validate_uuid(waitpoint_id, "waitpoint_id"))
        return await self._calls.ask(
            "ff_waitpoint_token", execution_id.tag, args, _token, op="read_waitpoint_token"
        )

    async def verify_and_deliver(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        presented: WaitpointToken | str,
        signal_name: str,
        **options: Any,
    ) -> SignalOutcome:
        raw = _revealed(presented, "presented")
        stored = await self._stored_token(execution_id, waitpoint_id)
        if stored is None:
            raise NotFoundError("waitpoint_token_not_found", op="verify_and_deliver")
        if not hmac.compare_digest(stored.reveal().encode(), raw.encode(errors="surrogatepass")):
            raise ValidationError("invalid_token", op="verify_and_deliver")
        return await self.deliver_signal(execution_id, waitpoint_id, raw, signal_name, **options)


def _token(reply: list[Any]) -> WaitpointToken | None:
    return None if reply[2] is None else WaitpointToken(text(reply[2]))


def _revealed(token: WaitpointToken | str, field: str) -> str:
    """A token as it is sent; one of any form is for the engine to judge."""
    if isinstance(token, WaitpointToken):
        return token.reveal()
    return instance(token, str, field)


def _most(max_signals: int | None) -> dict[str, int]:
    if max_signals is None:
        return {}
    return {"max_signals": whole(max_signals, "max_signals_per_execution", 0)}


def _options(
    signal_name: str,
    payload: bytes | None,
    *,
    category: str,
    source_type: str,
    source_identity: str,
    correlation_id: str,
    target_scope: str,
    payload_encoding: str | None,
) -> dict[str, Any]:
    """Checked against the limits that need no look at storage."""
    validate_text(signal_name, "signal_name", limit=_MAX_NAME_BYTES, required=True)
    for field, value in (
        ("signal_category", category),
        ("source_type", source_type),
        ("source_identity", source_identity),
        ("correlation_id", correlation_id),
        ("payload_encoding", payload_encoding or ""),
    ):
        validate_text(value, field, limit=_MAX_FIELD_BYTES)
    one_of(target_scope, "target_scope", ("waitpoint", "execution"))
    if payload is not None and len(checked_bytes(payload, "payload")) > _MAX_SIGNAL_BYTES:
        raise ValidationError(
            "payload_too_large", f"a signal carries at most {_MAX_SIGNAL_BYTES} bytes"
        )
    return {
        "name": signal_name,
        "category": category,
        "source_type": source_type,
        "source_identity": source_identity,
        "correlation_id": correlation_id,
        "target_scope": target_scope,
        "payload_encoding": "" if payload is None else _label(payload, payload_encoding),
    }


def _label(payload: bytes, given: str | None) -> str:
    """The label to store. Whoever reads `json` there must be able to decode it."""
    if given not in (None, _JSON):
        return given
    try:
        problem = "nests too deeply" if _is_deep(payload, _decode(payload)) else ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        problem = "is not JSON"
    if problem and given is not None:
        raise invalid_input("payload", f"{problem}. Send it with another payload_encoding.")
    return "" if problem else _JSON


def _is_deep(payload: bytes, value: Any) -> bool:
    if payload.count(b"[") + payload.count(b"{") <= _MAX_JSON_DEPTH:
        return False
    layer = _nested([value])
    for _ in range(_MAX_JSON_DEPTH):
        layer = [part for each in layer for part in _nested(each)]
    return bool(layer)


def _nested(value: list[Any] | dict[str, Any]) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value
    return [part for part in parts if isinstance(part, list | dict)]
