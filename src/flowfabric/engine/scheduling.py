"""Taking work from lanes, and the lanes themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.core import keys
from flowfabric.core.contracts.leases import Claim, ClaimedMany
from flowfabric.core.errors import (
    EngineError,
    NotFoundError,
    ReplyError,
    ValidationError,
)
from flowfabric.core.ids import (
    ExecutionId,
    new_uuid,
    validate_lane,
    validate_uuid,
)
from flowfabric.core.stored import Stored
from flowfabric.engine.arguments import (
    MAX_EXACT,
    checked_text,
    flag,
    instance,
    listed,
    one_of,
    positive_ms,
    reason_text,
    whole,
)
from flowfabric.engine.batches import BATCH, in_parts
from flowfabric.engine.calls import decoding, refusal, text
from flowfabric.engine.damage import Damage
from flowfabric.engine.executions import Completion, Executions
from flowfabric.engine.leases import claim_from_row, worker_pair
from flowfabric.engine.page_cursor import given_cursor
from flowfabric.engine.registration import keep_lanes

__all__ = ["LaneSettings", "Scheduling", "Want"]

log = logging.getLogger(__name__)

_FAN_OUT = 16
_STORE_LANE = """#!lua flags=allow-oom
local before = redis.call('HGET', KEYS[1], 'state')
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return before
"""
_LANE_STATES = ("active", "paused", "draining", "disabled")


def _request(request_id: str | None) -> str:
    return new_uuid() if request_id is None else validate_uuid(request_id, "request_id")


def _claim_args(want: Want, max_n: int, request_id: str | None) -> tuple[Any, ...]:
    """What to claim, or nothing when nothing is wanted."""
    instance(want, Want, "want")
    most = min(whole(max_n, "max_n"), BATCH)
    request = _request(request_id)
    return want.args(most, request) if most > 0 else ()


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for work, of which lane, and how much of it."""

    lane_id: str
    worker: str
    """`<worker_id> <worker_instance_id>`, see `Want.of`."""
    capabilities: str = ""
    """Sorted CSV of the tokens the worker offers."""
    lease_ttl_ms: int = 30_000

    def __post_init__(self) -> None:
        # Here, once: a request is used for every claim of a worker.
        validate_lane(self.lane_id)
        worker_pair(*checked_text(self.worker, "worker").partition(" ")[::2])
        checked_text(self.capabilities, "capabilities")
        positive_ms(self.lease_ttl_ms, "lease_ttl_ms")

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
        """A request of a worker process; build it once and use it for every claim."""
        return cls(
            lane_id=lane_id,
            worker=worker_pair(worker_id, worker_instance_id),
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
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
        """The claims of a reply.

        One that cannot be read is left to its lease, and the others are not lost with it.
        """
        lane, ttl, instance = self.lane_id, self.lease_ttl_ms, self.worker_instance_id
        try:
            return [claim_from_row(row, lane, ttl, instance) for row in rows]
        except ReplyError as error:
            problem = error
        claims: list[Claim] = []
        for row in rows:
            try:
                claims.append(claim_from_row(row, lane, ttl, instance))
            except ReplyError as error:
                log.error(  # noqa: TRY400 - the error says it all
                    "a claim cannot be read, its lease will lapse: %s",
                    error,
                    extra={"action": "claim_unreadable", "execution_id": error.execution_id},
                )
        if not claims:
            raise problem
        return claims


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
        args = _claim_args(want, max_n, request_id)
        tag = self.checked_tag(tag)
        if not args:
            return ClaimedMany([], 0)
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
        items = listed(items, "items")
        wanted = _claim_args(want, max_n, request_id)
        tag = self.checked_tag(tag)
        outcomes: list[EngineError | None] = [None] * len(items)
        sent: list[int] = []
        flat: list[Any] = []
        for position, item in enumerate(items):
            try:
                flat += self._item_args(item)
            except ValidationError as error:
                outcomes[position] = error
            else:
                sent.append(position)
        *earlier, last = in_parts(sent, [len(result) for result in flat[4::5]])
        for part in earlier:
            await self._complete_part(
                tag, [len(part), *flat[: len(part) * 5]], items, part, outcomes
            )
            del flat[: len(part) * 5]
        args = [len(last), *flat, *wanted]
        reply = await self._complete_part(tag, args, items, last, outcomes)
        if not wanted:
            return outcomes, ClaimedMany([], 0)
        with decoding(reply, "ff_complete", "complete_many"):
            return outcomes, ClaimedMany(want.claims(reply[3]), int(reply[4]))

    async def _complete_part(
        self,
        tag: str,
        args: list[Any],
        items: Sequence[Completion],
        part: list[int],
        outcomes: list[EngineError | None],
    ) -> Any:
        reply = await self.fcall("ff_complete", tag, args, op="complete_many")
        with decoding(reply, "ff_complete", "complete_many"):
            for position, answer in zip(part, reply[2], strict=True):
                outcomes[position] = refusal(
                    answer, "complete", items[position].handle.execution_id
                )
        return reply

    async def scan_eligible_executions(
        self, lane_id: str, tag: str, limit: int
    ) -> list[ExecutionId]:
        """Up to `limit` waiting executions in claim order, whatever they require. Reads only."""
        lane, tag = validate_lane(lane_id), self.checked_tag(tag)
        if whole(limit, "limit") < 1:
            return []
        limit = min(limit, MAX_EXACT)
        names = [keys.eligible(tag, lane, each) for each in ("", *await self.signatures(tag, lane))]
        pages = await asyncio.gather(
            *(
                self.read(f"{name}: index", "ZRANGE", name, 0, limit - 1, "WITHSCORES")
                for name in names
            )
        )
        found = sorted((score, member) for page in pages for member, score in page)
        return Damage("scan_eligible_executions").ids(member for _, member in found)[:limit]

    async def any_work(self, lane_id: str, tags: Sequence[str]) -> bool:
        """Whether any of these partitions holds claimable work of the lane: one cheap command.

        A cluster cannot ask many slots at once, so there the answer is always to go and see.
        """
        validate_lane(lane_id)
        tags = [self.checked_tag(tag, "tags") for tag in listed(tags, "tags")]
        if self.transport.is_cluster or not tags:
            return bool(tags)
        names = [
            name
            for tag in tags
            for name in (
                keys.eligible(tag, lane_id),
                keys.lane(tag, lane_id, "sigs"),
                keys.lane(tag, lane_id, "reclaimable"),
            )
        ]
        count: Any = await self.transport.call("EXISTS", *names, key=names[0])
        return count > 0

    # --- lanes ------------------------------------------------------------------

    async def list_lanes(self, cursor: str = "", limit: int = 1000) -> tuple[list[str], str | None]:
        """Registered lanes by name after `cursor`, and the next cursor when more follow."""
        given_cursor(cursor)
        whole(limit, "limit")
        rest = [lane for lane in await self.lanes_in_use() if lane > cursor]
        page = rest[: max(0, limit)]
        return page, page[-1] if page and len(rest) > len(page) else None

    async def get_lane(self, lane_id: str) -> LaneSettings:
        """The lane's settings; `lane_not_found` when nobody ever used the name."""
        validate_lane(lane_id)
        if not await self.read(f"{keys.LANES}: registry", "SISMEMBER", keys.LANES, lane_id):
            raise NotFoundError("lane_not_found", lane_id, op="get_lane")
        return await self._lane_settings(lane_id)

    async def _lane_settings(self, lane_id: str) -> LaneSettings:
        key = keys.lane_config(validate_lane(lane_id))
        context = f"lane {lane_id}"
        stored = Stored.from_hash(context, await self.read(f"{context}: config", "HGETALL", key))
        return LaneSettings(
            lane_id=lane_id,
            state=stored.text("state", "active"),
            reason=stored.text("reason", ""),
            priority_weight_ms=stored.number("priority_weight_ms", 10**12),
            reclaim_grace_ms=stored.number("reclaim_grace_ms", 0),
            emit_renewals=stored.text("emit_renewals", "") == "1",
        )

    async def set_lane_state(self, lane_id: str, state: str, reason: str = "") -> str:
        """Pause, drain, disable or re-activate a lane; returns the state it had."""
        one_of(state, "state", _LANE_STATES)
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
                fields += (name, whole(value, name, low, 10**12))
        if emit_renewals is not None:
            fields += ("emit_renewals", "1" if flag(emit_renewals, "emit_renewals") else "0")
        if fields:
            await self._store_lane(lane_id, fields)

    async def _store_lane(self, lane_id: str, fields: Sequence[Any]) -> str:
        """The global settings first, then every partition's copy; running it again converges.

        Returns the state the lane had.
        """
        key = keys.lane_config(validate_lane(lane_id))
        await keep_lanes(self, [lane_id])
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
