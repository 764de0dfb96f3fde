"""Delivering signals: with a waitpoint's token, or vouched for by the engine itself."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec

from flowfabric.core.contracts.suspension import Accepted, DuplicateSignal, SignalOutcome
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId, WaitpointToken, new_uuid, validate_uuid
from flowfabric.engine.api.signals import CheckedSignal, Signals, revealed
from flowfabric.engine.valkey.calls import FunctionCalls, text

_pack = msgspec.msgpack.Encoder().encode


class ValkeySignals(Signals):
    """`Signals` on Valkey."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def _deliver(
        self, execution_id: ExecutionId, waitpoint_id: str, signal: CheckedSignal
    ) -> SignalOutcome:
        validate_uuid(waitpoint_id, "waitpoint_id")
        if signal.token == "":
            raise ValidationError("missing_token", op="deliver_signal")
        identity = new_uuid() if signal.signal_id is None else signal.signal_id
        args = (
            waitpoint_id,
            identity,
            (signal.token or "").encode(errors="surrogatepass"),
            _pack(signal.options),
            "0" if signal.payload is None else "1",
            signal.payload or b"",
            "1" if signal.token is None else "0",
        )

        def outcome(reply: list[Any]) -> SignalOutcome:
            known, effect = text(reply[3]), reply[4]
            # An id minted for this very call and already known: our own reply was lost.
            if reply[2] == b"accepted" or (signal.signal_id is None and known == identity):
                return Accepted(known, text(effect))
            return DuplicateSignal(known)

        return await self._calls.ask_about(
            execution_id, "ff_signal", args, outcome, op="deliver_signal"
        )

    async def read_waitpoint_token(
        self, execution_id: ExecutionId, waitpoint_id: str
    ) -> WaitpointToken | None:
        args = (validate_uuid(waitpoint_id, "waitpoint_id"),)
        return await self._calls.ask_about(
            *(execution_id, "ff_waitpoint_token", args),
            lambda reply: None if reply[2] is None else WaitpointToken(text(reply[2])),
            op="read_waitpoint_token",
        )

    async def verify_and_deliver(
        self,
        execution_id: ExecutionId,
        waitpoint_id: str,
        presented: WaitpointToken | str,
        signal_name: str,
        **options: Any,
    ) -> SignalOutcome:
        given = revealed(presented, "presented")
        # Not through `self`, where layers log every token that is read for an operator.
        stored = await ValkeySignals.read_waitpoint_token(self, execution_id, waitpoint_id)
        if stored is None:
            raise NotFoundError("waitpoint_token_not_found", op="verify_and_deliver")
        if not hmac.compare_digest(stored.reveal().encode(), given.encode(errors="surrogatepass")):
            raise ValidationError("invalid_token", op="verify_and_deliver")
        return await self.deliver_signal(execution_id, waitpoint_id, given, signal_name, **options)
