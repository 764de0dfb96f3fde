"""Background work for flows: resolving, draining, auditing, deleting."""

from typing import Any

from flowfabric.core.contracts import flows
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId, new_uuid, validate_uuid
from flowfabric.core.state import PublicState
from flowfabric.engine.api import check
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import text
from flowfabric.engine.valkey.executions import PUBLIC
from flowfabric.engine.valkey.flow_ends import FlowEnds

_OUTCOMES = {"success": "s", "failed": "f", "cancelled": "c", "expired": "x", "skipped": "k"}
_NO_COUNTS = b"\x80"


class FlowUpkeep(FlowEnds):
    """The part of `Flows` that scanners and drains call."""

    async def delete_flow(self, flow_id: str) -> flows.FlowDeleted:
        tag = self._tag(flow_id)
        await self._delete(tag, flow_id, "")
        return flows.FlowDeleted(flow_id)

    async def _delete(self, tag: str, flow_id: str, digest: str) -> None:
        """Delete a flow step by step; with a digest, an incomplete submission."""
        begun = False
        while True:
            try:
                reply = await self._calls.fcall(
                    "ff_delete_flow", tag, (flow_id, digest, 0), op="delete_flow"
                )
            except NotFoundError:
                # The reply to the last step was lost, or another process deletes it, too.
                if begun:
                    return
                raise
            if reply[2] != b"deleting":
                return
            begun = True

    async def replay_flow(self, flow_id: str, *, failed_only: bool = True) -> flows.FlowReplayed:
        which = "failed" if check.flag(failed_only, "failed_only") else "all"
        replayed = await self._calls.ask(
            *("ff_replay_flow", self._tag(flow_id), (flow_id, which, new_uuid())),
            lambda reply: flows.FlowReplayed(int(reply[2]), int(reply[3]), reply[4] == 1),
        )
        if replayed.pending:
            self._drains.drain(self._tag(flow_id))
        return replayed

    async def flow_ids(self, partition: int, after: str = "", limit: int = 100) -> list[str]:
        tag = f"{{fp:{check.partition(partition, self._calls.counts)}}}"
        first = f"({check.text(after, 'after')}" if after else "-"
        bounds = (first, "+", "BYLEX", "LIMIT", 0, check.whole(limit, "limit", 1))
        key = keys.index(tag, "flow_index")
        return [text(each) for each in await self._calls.read(key, "ZRANGE", key, *bounds)]

    async def project_flow_summary(self, flow_id: str) -> flows.FlowAudit:
        tag = self._tag(flow_id)
        number, changes, counts = "0", "", _NO_COUNTS
        while True:
            args: tuple[Any, ...] = (flow_id, number, changes, counts)
            reply = await self._calls.fcall("ff_audit_flow", tag, args, op="project_flow_summary")
            match reply[2:]:
                case [b"more", last, seen, so_far]:
                    number, changes, counts = text(last), text(seen), so_far
                case [b"deleting"]:
                    number, changes, counts = "0", "", _NO_COUNTS
                case [outcome, *drift]:
                    found = tuple(text(each) for each in (drift[0] if drift else ()))
                    return flows.FlowAudit(text(outcome), found)  # pyright: ignore[reportArgumentType]
                case _:
                    raise ValueError(reply)

    async def promote_blocked_to_eligible(self, execution_id: ExecutionId) -> PublicState:
        return await self._calls.ask_about(
            *(execution_id, "ff_promote_blocked", ()),
            lambda reply: PUBLIC[reply[2]],
            op="promote_blocked_to_eligible",
            replay_safe=False,
        )

    async def resolve_dependency(
        self, flow_id: str, edge_id: str, upstream_outcome: str
    ) -> flows.DependencyResolved:
        outcome = check.one_of(upstream_outcome, "upstream_outcome", tuple(_OUTCOMES))
        args = (flow_id, validate_uuid(edge_id, "edge_id"), _OUTCOMES[outcome])
        tag = self._tag(flow_id)
        reply = await self._calls.fcall(
            "ff_resolve_edge", tag, args, op="resolve_dependency", replay_safe=False
        )
        self._drains.note(tag, reply[4:])
        verdict, more = text(reply[2]), reply[3] == 1
        return flows.DependencyResolved(
            verdict,  # pyright: ignore[reportArgumentType]
            data_injected=more and verdict != "impossible",
            child_skipped=more and verdict == "impossible",
        )

    async def cascade_completion(self, execution_id: ExecutionId) -> flows.CascadeOutcome:
        return await self._calls.ask_about(
            *(execution_id, "ff_cascade_ended", ()),
            lambda reply: flows.CascadeOutcome(
                int(reply[2]), int(reply[4]) + int(reply[5]), reply[6] == 0
            ),
            op="cascade_completion",
        )

    async def ack_cancel_member(self, flow_id: str, execution_id: ExecutionId) -> int:
        args = (flow_id, self._calls.checked(execution_id))
        return await self._calls.ask(
            *("ff_ack_cancel", self._tag(flow_id), args),
            lambda reply: int(reply[2]),
            op="ack_cancel_member",
        )

    async def drain_sibling_cancel_group(
        self, flow_id: str, downstream_execution_id: ExecutionId
    ) -> flows.SiblingDrain:
        return await self._sibling_group(flow_id, downstream_execution_id, "drain")

    async def reconcile_sibling_cancel_group(
        self, flow_id: str, downstream_execution_id: ExecutionId
    ) -> flows.SiblingReconcile:
        return await self._sibling_group(flow_id, downstream_execution_id, "reconcile")

    async def _sibling_group(self, flow_id: str, child: ExecutionId, what: str) -> Any:
        for name, value in (("flow_id", flow_id), ("downstream_execution_id", child)):
            if not value:
                raise ValidationError("invalid_args", f"{name}: must not be empty")
        args = (flow_id, self._calls.checked(child, "downstream_execution_id"), what)
        return await self._calls.ask(
            *("ff_sibling_group", self._tag(flow_id), args),
            lambda reply: text(reply[2]),
            op=f"{what}_sibling_cancel_group",
        )
