"""Leases whose time is over, noticed or not."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

from flowfabric.core import keys
from flowfabric.core.contracts.lease_events import ExpiredLease, ExpiredLeases
from flowfabric.core.errors import EngineError, ValidationError
from flowfabric.core.ids import ExecutionId, validate_namespace
from flowfabric.core.stored import Stored
from flowfabric.engine.arguments import whole
from flowfabric.engine.damage import Damage
from flowfabric.engine.record import Record
from flowfabric.engine.upkeep import Upkeep

__all__ = ["LeaseReads"]

_MAX_PAGE = 10_000
_CHUNK = 500

Due = tuple[int, ExecutionId]
"""When a lease expires, and whose it is: the order of the listing."""


class LeaseReads(Upkeep):
    """Operators' views of leases."""

    async def list_expired_leases(
        self,
        as_of: int | None = None,
        *,
        after: tuple[int, str] | None = None,
        limit: int = 1000,
        max_partitions_per_call: int = 32,
        namespace: str | None = None,
    ) -> ExpiredLeases:
        """Every lease that expires at or before `as_of` (now), by expiry and execution id.

        Leases still counted as live and those already offered for reclaim are listed alike.
        `after` is the cursor of the page before. All partitions are covered;
        `max_partitions_per_call` is how many of them are asked at a time.
        """
        moment = await self.server_time_ms() if as_of is None else whole(as_of, "as_of", 0)
        limit = min(whole(limit, "limit", 0), _MAX_PAGE)
        at_once = max(1, whole(max_partitions_per_call, "max_partitions_per_call", 0))
        behind = None if after is None else _cursor(after)
        if namespace is not None:
            validate_namespace(namespace)
        if limit == 0:
            return ExpiredLeases(())
        damage = Damage("list_expired_leases")
        due = await self._due(moment, behind, at_once, damage)
        found: list[ExpiredLease] = []
        for start in range(0, len(due), _CHUNK):
            part = due[start : start + _CHUNK]
            leases = await damage.keep_all(self._lease(*each, moment, namespace) for each in part)
            for entry in leases:
                if entry is not None and len(found) == limit:
                    last = found[-1]
                    more = (last.expires_at_ms, last.execution_id)
                    return ExpiredLeases(tuple(found), more, tuple(damage.found))
                if entry is not None:
                    found.append(entry)
        return ExpiredLeases(tuple(found), None, tuple(damage.found))

    async def _due(self, moment: int, after: Due | None, at_once: int, damage: Damage) -> list[Due]:
        """What may be on the page: the records themselves have the last word."""
        tags = await self.used_partitions()
        lanes = await self.lanes_in_use()
        parts: list[list[Due]] = []
        for start in range(0, len(tags), at_once):
            part = tags[start : start + at_once]
            parts += await asyncio.gather(
                *(self._due_in(tag, lanes, moment, after, damage) for tag in part)
            )
        return list(heapq.merge(*parts))

    async def _due_in(
        self, tag: str, lanes: list[str], moment: int, after: Due | None, damage: Damage
    ) -> list[Due]:
        low = "-inf" if after is None else after[0]
        required = await asyncio.gather(*(self.signatures(tag, lane) for lane in lanes))
        lost_keys = [
            keys.reclaimable(tag, lane, signature)
            for lane, signatures in zip(lanes, required, strict=True)
            for signature in ("", *signatures)
        ]
        live, *lost = await asyncio.gather(
            self.read(
                *(f"{tag}: lease_expiry", "ZRANGE", keys.index(tag, "lease_expiry")),
                *(low, moment, "BYSCORE", "WITHSCORES"),
            ),
            *(self.read(f"{name}: index", "ZRANGE", name, 0, -1) for name in lost_keys),
        )
        due: set[Due] = {
            (int(max(score, 0)), each) for member, score in live for each in damage.ids([member])
        }
        # The reclaimable index is ordered by priority: when each expired is on its record.
        ids = damage.ids(member for page in lost for member in page)
        expiries = await damage.keep_all(self._expiry(each) for each in ids)
        due |= {(at, each) for each, at in zip(ids, expiries, strict=True) if at is not None}
        return sorted(each for each in due if each[0] <= moment and (after is None or each > after))

    async def _expiry(self, execution_id: ExecutionId) -> int | None:
        name = keys.core(execution_id.tag, execution_id)
        at = await self.read(f"{execution_id}: record", "HGET", name, "lease_expires_at")
        return Stored(execution_id, {"lease_expires_at": at}).maybe_number("lease_expires_at")

    async def _lease(
        self, expiry: int, execution_id: ExecutionId, moment: int, namespace: str | None
    ) -> ExpiredLease | None:
        """The lease, unless it was renewed, released or claimed anew since the index was read."""
        name = keys.core(execution_id.tag, execution_id)
        raw = await self.read(f"{execution_id}: record", "HGETALL", name)
        record = Record.decode(execution_id, raw) if raw else None
        lease = None if record is None else record.current_lease()
        if record is None or lease is None or lease.expires_at != expiry:
            return None
        if lease.expires_at > moment or namespace not in (None, record.namespace):
            return None
        return ExpiredLease(
            execution_id=execution_id,
            lease_id=lease.lease_id,
            lease_epoch=lease.lease_epoch,
            worker_instance_id=lease.worker_instance_id,
            expires_at_ms=lease.expires_at,
            attempt_index=lease.attempt_index,
        )


def _cursor(after: Any) -> Due:
    try:
        expiry, execution_id = after
        return whole(expiry, "after", 0), ExecutionId.parse(execution_id)
    except (TypeError, ValueError, EngineError) as error:
        problem = "after: must be the cursor of an earlier page"
        raise ValidationError("invalid_cursor", problem) from error
