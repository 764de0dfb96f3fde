"""Delivers messages between a subflow and its parent in another partition."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.core.errors import (
    EngineError,
    NotFoundError,
    ReplyError,
    TransportError,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, text
from flowfabric.engine.valkey.drains import CascadeDrains

log = logging.getLogger(__name__)
_AT_ONCE = 16
_GRACE_MS = 0
_decode = msgspec.json.Decoder(list[str]).decode
# The member that should own the flow cannot, now or ever.
_REFUSALS = frozenset(
    {
        "execution_not_found",
        "invalid_input",
        "flow_already_terminal",
        "terminal",
        "flow_submission_conflict",
    }
)


class Outbox:
    """Messages stay stored until the other partition has answered; each may arrive twice."""

    def __init__(self, calls: FunctionCalls, drains: CascadeDrains) -> None:
        self._calls = calls
        self._drains = drains

    async def deliver(self, tag: str) -> int:
        """Deliver some messages of a partition; returns how many were. The others stay stored."""
        key = keys.index(tag, "subflow_outbox")
        found = await self._calls.read(key, "HRANDFIELD", key, _AT_ONCE, "WITHVALUES")
        delivered = 0
        for name, message in _pairs(found):
            head, _, body = message.partition(b"\n")
            refusal = ""
            try:
                kind, flow_id = text(name).split("|")
                await self._send(tag, kind, flow_id, _decode(head)[1:], body)
            except (EngineError, ValueError) as error:
                # A message that cannot be delivered must not delay the others.
                log.debug("could not deliver message %s of %s: %s", text(name), tag, error)
                if _passes(error):
                    continue
                refusal = str(error) or repr(error)
            await self._call(tag, "ff_ack_message", text(name), head, len(message), refusal)
            delivered += not refusal
        return delivered

    async def _send(
        self, tag: str, kind: str, flow_id: str, parts: Sequence[str], body: bytes
    ) -> None:
        match kind:
            case "h":
                await self._ask_parent(tag, flow_id, *parts)
            case "s":
                child_tag, node, which = parts
                if await self._call(child_tag, "ff_start_subflow", flow_id, which) == b"gone":
                    await self._end(ExecutionId.trusted(node), flow_id, "gone")
            case "c":
                child_tag, policy, reason = parts
                await self._cancel(child_tag, flow_id, policy, reason)
            case "d":
                (child_tag,) = parts
                with contextlib.suppress(NotFoundError):
                    await self._call(child_tag, "ff_delete_flow", flow_id, "", "1")
            case _:
                node, state, reason, encoding, has_result = parts
                await self._end(
                    *(ExecutionId.trusted(node), flow_id, state, reason, encoding),
                    *(has_result, body),
                )

    async def _ask_parent(self, tag: str, flow_id: str, node: str, namespace: str) -> None:
        parent = ExecutionId.trusted(node)
        try:
            answer = await self._call(
                *(parent.tag, "ff_ask_parent", parent, flow_id, namespace, tag)
            )
        except EngineError as error:
            if error.code not in _REFUSALS:
                raise
            reason = f"the parent refused this subflow: {error.code}"
            await self._cancel(tag, flow_id, "cancel_all", reason)
            return
        if answer == b"run":
            await self._call(tag, "ff_start_subflow", flow_id, "")

    async def _end(
        self,
        node: ExecutionId,
        flow_id: str,
        state: str,
        reason: str = "",
        encoding: str = "",
        has_result: str = "0",
        result: bytes = b"",
    ) -> None:
        args = (node, flow_id, state, reason, encoding, has_result, result)
        await self._call(node.tag, "ff_end_subflow", *args)

    async def _cancel(self, tag: str, flow_id: str, policy: str, reason: str) -> None:
        try:
            args = (flow_id, policy, reason, _GRACE_MS)
            reply = await self._calls.fcall("ff_cancel_flow", tag, args, op="cancel_flow")
        except EngineError as error:
            if error.code != "flow_not_found":
                raise
            return
        self._drains.note(tag, reply[7:])
        if reply[6]:
            self._drains.cancel(tag, flow_id)

    async def _call(self, tag: str, function: str, *args: Any) -> Any:
        reply = await self._calls.fcall(function, tag, args, op=function.removeprefix("ff_"))
        if function in ("ff_start_subflow", "ff_end_subflow"):
            self._drains.note(tag, reply[3:])
        return reply[2]


def _passes(error: Exception) -> bool:
    """Whether the other partition is only unreachable; what it refuses is set aside in the end."""
    away = isinstance(error, TransportError) and not isinstance(error, ReplyError)
    return away or (isinstance(error, EngineError) and error.retryable)


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:
    """Names and messages, as either protocol version replies."""
    if flat and isinstance(flat[0], list | tuple):
        return [(name, message) for name, message in flat]
    return list(zip(flat[::2], flat[1::2], strict=True))
