"""Leases whose time is over, noticed or not."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

from flowfabric.core import keys
from flowfabric.core.contracts.lease_events import ExpiredLease, ExpiredLeases
from flowfabric.core.errors import EngineError, ValidationError
from flowfabric.core.ids import ExecutionId, stored_id, validate_namespace
from flowfabric.core.text import lossless
from flowfabric.engine.arguments import whole
from flowfabric.engine.record import Record
from flowfabric.engine.upkeep import Upkeep

__all__ = ["LeaseReads"]

_MAX_PAGE = 10_000
_CHUNK = 500

Due = tuple[int, str]
"""When a lease expires, and whose it is: the order of the listing."""


class LeaseReads(Upkeep):
    """Operators' views of leases."""

    async def list_expired_leases(
        self,
        as_of: int | None = None,
        *,
        after: Due | None = None,
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
        due = await self._due(moment, behind, at_once)
        found: list[ExpiredLease] = []
        for start in range(0, len(due), _CHUNK):
            for entry in await self._leases(due[start : start + _CHUNK], moment, namespace):
                if len(found) == limit:
                    last = found[-1]
                    return ExpiredLeases(tuple(found), (last.expires_at_ms, last.execution_id))
                found.append(entry)
        return ExpiredLeases(tuple(found))

    async def _due(self, moment: int, after: Due | None, at_once: int) -> list[Due]:
        """What may be on the page: the records themselves have the last word."""
        tags = await self.used_partitions()
        lanes = await self.lanes_in_use()
        parts: list[list[Due]] = []
        for start in range(0, len(tags), at_once):
            part = tags[start : start + at_once]
            parts += await asyncio.gather(
                *(self._due_in(tag, lanes, moment, after) for tag in part)
            )
        return list(heapq.merge(*parts))

    async def _due_in(
        self, tag: str, lanes: list[str], moment: int, after: Due | None
    ) -> list[Due]:
        live_key = keys.index(tag, "lease_expiry")
        low = "-inf" if after is None else after[0]
        required = await asyncio.gather(*(self.signatures(tag, lane) for lane in lanes))
        lost_keys = [
            keys.reclaimable(tag, lane, signature)
            for lane, signatures in zip(lanes, required, strict=True)
            for signature in ("", *signatures)
        ]
        live, *lost = await asyncio.gather(
            self.transport.call(
                *("ZRANGE", live_key, low, moment, "BYSCORE", "WITHSCORES"),
                key=live_key,
                replay_safe=True,
            ),
            *(
                self.transport.call("ZRANGE", name, 0, -1, key=name, replay_safe=True)
                for name in lost_keys
            ),
        )
        pages: Any = (live, lost)
        # The reclaimable index is ordered by priority: when each expired is on its record.
        ids = [
            stored_id(lossless(member), "list_expired_leases")
            for page in pages[1]
            for member in page
        ]
        names = [keys.core(tag, each) for each in ids]
        expiries: list[Any] = await asyncio.gather(
            *(
                self.transport.call("HGET", name, "lease_expires_at", key=name, replay_safe=True)
                for name in names
            )
        )
        due: set[Due] = {(int(max(score, 0)), lossless(member)) for member, score in pages[0]}
        due |= {
            (int(at), each) for each, at in zip(ids, expiries, strict=True) if at and at.isdigit()
        }
        return sorted(each for each in due if each[0] <= moment and (after is None or each > after))

    async def _leases(
        self, due: list[Due], moment: int, namespace: str | None
    ) -> list[ExpiredLease]:
        ids = [stored_id(member, "list_expired_leases") for _, member in due]
        names = [keys.core(each.tag, each) for each in ids]
        raws: list[Any] = await asyncio.gather(
            *(self.transport.call("HGETALL", name, key=name, replay_safe=True) for name in names)
        )
        found: list[ExpiredLease] = []
        for (expiry, _), execution_id, raw in zip(due, ids, raws, strict=True):
            record = Record.decode(execution_id, raw) if raw else None
            lease = None if record is None else record.current_lease()
            # Renewed, released or claimed anew since the index was read.
            if record is None or lease is None or lease.expires_at != expiry:
                continue
            if lease.expires_at <= moment and namespace in (None, record.namespace):
                found.append(
                    ExpiredLease(
                        execution_id=execution_id,
                        lease_id=lease.lease_id,
                        lease_epoch=lease.lease_epoch,
                        worker_instance_id=lease.worker_instance_id,
                        expires_at_ms=lease.expires_at,
                        attempt_index=lease.attempt_index,
                    )
                )
        return found


def _cursor(after: Any) -> Due:
    try:
        expiry, execution_id = after
        return whole(expiry, "after", 0), ExecutionId.parse(execution_id)
    except (TypeError, ValueError, EngineError) as error:
        problem = "after: must be the cursor of an earlier page"
        raise ValidationError("invalid_cursor", problem) from error
