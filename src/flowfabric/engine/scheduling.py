"""Taking work from lanes, and the lanes themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.core import keys
from flowfabric.core.contracts.leases import Claim, ClaimedMany
from flowfabric.core.errors import (
    CorruptionError,
    EngineError,
    NotFoundError,
    ValidationError,
    invalid_input,
)
from flowfabric.core.ids import (
    ExecutionId,
    new_uuid,
    stored_lane,
    validate_lane,
    validate_uuid,
)
from flowfabric.engine.arguments import reason_text, whole
from flowfabric.engine.calls import decoding, refusal, text
from flowfabric.engine.executions import BATCH, Completion, Executions
from flowfabric.engine.leases import claim_from_row, positive_ms, worker_pair
from flowfabric.engine.registration import add_names

__all__ = ["LaneSettings", "Scheduling", "Want"]

_FAN_OUT = 16
_STORE_LANE = """#!lua flags=allow-oom
local before = redis.call('HGET', KEYS[1], 'state')
redis.call('HSET', KEYS[1], unpack(ARGV))
return before
"""
_LANE_STATES = ("active", "paused", "draining", "disabled")


def _request(request_id: str | None) -> str:
    return new_uuid() if request_id is None else validate_uuid(request_id, "request_id")


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for work, of which lane, and how much of it."""

    lane_id: str
    worker: str
    """`<worker_id> <worker_instance_id>`, see `Want.of`."""
    capabilities: str = ""
    """Sorted CSV of the tokens the worker offers."""
    lease_ttl_ms: int = 30_000

    @classmethod
    def of(
        cls,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        *,
        capabilities: str = "",
        lease_ttl_ms: int = 30_000,
    ) -> Want:
        """A validated request; build it once and use it for every claim."""
        return cls(
            lane_id=validate_lane(lane_id),
            worker=worker_pair(worker_id, worker_instance_id),
            capabilities=capabilities,
            lease_ttl_ms=positive_ms(lease_ttl_ms, "lease_ttl_ms"),
        )

    @property
    def worker_instance_id(self) -> str:
        """The process that will hold the leases."""
        return self.worker.partition(" ")[2]

    def args(self, max_n: int, request_id: str) -> tuple[Any, ...]:
        """The claim arguments; lease and attempt ids are derived from the request id."""
        return (
            self.lane_id,
            self.worker,
            self.capabilities,
            self.lease_ttl_ms,
            max_n,
            request_id[:32],
            # Another UUID of the same request: the last group tells the two apart.
            f"{request_id[:24]}{request_id[28:36]}",
        )

    def claims(self, rows: Sequence[Any]) -> list[Claim]:
        """The claims of a reply."""
        lane, ttl, instance = self.lane_id, self.lease_ttl_ms, self.worker_instance_id
        return [claim_from_row(row, lane, ttl, instance) for row in rows]


class LaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a lane is set to; a lane without stored settings has these defaults."""

    lane_id: str
    state: str = "active"
    reason: str = ""
    priority_weight_ms: int = 10**12
    reclaim_grace_ms: int = 0
    emit_renewals: bool = False


class Scheduling(Executions):
    """Claims without a grant, fused completions, and lane administration."""

    async def claim_many(
        self, want: Want, tag: str, max_n: int, *, request_id: str | None = None
    ) -> ClaimedMany:
        """Take up to `max_n` executions of one lane and partition in one step.

        The engine picks fresh, resumed or reclaimed per candidate. Repeating a request id gives
        the first answer again.
        """
        if max_n < 1:
            return ClaimedMany([], 0)
        args = want.args(min(max_n, BATCH), _request(request_id))
        reply = await self.fcall("ff_claim_many", tag, args, op="claim_many")
        with decoding(reply, "ff_claim_many", "claim_many"):
            return ClaimedMany(want.claims(reply[2]), int(reply[3]))

    async def complete_and_claim(
        self,
        tag: str,
        items: Sequence[Completion],
        want: Want,
        max_n: int,
        *,
        request_id: str | None = None,
    ) -> tuple[list[EngineError | None], ClaimedMany]:
        """Complete executions of one partition and take the next ones there, in one trip.

        The completions commit first and never depend on the claim. None stands for success.
        """
        outcomes: list[EngineError | None] = [None] * len(items)
        sent: list[int] = []
        args: list[Any] = [0]
        for position, item in enumerate(items):
            try:
                args += self._completion_args(
                    item.handle.execution_id, item.handle, item.result_payload, item.result_encoding
                )
            except ValidationError as error:
                outcomes[position] = error
            else:
                sent.append(position)
        args[0] = len(sent)
        if max_n > 0:
            args += want.args(min(max_n, BATCH), _request(request_id))
        reply = await self.fcall("ff_complete", tag, args, op="complete_many")
        with decoding(reply, "ff_complete", "complete_many"):
            for position, answer in zip(sent, reply[2], strict=True):
                outcomes[position] = refusal(
                    answer, "complete", items[position].handle.execution_id
                )
            if max_n > 0:
                return outcomes, ClaimedMany(want.claims(reply[3]), int(reply[4]))
        return outcomes, ClaimedMany([], 0)

    async def scan_eligible_executions(
        self, lane_id: str, tag: str, limit: int
    ) -> list[ExecutionId]:
        """Up to `limit` waiting executions in claim order, whatever they require. Reads only."""
        if limit < 1:
            return []
        lane = validate_lane(lane_id)
        sigs_key = keys.lane(tag, lane, "sigs")
        sigs: Any = await self.transport.call("SMEMBERS", sigs_key, key=sigs_key)
        names = [keys.eligible(tag, lane, signature) for signature in ("", *map(text, sigs))]
        pages: list[Any] = await asyncio.gather(
            *(
                self.transport.call("ZRANGE", name, 0, limit - 1, "WITHSCORES", key=name)
                for name in names
            )
        )
        found = sorted((score, member) for page in pages for member, score in page)
        try:
            return [ExecutionId.parse(member.decode()) for _, member in found[:limit]]
        except EngineError as error:
            raise CorruptionError(
                "corruption", f"scan_eligible_executions: member: {error.detail}"
            ) from error

    async def any_work(self, lane_id: str, tags: Sequence[str]) -> bool:
        """Whether any of these partitions holds claimable work of the lane: one cheap command.

        A cluster cannot ask many slots at once, so there the answer is always to go and see.
        """
        if self.transport.is_cluster:
            return True
        names = [
            name
            for tag in tags
            for name in (
                keys.eligible(tag, lane_id),
                keys.lane(tag, lane_id, "sigs"),
                keys.lane(tag, lane_id, "reclaimable"),
            )
        ]
        count: Any = await self.transport.call("EXISTS", *names, key=names[0], replay_safe=True)
        return count > 0

    # --- lanes ------------------------------------------------------------------

    async def list_lanes(self, cursor: str = "", limit: int = 1000) -> tuple[list[str], str | None]:
        """Registered lanes by name after `cursor`, and the next cursor when more follow."""
        stored = await self._registered(keys.LANES)
        lanes = sorted(stored_lane(name, "list_lanes") for name in stored)
        rest = [lane for lane in lanes if lane > cursor]
        page = rest[: max(0, limit)]
        return page, page[-1] if page and len(rest) > len(page) else None

    async def get_lane(self, lane_id: str) -> LaneSettings:
        """The lane's settings; `lane_not_found` when nobody ever used the name."""
        validate_lane(lane_id)
        known = await self.transport.call("SISMEMBER", keys.LANES, lane_id, key=keys.LANES)
        if not known:
            raise NotFoundError("lane_not_found", lane_id, op="get_lane")
        return await self._lane_settings(lane_id)

    async def _lane_settings(self, lane_id: str) -> LaneSettings:
        key = keys.lane_config(validate_lane(lane_id))
        stored: Any = await self.transport.call("HGETALL", key, key=key)
        fields = {text(name): text(value) for name, value in stored.items()}
        try:
            return LaneSettings(
                lane_id=lane_id,
                state=fields.get("state", "active"),
                reason=fields.get("reason", ""),
                priority_weight_ms=int(fields.get("priority_weight_ms", 10**12)),
                reclaim_grace_ms=int(fields.get("reclaim_grace_ms", 0)),
                emit_renewals=fields.get("emit_renewals") == "1",
            )
        except ValueError as error:
            raise CorruptionError("corruption", f"lane {lane_id}: {key}: {error}") from error

    async def set_lane_state(self, lane_id: str, state: str, reason: str = "") -> str:
        """Pause, drain, disable or re-activate a lane; returns the state it had."""
        if state not in _LANE_STATES:
            raise invalid_input("state", f"must be one of {', '.join(_LANE_STATES)}")
        told = reason_text(reason, "reason")
        return await self._store_lane(lane_id, ("state", state, "reason", told))

    async def set_lane_config(
        self,
        lane_id: str,
        *,
        priority_weight_ms: int | None = None,
        reclaim_grace_ms: int | None = None,
        emit_renewals: bool | None = None,
    ) -> None:
        """Change a lane's scheduling settings."""
        fields: list[Any] = []
        for name, value, low in (
            ("priority_weight_ms", priority_weight_ms, 1),
            ("reclaim_grace_ms", reclaim_grace_ms, 0),
        ):
            if value is not None:
                if not low <= whole(value, name) <= 10**12:
                    raise invalid_input(name, f"must be between {low} and {10**12}")
                fields += (name, value)
        if emit_renewals is not None:
            if not isinstance(emit_renewals, bool):
                raise invalid_input("emit_renewals", "must be True or False")
            fields += ("emit_renewals", "1" if emit_renewals else "0")
        if fields:
            await self._store_lane(lane_id, fields)

    async def _store_lane(self, lane_id: str, fields: Sequence[Any]) -> str:
        """The global settings first, then every partition's copy; running it again converges.

        Returns the state the lane had.
        """
        key = keys.lane_config(validate_lane(lane_id))
        await add_names(self.transport, keys.LANES, [lane_id])
        before: Any = await self.transport.call(
            "EVAL", _STORE_LANE, 1, key, *fields, key=key, replay_safe=True
        )
        gate = asyncio.Semaphore(_FAN_OUT)

        async def copy(partition: int) -> None:
            async with gate:
                tag = f"{{fp:{partition}}}"
                await self.fcall("ff_set_lane", tag, (lane_id, *fields), op="set_lane")

        await asyncio.gather(*(copy(partition) for partition in range(self.counts.flow)))
        return "active" if before is None else text(before)
