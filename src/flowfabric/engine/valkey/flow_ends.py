"""Cancel flows, and continue with the backlog of earlier calls."""

import asyncio
import logging
from typing import Any

import msgspec

from flowfabric.core.contracts import flows
from flowfabric.core.errors import TimeoutError_, ValidationError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api import check
from flowfabric.engine.api.events import Events
from flowfabric.engine.api.flows import POLICIES
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, text
from flowfabric.engine.valkey.drains import CascadeDrains
from flowfabric.engine.valkey.flow_reads import FlowReads
from flowfabric.engine.valkey.outbox import Outbox
from flowfabric.engine.valkey.places import ValkeyPlaces

log = logging.getLogger(__name__)
_MAX_WAIT_MS = 300_000
_REPEATED_IDS = 1000


class FlowEnds(FlowReads):
    """The part of `Flows` that cancels and drains."""

    def __init__(
        self, calls: FunctionCalls, places: ValkeyPlaces, events: Events, drains: CascadeDrains
    ) -> None:
        super().__init__(calls, places, events, drains)
        self._outbox = Outbox(calls, drains)
        drains.deliver = self._outbox.deliver

    async def cancel_flow(
        self,
        flow_id: str,
        reason: str = "",
        *,
        cancellation_policy: str = "cancel_all",
        grace_ms: int = 30_000,
        wait_timeout_ms: int = 0,
    ) -> flows.CancelFlowOutcome:
        tag = self._tag(flow_id)
        wait = check.whole(wait_timeout_ms, "wait_timeout_ms", 0, _MAX_WAIT_MS)
        reply = await self._flip(tag, flow_id, reason, cancellation_policy, grace_ms)
        first = reply[2] == b"cancelled"
        stored, total, left = text(reply[3]), int(reply[5]), int(reply[6])
        if left and not wait:
            self._drains.cancel(tag, flow_id)
        ids = await self._member_ids(flow_id, None if first else _REPEATED_IDS)
        if wait and left:
            left = await self._drained(flow_id, wait / 1000)
        failed = await self._failed_members(tag, flow_id) if wait else ()
        if failed:
            return flows.PartiallyCancelled(stored, ids, failed)
        if left and first:
            return flows.CancellationScheduled(stored, total, ids)
        return flows.FlowCancelled(stored, ids, total, len(ids) < total, left)

    async def _flip(
        self, tag: str, flow_id: str, reason: str, policy: str, grace_ms: int
    ) -> list[Any]:
        check.text(policy, "cancellation_policy")
        if type(grace_ms) is not int or not 0 <= grace_ms <= check.MAX_EXACT:
            raise ValidationError("invalid_grace_ms", f"must be 0 to {check.MAX_EXACT}")
        if policy not in POLICIES:
            message = "cancel_flow: unknown policy %r; cancelled flow %s with flow_only"
            fields = {"action": "unknown_policy", "flow_id": flow_id, "policy": policy}
            log.warning(message, policy, flow_id, extra=fields)
        args = (flow_id, policy, check.reason(reason, "reason"), grace_ms)
        reply = await self._calls.fcall("ff_cancel_flow", tag, args, op="cancel_flow")
        self._drains.note(tag, reply[7:])
        return reply

    async def cancel_flow_header(
        self,
        flow_id: str,
        reason: str = "",
        *,
        cancellation_policy: str = "cancel_all",
        grace_ms: int = 30_000,
    ) -> flows.HeaderCancelled | flows.HeaderAlreadyTerminal:
        tag = self._tag(flow_id)
        reply = await self._flip(tag, flow_id, reason, cancellation_policy, grace_ms)
        policy, why = text(reply[3]), text(reply[4])
        if reply[2] == b"cancelled":
            return flows.HeaderCancelled(policy, await self._member_ids(flow_id, None))
        ids = await self._member_ids(flow_id, _REPEATED_IDS)
        return flows.HeaderAlreadyTerminal(policy or None, why or None, ids)

    async def _drained(self, flow_id: str, seconds: float) -> int:
        try:
            async with asyncio.timeout(seconds):
                while (await self.drain_flow_cancel(flow_id))[2]:
                    pass
        except TimeoutError:
            raise TimeoutError_("timeout", "members are still being cancelled") from None
        return 0

    async def _failed_members(self, tag: str, flow_id: str) -> tuple[ExecutionId, ...]:
        failed: set[str] = set()
        for name in ("cascade_failed", "cascade_poison"):
            key = keys.index(tag, name)
            found = await self._calls.scan(f"{key}: failed units", key, f"c|{flow_id}|*")
            failed.update(text(entry).split("|")[2] for entry in found)
        members = await self._member_ids(flow_id, None) if failed else ()
        return tuple(member for member in members if member.uuid in failed)

    async def drain_cascade(
        self, partition: int, *, retry: bool = True, parked: bool = False
    ) -> flows.CascadeCounts:
        tag = f"{{fp:{check.whole(partition, 'partition', 0, self._calls.counts.flow - 1)}}}"
        again = 2 if check.flag(parked, "parked") else int(check.flag(retry, "retry"))
        counts, messages = await self._calls.ask(
            *("ff_drain_cascade", tag, (again,)),
            lambda reply: (
                flows.CascadeCounts(*map(int, reply[2:6]), pending=reply[6] == 1),
                int(reply[7]),
            ),
        )
        # What was delivered may have been answered; what cannot be delivered waits.
        if messages and await self._outbox.deliver(tag):
            return msgspec.structs.replace(counts, pending=True)
        return counts

    async def drain_flow_cancel(self, flow_id: str) -> tuple[int, int, int]:
        return await self._calls.ask(
            *("ff_drain_flow_cancel", self._tag(flow_id), (flow_id,)),
            lambda reply: (int(reply[2]), int(reply[3]), int(reply[4])),
        )
