"""Sending a signal from the command line."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric.cli.errors import CliError, UsageError
from flowfabric.cli.options import Target
from flowfabric.cli.resolve import resolve
from flowfabric.cli.session import opened
from flowfabric.cli.signal_target import find_waitpoint, read_payload, say, too_late
from flowfabric.core.errors import EngineError, FlowFabricError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.backend import Backend

__all__ = ["Signal", "send"]

_WITHOUT = (
    "set FF_WAITPOINT_TOKEN to the token that was handed out with the waitpoint; an operator "
    "answers without one: `flowfabric approve`"
)
_REFUSED = {
    "invalid_token": "the token was not made for this waitpoint; pass it exactly as it was handed "
    "out (`flowfabric waiting` shows key and fingerprint of the right one)",
    "token_expired": "the key that signed this token was retired; get a new one from the "
    "application, or answer as an operator: `flowfabric approve`",
}


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, as it was typed. Its text form leaves the token out."""

    waitpoint: str
    name: str
    token: str
    payload: str | None
    source: str
    idempotency_key: str

    def __repr__(self) -> str:
        return f"Signal({self.waitpoint!r}, {self.name!r})"


def send(target: Target, text: str, signal: Signal, *, as_json: bool) -> None:
    """Deliver it and say what came of it."""
    if not signal.token:
        raise UsageError("missing_token", "a signal needs the waitpoint's token", _WITHOUT)
    payload = read_payload(signal.payload)
    asyncio.run(_send(target, text, signal, payload, as_json=as_json))


async def _send(
    target: Target, text: str, signal: Signal, payload: bytes | None, *, as_json: bool
) -> None:
    async with opened(target.url) as backend:
        execution_id = await resolve(backend, text, target.namespace)
        waitpoint = await find_waitpoint(backend, execution_id, signal.waitpoint)
        try:
            outcome = await backend.deliver_signal(
                execution_id,
                waitpoint.waitpoint_id,
                signal.token,
                signal.name,
                payload=payload,
                source_identity=signal.source,
                idempotency_key=signal.idempotency_key,
            )
        except EngineError as error:
            raise await _told(backend, execution_id, error) from error
    say(execution_id, waitpoint, signal.name, outcome, as_json=as_json)


async def _told(backend: Backend, execution_id: ExecutionId, error: EngineError) -> FlowFabricError:
    hint = _REFUSED.get(error.code)
    if hint is not None:
        return CliError(error.code, "the waitpoint's token was refused", hint)
    return await too_late(backend, execution_id, error.code) or error
