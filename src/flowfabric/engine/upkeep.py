"""What scanners call: due timers, lapsed leases, retention, index repair."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from flowfabric.core import keys
from flowfabric.core.state import ExpireReason
from flowfabric.engine.calls import Calls, text

__all__ = ["DuePage", "DueScan", "Upkeep"]


class DuePage(msgspec.Struct, frozen=True):
    """Due members of one index."""

    tag: str
    index: str
    ids: list[str]


class DueScan(msgspec.Struct, frozen=True):
    """What a look at time-ordered indexes found. An index in neither part is empty."""

    now_ms: int
    pages: list[DuePage]
    armed: dict[tuple[str, str], int]
    """The earliest time in each (tag, index) where nothing is due yet."""


class Upkeep(Calls):
    """Engine-internal operations. Each re-checks its own condition, so a late call is harmless."""

    async def scan_due(
        self, indexes: Sequence[str], tags: Sequence[str], limit: int, offset: int = 0
    ) -> DueScan:
        """Members of the named indexes whose time has come, for every partition named.

        On a single server one call covers all partitions; in a cluster each takes its own.
        """
        groups = [[tag] for tag in tags] if self.transport.is_cluster else [list(tags)]
        now = 0
        pages: list[DuePage] = []
        armed: dict[tuple[str, str], int] = {}
        for group in groups:
            if not group:
                continue
            args = (limit, offset, len(indexes), *indexes, *group)
            found = await self.ask("ff_scan_due", group[0], args, _due, op="scan_due")
            now = found.now_ms
            pages += found.pages
            armed |= found.armed
        return DueScan(now, pages, armed)

    async def mark_lease_expired_if_due(self, tag: str, ids: Iterable[str]) -> list[str]:
        """Move lapsed leases to where the next claim finds them."""
        return await self.ask_each("ff_mark_expired", tag, *ids)

    async def promote_delayed(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        """Make due delayed executions eligible."""
        return await self.ask_each("ff_promote_delayed", tag, lane_id, *ids)

    async def expire_execution(
        self, tag: str, reason: ExpireReason, ids: Iterable[str]
    ) -> list[str]:
        """End executions whose attempt ran too long or whose lifetime is over."""
        return await self.ask_each("ff_expire", tag, reason.value, *ids)

    async def trim_retention(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        """Delete terminal executions whose retention is over."""
        return await self.ask_each("ff_trim", tag, lane_id, *ids)

    async def purge(self, tag: str) -> int:
        """Go on deleting what trimmed executions left; how many executions are still to do."""
        return await self.ask("ff_purge", tag, (), lambda reply: int(reply[3]), op="purge")

    async def trim_events(self, tag: str, older_than_ms: int) -> int:
        """Drop feed entries from before a time."""
        key, edge = keys.events(tag), f"{older_than_ms}-0"
        newest: Any = await self.transport.call(
            "XREVRANGE", key, f"({edge}", "-", "COUNT", 1, key=key, replay_safe=True
        )
        if not newest:
            return 0
        # Trimming leaves no trace, deleting does: subscribers tell by it what they missed.
        deleted: Any = await self.transport.call(
            "XDEL", key, newest[0][0], key=key, replay_safe=True
        )
        trimmed: Any = await self.transport.call(
            "XTRIM", key, "MINID", edge, key=key, replay_safe=True
        )
        return int(deleted) + int(trimmed)

    async def reconcile_execution_index(
        self, tag: str, ids: Iterable[str], mode: Literal["check", "repair"] = "repair"
    ) -> list[str]:
        """Compare executions with the indexes their records demand; repair where asked."""
        return await self.ask_each("ff_reconcile", tag, mode, *ids)

    async def ring_waiting(self, tags: Sequence[str], lanes: Sequence[str]) -> int:
        """Ring the doorbells of lanes that hold claimable work, in case a ring was lost."""
        groups = [[tag] for tag in tags] if self.transport.is_cluster else [list(tags)]
        rings = 0
        for group in groups:
            if group and lanes:
                args = (len(lanes), *lanes, *group)
                rings += await self.ask(
                    "ff_ring_waiting",
                    group[0],
                    args,
                    lambda reply: int(reply[2]),
                    op="ring_waiting",
                )
        return rings

    async def used_partitions(self) -> list[str]:
        """The tags of partitions that hold or held work."""
        members: Any = await self.transport.call("SMEMBERS", keys.PARTITIONS, key=keys.PARTITIONS)
        return [f"{{fp:{index}}}" for index in sorted(int(member) for member in members)]

    async def occupied_partitions(self, tags: Sequence[str]) -> list[str]:
        """Those of the partitions that hold executions, registered or not.

        On a single server one command tells that none does.
        """
        names = [keys.index(tag, "all_executions") for tag in tags]
        if not self.transport.is_cluster and (
            not names or not await self.transport.call("EXISTS", *names, key="", replay_safe=True)
        ):
            return []
        found: list[Any] = await asyncio.gather(
            *(self.transport.call("EXISTS", name, key=name, replay_safe=True) for name in names)
        )
        return [tag for tag, exists in zip(tags, found, strict=True) if exists]


def _due(reply: list[Any]) -> DueScan:
    pages = [
        DuePage(text(tag), text(index), [text(member) for member in ids])
        for tag, index, ids in reply[3]
    ]
    armed = {(text(tag), text(index)): int(score) for tag, index, score in reply[4]}
    return DueScan(int(reply[2]), pages, armed)
