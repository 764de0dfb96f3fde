"""Calling the function library: envelope, typed errors, one reload when it is missing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.errors import EngineError, TransportError, ValidationError, engine_error
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.valkey.library import ensure_library
from flowfabric.valkey.transport import Arg, Transport

__all__ = ["Calls", "Limits", "proof", "refusal", "refused", "text"]

log = logging.getLogger(__name__)


class Limits(msgspec.Struct, frozen=True):
    """Sizes that are checked before anything is sent."""

    max_payload_bytes: int = 1_048_576


def text(value: object) -> str:
    """A reply's text, whatever the server's type for it."""
    return value.decode() if isinstance(value, bytes) else str(value)


def refused(envelope: Sequence[Any], op: str) -> EngineError:
    """The typed error that an engine function answered with."""
    return engine_error(text(envelope[1]), [text(part) for part in envelope[2:]], op)


def refusal(answer: Any, op: str) -> EngineError | None:
    """The error of one item of a batch, or None when the item succeeded."""
    if type(answer) is list:
        return refused(cast("list[Any]", answer), op)
    return None


def proof(holder: Handle | Fence) -> str:
    """The fence as the functions compare it; another backend's handle proves nothing here."""
    if isinstance(holder, Handle) and holder.backend != "valkey":
        raise ValidationError(
            "handle_from_other_backend", f"expected=valkey actual={holder.backend}"
        )
    return holder.wire


class Calls:
    """What every concern of the backend shares: the transport, the counts, the limits."""

    def __init__(
        self, transport: Transport, counts: PartitionCounts, limits: Limits, *, testing: bool
    ) -> None:
        self.transport = transport
        self.counts = counts
        self.limits = limits
        self._testing = testing

    async def fcall(
        self, function: str, tag: str, args: Sequence[Arg], *, op: str, replay_safe: bool = True
    ) -> list[Any]:
        """The reply after its envelope; a refusal is raised as its typed error.

        `replay_safe` lets the transport repeat a call whose reply was lost: the functions
        recognise a repeat, so this is the default.
        """
        try:
            reply: Any = await self.transport.fcall(function, tag, args, replay_safe=replay_safe)
        except TransportError as error:
            if error.kind != "script_not_loaded":
                error.op = op
                raise
            log.warning("function %s is missing on the server, loading the library", function)
            await ensure_library(self.transport, testing=self._testing)
            reply = await self.transport.fcall(function, tag, args, replay_safe=replay_safe)
        if reply[0] == 1:
            return reply
        raise refused(reply, op)

    def checked(self, execution_id: str) -> ExecutionId:
        """The id in its canonical form and in range, or `invalid_input`."""
        known = (
            execution_id
            if isinstance(execution_id, ExecutionId)
            else ExecutionId.parse(execution_id)
        )
        return known.check_partition(self.counts)
