"""What scanners call: due timers, lapsed leases, retention, index repair."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from flowfabric.core import keys
from flowfabric.core.ids import PartitionKey, validate_lane
from flowfabric.core.state import ExpireReason
from flowfabric.core.text import lossless, shown
from flowfabric.engine.arguments import each_stored, instance, one_of
from flowfabric.engine.calls import Calls, as_stored, text
from flowfabric.engine.registration import ANYWHERE

__all__ = ["Audit", "DuePage", "DueScan", "Mode", "Survey", "SurveyPart", "Upkeep"]

Mode = Literal["check", "repair"]

_LANES_SEARCHED = 100
_WORKERS_AT_ONCE = 200


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


class SurveyPart(msgspec.Struct, frozen=True):
    """What a survey is to look at in a partition."""

    tag: str
    lanes: Sequence[str]
    known: Sequence[str]
    """Indexes that existed before: they are found more cheaply."""
    whole: bool
    """Look at the indexes of the partition itself, too."""


class Survey(msgspec.Struct, frozen=True):
    """What the indexes of a partition, or of some of its lanes, look like."""

    tag: str
    looks: str
    """The same as before when nothing was added to an index, lost from it or scored anew."""
    executions: int
    names: tuple[str, ...]
    """The indexes that exist, after `ff:idx:T:`."""


class Upkeep(Calls):
    """Engine-internal operations. Each re-checks its own condition, so a late call is harmless."""

    async def scan_due(
        self, indexes: Mapping[str, Sequence[str]], limit: int, offset: int = 0
    ) -> DueScan:
        """Members of each partition's named indexes whose time has come.

        In a cluster a call covers one partition. Name at most a few hundred indexes.
        """
        places = [part for tag, names in indexes.items() for part in (tag, len(names), *names)]
        args = (limit, offset, *places)
        return await self.ask("ff_scan_due", next(iter(indexes)), args, _due, op="scan_due")

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

    async def trim_events(self, key: str, older_than_ms: int) -> int:
        """Drop the entries of a feed from before a time."""
        edge = f"{older_than_ms}-0"
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

    async def survey_indexes(self, parts: Sequence[SurveyPart]) -> list[Survey]:
        """What these parts of partitions look like. In a cluster a call covers one partition."""
        surveys: list[Survey] = []
        while len(surveys) < len(parts):
            args: list[str | int] = []
            for part in parts[len(surveys) :]:
                args += (part.tag, int(part.whole), len(part.lanes), *part.lanes)
                args += (len(part.known), *part.known)
            surveys += await self.ask(
                "ff_survey", parts[0].tag, as_stored(args), _surveys, op="survey"
            )
        return surveys

    async def ring_waiting(self, lanes: Mapping[str, Sequence[str]]) -> int:
        """Ring the doorbells of each partition's lanes that hold claimable work.

        In a cluster a call covers one partition. Name at most a few hundred lanes.
        """
        places = [part for tag, names in lanes.items() for part in (tag, len(names), *names)]
        return await self.ask(
            "ff_ring_waiting", next(iter(lanes)), places, _count, op="ring_waiting"
        )

    async def idle_lanes(self, tag: str, lanes: Sequence[str]) -> list[str]:
        """Those of the lanes of which nothing is stored in a partition."""
        return await self.ask(
            *("ff_idle_lanes", tag, lanes),
            lambda reply: [text(lane) for lane in reply[2]],
            op="idle_lanes",
        )

    async def forget_places(self, tag: str, stamps: Mapping[str, str]) -> int:
        """Take lanes out of the registry whose stamp is still the same; how many left.

        The tag is a partition's, or `ANYWHERE` for lanes that no partition has.
        """
        number = tag if tag == ANYWHERE else PartitionKey.trusted(tag).index_number
        args = [part for lane, stamp in stamps.items() for part in (number, lane, stamp)]
        return await self.ask(
            *("ff_forget_places", keys.LANES_TAG, args),
            lambda reply: int(reply[2]),
            op="forget_places",
        )

    async def sweep_workers(self, namespace: str, cursor: str = "0") -> tuple[str, int]:
        """Take expired workers out of the index; the next cursor, `0` at the end, and how many."""
        return await self.ask(
            *("ff_worker_sweep", f"{{{namespace}}}", (cursor, _WORKERS_AT_ONCE)),
            lambda reply: (text(reply[2]), int(reply[3])),
            op="sweep_workers",
        )

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
    surveys = [
        Survey(text(tag), text(looks), int(executions), tuple(lossless(name) for name in names))
        for tag, looks, executions, names in reply[2]
    ]
    if not surveys:
        raise ValueError(reply)
    return surveys
