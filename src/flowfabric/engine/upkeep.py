"""What scanners call: due timers, lapsed leases, retention, index repair."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from flowfabric.core import keys
from flowfabric.core.errors import CorruptionError
from flowfabric.core.ids import validate_lane
from flowfabric.core.state import ExpireReason
from flowfabric.core.text import lossless, shown
from flowfabric.engine.arguments import each_stored, instance, one_of
from flowfabric.engine.calls import Calls, as_stored, text

__all__ = ["Audit", "DuePage", "DueScan", "Mode", "Survey", "Upkeep"]

Mode = Literal["check", "repair"]

_LANES_SEARCHED = 500


class DuePage(msgspec.Struct, frozen=True):
    """Due members of one index; a malformed one is as `core.text.lossless` gives it."""

    tag: str
    index: str
    ids: list[str]


class DueScan(msgspec.Struct, frozen=True):
    """What a look at time-ordered indexes found. An index in none of the parts is empty."""

    now_ms: int
    pages: list[DuePage]
    armed: dict[tuple[str, str], int]
    """The earliest time in each (tag, index) where nothing is due yet."""
    unreadable: dict[tuple[str, str], str]
    """Why a (tag, index) could not be read."""


class Audit(msgspec.Struct, frozen=True):
    """One verdict per execution, and the lanes that their records name."""

    verdicts: list[str]
    lanes: list[str]


class Survey(msgspec.Struct, frozen=True):
    """What the indexes of a partition look like."""

    tag: str
    looks: str
    """The same as before when nothing was added to an index, lost from it or scored anew."""
    executions: int
    names: tuple[str, ...]
    """The indexes that exist, after `ff:idx:T:`."""


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
        unreadable: dict[tuple[str, str], str] = {}
        for group in groups:
            if not group:
                continue
            args = (limit, offset, len(indexes), *indexes, *group)
            found = await self.ask("ff_scan_due", group[0], args, _due, op="scan_due")
            now = found.now_ms
            pages += found.pages
            armed |= found.armed
            unreadable |= found.unreadable
        return DueScan(now, pages, armed, unreadable)

    async def mark_lease_expired_if_due(self, tag: str, ids: Iterable[str]) -> list[str]:
        """Move lapsed leases to where the next claim finds them."""
        names = each_stored(ids, "ids")
        return await self.ask_each("ff_mark_expired", self.checked_tag(tag), *names)

    async def promote_delayed(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        """Make due delayed executions eligible."""
        names = each_stored(ids, "ids")
        place = self.checked_tag(tag), validate_lane(lane_id)
        return await self.ask_each("ff_promote_delayed", *place, *names)

    async def expire_execution(
        self, tag: str, reason: ExpireReason, ids: Iterable[str]
    ) -> list[str]:
        """End executions whose attempt ran too long or whose lifetime is over."""
        names = each_stored(ids, "ids")
        why = instance(reason, ExpireReason, "reason").value
        return await self.ask_each("ff_expire", self.checked_tag(tag), why, *names)

    async def trim_retention(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        """Delete terminal executions whose retention is over."""
        names = each_stored(ids, "ids")
        place = self.checked_tag(tag), validate_lane(lane_id)
        return await self.ask_each("ff_trim", *place, *names)

    async def purge(self, tag: str) -> int:
        """Go on deleting what trimmed executions left; how many executions are still to do."""
        return await self.ask("ff_purge", tag, (), lambda reply: int(reply[3]), op="purge")

    async def trim_events(self, tag: str, older_than_ms: int) -> int:
        """Drop feed entries from before a time."""
        key, edge = keys.events(tag), f"{older_than_ms}-0"
        newest: Any = await self.transport.call(
            "XREVRANGE", key, f"({edge}", "-", "COUNT", 1, key=key
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
        self, tag: str, ids: Iterable[str], mode: Mode = "repair"
    ) -> list[str]:
        """Compare executions with the indexes their records demand; repair where asked.

        Entries under another lane than that of the record are found in so many lanes.
        """
        names = each_stored(ids, "ids")
        one_of(mode, "mode", get_args(Mode))
        self.checked_tag(tag)
        lanes = (await self.lanes_in_use())[:_LANES_SEARCHED]
        return (await self.audit_indexes(tag, names, lanes, mode)).verdicts

    async def audit_indexes(
        self, tag: str, ids: Iterable[str], lanes: Sequence[str], mode: Mode
    ) -> Audit:
        """The same for who knows the lanes whose indexes exist in the partition."""
        args = as_stored((mode, len(lanes), *lanes, *ids))
        return await self.ask("ff_reconcile", tag, args, _audit, op="reconcile")

    async def survey_indexes(
        self, lanes: Sequence[str], known: Mapping[str, Sequence[str]]
    ) -> list[Survey]:
        """What the indexes of these partitions look like; `known` ones are found more cheaply."""
        cluster = self.transport.is_cluster
        groups = [[tag] for tag in known] if cluster else [list(known)]
        surveys: list[Survey] = []
        for group in filter(None, groups):
            places = [part for tag in group for part in (tag, len(known[tag]), *known[tag])]
            args = as_stored((len(lanes), *lanes, *places))
            surveys += await self.ask("ff_survey", group[0], args, _surveys, op="survey")
        return surveys

    async def ring_waiting(self, tags: Sequence[str], lanes: Sequence[str]) -> int:
        """Ring the doorbells of lanes that hold claimable work, in case a ring was lost."""
        groups = [[tag] for tag in tags] if self.transport.is_cluster else [list(tags)]
        rings = 0
        damage: CorruptionError | None = None
        for group in groups:
            if not group or not lanes:
                continue
            args = (len(lanes), *lanes, *group)
            try:
                rings += await self.ask(
                    *("ff_ring_waiting", group[0], args), _count, op="ring_waiting"
                )
            except CorruptionError as error:
                # All others were rung, and those of the next partitions are to be.
                damage = error
        if damage is not None:
            raise damage
        return rings

    async def used_partitions(self) -> list[str]:
        """The tags of partitions that hold or held work."""
        return [f"{{fp:{index}}}" for index in await self.partitions_in_use()]

    async def occupied_partitions(self, tags: Sequence[str]) -> list[str]:
        """Those of the partitions that hold executions, registered or not.

        On a single server one command tells that none does.
        """
        names = [keys.index(tag, "all_executions") for tag in tags]
        if not self.transport.is_cluster and (
            not names or not await self.transport.call("EXISTS", *names, key="")
        ):
            return []
        found: list[Any] = await asyncio.gather(
            *(self.transport.call("EXISTS", name, key=name) for name in names)
        )
        return [tag for tag, exists in zip(tags, found, strict=True) if exists]


def _count(reply: list[Any]) -> int:
    return int(reply[2])


def _due(reply: list[Any]) -> DueScan:
    pages = [
        DuePage(text(tag), text(index), [lossless(member) for member in ids])
        for tag, index, ids in reply[3]
    ]
    armed = {(text(tag), text(index)): int(score) for tag, index, score in reply[4]}
    unreadable = {(text(tag), text(index)): shown(lossless(why)) for tag, index, why in reply[5]}
    return DueScan(int(reply[2]), pages, armed, unreadable)


def _audit(reply: list[Any]) -> Audit:
    verdicts = [shown(lossless(verdict)) for verdict in reply[2]]
    return Audit(verdicts, [lossless(lane) for lane in reply[3]])


def _surveys(reply: list[Any]) -> list[Survey]:
    return [
        Survey(text(tag), text(looks), int(executions), tuple(lossless(name) for name in names))
        for tag, looks, executions, names in reply[2]
    ]
