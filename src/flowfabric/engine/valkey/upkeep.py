"""What scanners call: due timers, lapsed leases, retention, index repair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from flowfabric.core.ids import PartitionKey, validate_lane
from flowfabric.core.state import ExpireReason
from flowfabric.core.text import lossless, shown
from flowfabric.engine.api.arguments import each_stored, instance, one_of
from flowfabric.engine.api.upkeep import Audit, DuePage, DueScan, Mode, Survey, SurveyPart, Upkeep
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, as_stored, text
from flowfabric.engine.valkey.places import ANYWHERE, ValkeyPlaces

_WORKERS_AT_ONCE = 200
_LANES_SEARCHED = 100


class ValkeyUpkeep(Upkeep):
    """`Upkeep` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places

    async def scan_due(
        self, indexes: Mapping[str, Sequence[str]], limit: int, offset: int = 0
    ) -> DueScan:
        places = [part for tag, names in indexes.items() for part in (tag, len(names), *names)]
        args = (limit, offset, *places)
        return await self._calls.ask("ff_scan_due", next(iter(indexes)), args, _due, op="scan_due")

    async def mark_lease_expired_if_due(self, tag: str, ids: Iterable[str]) -> list[str]:
        names = each_stored(ids, "ids")
        return await self._calls.ask_each("ff_mark_expired", self._calls.checked_tag(tag), *names)

    async def promote_delayed(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        names = each_stored(ids, "ids")
        place = self._calls.checked_tag(tag), validate_lane(lane_id)
        return await self._calls.ask_each("ff_promote_delayed", *place, *names)

    async def expire_execution(
        self, tag: str, reason: ExpireReason, ids: Iterable[str]
    ) -> list[str]:
        names = each_stored(ids, "ids")
        why = instance(reason, ExpireReason, "reason").value
        return await self._calls.ask_each("ff_expire", self._calls.checked_tag(tag), why, *names)

    async def trim_retention(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        names = each_stored(ids, "ids")
        place = self._calls.checked_tag(tag), validate_lane(lane_id)
        return await self._calls.ask_each("ff_trim", *place, *names)

    async def purge(self, tag: str) -> int:
        return await self._calls.ask("ff_purge", tag, (), lambda reply: int(reply[3]), op="purge")

    async def trim_events(self, key: str, older_than_ms: int) -> int:
        edge = f"{older_than_ms}-0"
        newest: Any = await self._calls.transport.call(
            "XREVRANGE", key, f"({edge}", "-", "COUNT", 1, key=key
        )
        if not newest:
            return 0
        # Trimming leaves no trace, deleting does: subscribers tell by it what they missed.
        deleted: Any = await self._calls.transport.call(
            "XDEL", key, newest[0][0], key=key, replay_safe=True
        )
        trimmed: Any = await self._calls.transport.call(
            "XTRIM", key, "MINID", edge, key=key, replay_safe=True
        )
        return int(deleted) + int(trimmed)

    async def reconcile_execution_index(
        self, tag: str, ids: Iterable[str], mode: Mode = "repair"
    ) -> list[str]:
        names = each_stored(ids, "ids")
        one_of(mode, "mode", get_args(Mode))
        self._calls.checked_tag(tag)
        lanes = (await self._places.lanes_in_use())[:_LANES_SEARCHED]
        return (await self.audit_indexes(tag, names, lanes, mode)).verdicts

    async def audit_indexes(
        self, tag: str, ids: Iterable[str], lanes: Sequence[str], mode: Mode
    ) -> Audit:
        args = as_stored((mode, len(lanes), *lanes, *ids))
        return await self._calls.ask("ff_reconcile", tag, args, _audit, op="reconcile")

    async def survey_indexes(self, parts: Sequence[SurveyPart]) -> list[Survey]:
        surveys: list[Survey] = []
        while len(surveys) < len(parts):
            args: list[str | int] = []
            for part in parts[len(surveys) :]:
                args += (part.tag, int(part.whole), len(part.lanes), *part.lanes)
                args += (len(part.known), *part.known)
            surveys += await self._calls.ask(
                "ff_survey", parts[0].tag, as_stored(args), _surveys, op="survey"
            )
        return surveys

    async def idle_lanes(self, tag: str, lanes: Sequence[str]) -> list[str]:
        return await self._calls.ask(
            *("ff_idle_lanes", tag, lanes),
            lambda reply: [text(lane) for lane in reply[2]],
            op="idle_lanes",
        )

    async def forget_places(self, tag: str, stamps: Mapping[str, str]) -> int:
        number = tag if tag == ANYWHERE else PartitionKey.trusted(tag).index_number
        args = [part for lane, stamp in stamps.items() for part in (number, lane, stamp)]
        return await self._calls.ask(
            *("ff_forget_places", keys.LANES_TAG, args),
            lambda reply: int(reply[2]),
            op="forget_places",
        )

    async def sweep_workers(self, namespace: str, cursor: str = "0") -> tuple[str, int]:
        return await self._calls.ask(
            *("ff_worker_sweep", f"{{{namespace}}}", (cursor, _WORKERS_AT_ONCE)),
            lambda reply: (text(reply[2]), int(reply[3])),
            op="sweep_workers",
        )


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
