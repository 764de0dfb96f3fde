"""What scanners call: due timers, lapsed leases, retention, index repair; and who runs them."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import msgspec

from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.core.ids import PartitionKey, is_uuid, validate_lane, validate_namespace
from flowfabric.core.state import ExpireReason
from flowfabric.core.text import lossless, raw, shown
from flowfabric.engine.api import check
from flowfabric.engine.api import upkeep as api
from flowfabric.engine.valkey import calls, keys
from flowfabric.engine.valkey.calls import FunctionCalls, as_stored, places_of, text
from flowfabric.engine.valkey.drains import CascadeDrains
from flowfabric.engine.valkey.places import ANYWHERE, KEPT, ValkeyPlaces, add_names
from flowfabric.engine.valkey.workers import ValkeyWorkers

_LANES_SEARCHED = 100
_LAST_TIME = 2**53 - 1
# What one call may cover, so that it never holds the server for long.
_INDEXES_SCANNED = 200
_LANES_SURVEYED = 64
_LANES_PER_PART = 4
_LANES_CHECKED = 200
_RESCORED = 500
# A process that creates an execution registered its lane and partition at most 10 s earlier.
_UNUSED_MS = 60_000
# Leaders reacquire their lease every minute, which also lists them again.
_LISTED_MS = 300_000
_NO_COUNTS = b"\x80"
_PARKED = "cascade_poison"
_FLOW_QUEUES = {
    **dict.fromkeys(("cascade_backlog", "cancel_backlog", "release_backlog"), "ZCARD"),
    **dict.fromkeys(("reopen_backlog", "replay_backlog", "cascade_failed"), "HLEN"),
    "subflow_outbox": "HLEN",
    "pending_cancel_groups": "SCARD",
}
"""The queues of remaining flow updates, with the command that counts each."""


P = TypeVar("P", bound=tuple[Any, ...])


class ValkeyUpkeep(api.Upkeep):
    def __init__(
        self,
        calls: FunctionCalls,
        places: ValkeyPlaces,
        drains: CascadeDrains,
        workers: ValkeyWorkers,
    ) -> None:
        self._calls = calls
        self._places = places
        self._drains = drains
        self._workers = workers

    async def scan_due(
        self, indexes: Sequence[api.Index], limit: int, offset: int = 0
    ) -> api.DueScan:
        merged = api.DueScan(0, {}, {}, {})
        groups = self._groups(indexes, _INDEXES_SCANNED)
        for group, scan in await calls.call_each(
            groups, lambda each: self._scan(each, limit, offset)
        ):
            if isinstance(scan, EngineError):
                merged.unreadable.update(dict.fromkeys(group, scan))
                continue
            merged.due.update(scan.due)
            merged.armed.update(scan.armed)
            merged.unreadable.update(scan.unreadable)
            merged = msgspec.structs.replace(merged, now_ms=scan.now_ms)
        if groups and not merged.now_ms:
            raise next(iter(merged.unreadable.values()))
        return merged

    async def _scan(self, group: list[api.Index], limit: int, offset: int) -> api.DueScan:
        names = {(index.tag, _name(index)): index for index in group}

        def decode(reply: list[Any]) -> api.DueScan:
            due, armed, unreadable = (
                {names[text(tag), text(name)]: found for tag, name, found in part}
                for part in reply[3:6]
            )
            return api.DueScan(
                int(reply[2]),
                {index: [lossless(member) for member in ids] for index, ids in due.items()},
                {index: int(score) for index, score in armed.items()},
                {index: _unreadable(index, why) for index, why in unreadable.items()},
            )

        args = (limit, offset, *places_of(names))
        return await self._calls.promptly(
            self._calls.ask("ff_scan_due", group[0].tag, args, decode, op="scan_due")
        )

    async def any_exists(self, indexes: Sequence[api.Index]) -> bool:
        groups = self._groups(indexes, api.SOUGHT_AT_ONCE)
        return any(calls.raised(await calls.call_each(groups, self._exists)))

    async def _exists(self, group: list[api.Index]) -> bool:
        names = [_key(index) for index in group]
        found: Any = await self._calls.promptly(
            self._calls.transport.call("EXISTS", *names, key=names[0])
        )
        return found > 0

    async def earliest(self, index: api.Index) -> int | None:
        key = _key(index)
        try:
            found: Any = await self._calls.promptly(
                self._calls.read(key, "ZRANGE", key, 0, 0, "WITHSCORES")
            )
        except CorruptionError:
            return 0
        # A damaged score may be infinite.
        return int(min(max(found[0][1], 0), _LAST_TIME)) if found else None

    def _groups(self, places: Iterable[P], size: int) -> list[list[P]]:
        return calls.split(places, size, apart=self._calls.transport.is_cluster)

    async def waitpoint_owner(self, tag: str, waitpoint_id: str) -> str:
        if not is_uuid(waitpoint_id):
            return ""
        key = keys.waitpoint(tag, waitpoint_id)
        try:
            return lossless(await self._calls.read(key, "HGET", key, "execution_id") or b"")
        except EngineError:
            return ""

    async def mark_lease_expired_if_due(self, tag: str, ids: Iterable[str]) -> list[str]:
        return await self._each("ff_mark_expired", tag, ids)

    async def promote_delayed(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        return await self._each("ff_promote_delayed", tag, ids, validate_lane(lane_id))

    async def expire_execution(
        self, tag: str, reason: ExpireReason, ids: Iterable[str]
    ) -> list[str]:
        why = check.instance(reason, ExpireReason, "reason").value
        return await self._each("ff_expire", tag, ids, why)

    async def trim_retention(self, tag: str, lane_id: str, ids: Iterable[str]) -> list[str]:
        return await self._each("ff_trim", tag, ids, validate_lane(lane_id))

    async def _each(self, function: str, tag: str, ids: Iterable[str], *args: str) -> list[str]:
        names = check.stored_names(ids, "ids")
        return await self._calls.ask_each(
            *(function, self._calls.checked_tag(tag), *args, *names), on_rest=self._drains.note
        )

    async def purge(self, tag: str) -> int:
        if not await self._exists([api.Index(tag, "purge_backlog")]):
            return 0
        return await self._calls.ask("ff_purge", tag, (), lambda reply: int(reply[3]), op="purge")

    async def trim_events(self, tag: str, older_than_ms: int) -> int:
        return await self._trim_feed(keys.events(tag), older_than_ms)

    async def trim_policy_events(self, older_than_ms: int) -> int:
        counts = self._calls.counts
        feeds = [
            keys.events(f"{{{family}:{number}}}")
            for family, count in (("b", counts.budget), ("q", counts.quota))
            for number in range(count)
        ]
        existing = await self._calls.existing(feeds)
        return sum([await self._trim_feed(feed, older_than_ms) for feed in existing])

    async def trim_worker_events(self, namespace: str, older_than_ms: int) -> int:
        return await self._trim_feed(keys.worker_events(f"{{{namespace}}}"), older_than_ms)

    async def _trim_feed(self, key: str, older_than_ms: int) -> int:
        edge, call = f"{older_than_ms}-0", self._calls.transport.call
        newest = await self._calls.read(key, "XREVRANGE", key, f"({edge}", "-", "COUNT", 1)
        if not newest:
            return 0
        # Unlike trimming, deleting leaves a trace that shows subscribers what they missed.
        deleted: Any = await call("XDEL", key, newest[0][0], key=key, replay_safe=True)
        trimmed: Any = await call("XTRIM", key, "MINID", edge, key=key, replay_safe=True)
        return int(deleted) + int(trimmed)

    async def rescore(self, tag: str) -> tuple[int, bool]:
        return await self._calls.ask(
            *("ff_rescore", self._calls.checked_tag(tag), (_RESCORED,)),
            lambda reply: (int(reply[2]), reply[3] == 1),
            op="rescore",
        )

    async def forget_idle_lanes(self) -> int:
        places = await self._places.places_in_use()
        lanes = places.pop(ANYWHERE, {})
        edge = await self._calls.server_time_ms() - _UNUSED_MS
        unused = [
            (tag, lane)
            for tag, stamps in places.items()
            for lane, stamp in stamps.items()
            if _is_before(stamp, edge)
        ]
        for group in calls.split(unused, _LANES_CHECKED, apart=True):
            tag, names = group[0][0], [lane for _, lane in group]
            idle = await self._calls.ask("ff_idle_lanes", tag, names, _texts, op="idle_lanes")
            await self._forget(tag, {lane: places[tag].pop(lane) for lane in idle})
        used = {lane for stamps in places.values() for lane in stamps}
        empty = {
            lane: stamp
            for lane, stamp in lanes.items()
            if stamp != KEPT and lane not in used and _is_before(stamp, edge)
        }
        return await self._forget(ANYWHERE, empty)

    async def _forget(self, tag: str, stamps: Mapping[str, str]) -> int:
        """Remove lanes whose stamp is unchanged; processes stamp a lane before they use it."""
        number = tag if tag == ANYWHERE else PartitionKey.trusted(tag).index_number
        places = [(number, lane, stamp) for lane, stamp in stamps.items()]
        forgotten = 0
        for start in range(0, len(places), _LANES_CHECKED):
            args = [part for place in places[start : start + _LANES_CHECKED] for part in place]
            forgotten += await self._calls.ask(
                "ff_forget_places", keys.LANES_TAG, args, _count, op="forget_places"
            )
        return forgotten

    async def list_drains(self) -> list[api.Drain]:
        found: list[api.Drain] = []
        for namespace in await self._calls.registered(keys.DRAINS, validate_namespace):
            drains = await self._workers.drains_of(namespace)
            found += drains.values()
            if not drains:
                await self._forget_drains(namespace)
        return found

    async def _forget_drains(self, namespace: str) -> None:
        # A drain adds its namespace last, so one that started earlier is found here.
        await self._calls.transport.call("SREM", keys.DRAINS, namespace, key=keys.DRAINS)
        if await self._workers.drains_of(namespace):
            await add_names(self._calls, keys.DRAINS, [namespace])

    async def continue_drain(self, drain: api.Drain) -> int:
        instance = drain.worker_instance_id
        held = await self._workers.refuse_claims(instance, drain.namespaces)
        if not held or await self._calls.server_time_ms() < drain.ends_at_ms:
            return 0
        return await self._workers.revoke_all(instance, drain.namespaces, "drained")

    async def sweep_workers(self, namespace: str) -> int:
        return await self._workers.sweep(namespace)

    async def reconcile_execution_index(
        self, tag: str, ids: Iterable[str], mode: api.Mode = "repair"
    ) -> list[str]:
        names = check.stored_names(ids, "ids")
        check.one_of(mode, "mode", get_args(api.Mode))
        self._calls.checked_tag(tag)
        lanes = (await self._places.lanes_in_use())[:_LANES_SEARCHED]
        return (await self.audit_indexes(tag, names, lanes, mode)).verdicts

    async def audit_indexes(
        self, tag: str, ids: Iterable[str], lanes: Sequence[str], mode: api.Mode
    ) -> api.Audit:
        args = as_stored((mode, len(lanes), *lanes, *ids))
        return await self._calls.ask("ff_reconcile", tag, args, _audit, op="reconcile")

    async def drain_flow_cancels(self, tag: str, ids: Iterable[str]) -> list[str]:
        names = check.stored_names(ids, "ids")
        self._calls.checked_tag(tag)
        return [await self._drain_flow_cancel(tag, name) for name in names]

    async def _drain_flow_cancel(self, tag: str, flow_id: str) -> str:
        args = as_stored((flow_id,))
        try:
            while await self._calls.ask(
                "ff_drain_flow_cancel", tag, args, lambda reply: int(reply[4])
            ):
                pass
        except CorruptionError as error:
            return f"error:{error.detail}"
        return "drained"

    async def delete_due_flows(self, tag: str, ids: Iterable[str]) -> list[str]:
        names = check.stored_names(ids, "ids")
        self._calls.checked_tag(tag)
        return [await self._delete_due_flow(tag, name) for name in names]

    async def _delete_due_flow(self, tag: str, flow_id: str) -> str:
        args = as_stored((flow_id, "0", "", _NO_COUNTS))
        outcome = "deleting"
        try:
            while outcome == "deleting":
                outcome = await self._calls.ask(
                    "ff_audit_flow", tag, args, lambda reply: text(reply[2])
                )
        except CorruptionError as error:
            return f"error:{error.detail}"
        # A flow that is still in use has left the index; an unreadable one stays.
        return "error:its record cannot be read" if outcome == "changed" else outcome

    async def audit_dependencies(
        self, tag: str, members: Sequence[tuple[str, str]]
    ) -> list[api.DependencyAudit]:
        found: list[api.DependencyAudit] = []
        self._calls.checked_tag(tag)
        # One call may answer for only some of the members.
        while len(found) < len(members):
            args = as_stored(part for member in members[len(found) :] for part in member)
            found += await self._calls.ask(
                "ff_audit_deps", tag, args, _dependency_audits, op="audit_dependencies"
            )
        return found

    async def parked_units(self, tag: str) -> dict[str, str]:
        key = keys.index(self._calls.checked_tag(tag), _PARKED)
        flat = await self._calls.read(key, "HGETALL", key)
        return {shown(lossless(unit)): shown(lossless(why)) for unit, why in flat.items()}

    async def flow_backlog(self, tags: Sequence[str]) -> api.FlowBacklog:
        places = [(tag, name) for tag in tags for name in (*_FLOW_QUEUES, _PARKED)]
        queued: Counter[str] = Counter()
        parked: dict[str, str] = {}
        if not await self.any_exists([api.Index(tag, name) for tag, name in places]):
            return api.FlowBacklog({}, parked)
        for tag in tags:
            for name, command in _FLOW_QUEUES.items():
                key = keys.index(tag, name)
                queued[name] += await self._calls.read(key, command, key)
            parked |= await self.parked_units(tag)
        return api.FlowBacklog({name: count for name, count in queued.items() if count}, parked)

    async def sibling_groups(self, tag: str, limit: int) -> list[str]:
        key = keys.index(self._calls.checked_tag(tag), "pending_cancel_groups")
        found = await self._calls.read(key, "SRANDMEMBER", key, limit)
        return [lossless(name) for name in found]

    async def forget_sibling_groups(self, tag: str, names: Iterable[str]) -> int:
        key = keys.index(self._calls.checked_tag(tag), "pending_cancel_groups")
        removed: Any = await self._calls.transport.call(
            "SREM", key, *as_stored(names), key=key, replay_safe=True
        )
        return int(removed)

    async def survey_indexes(self, requests: Sequence[api.SurveyRequest]) -> list[api.Survey]:
        parts = [part for request in requests for part in _survey_parts(request)]
        found: dict[str, list[api.Survey]] = {request.tag: [] for request in requests}
        for group in self._groups(parts, _LANES_SURVEYED // _LANES_PER_PART):
            surveyed = 0
            # One call may answer for only some of the parts.
            while surveyed < len(group):
                args = as_stored(arg for _, part in group[surveyed:] for arg in part)
                tag = group[0][0]
                surveys = await self._calls.ask("ff_survey", tag, args, _surveys, op="survey")
                surveyed += len(surveys)
                for survey in surveys:
                    found[survey.tag].append(survey)
        return [_joined(tag, surveys) for tag, surveys in found.items()]

    async def list_index(self, index: api.Index, start: int, limit: int) -> list[str]:
        key = raw(_key(index))
        found = await self._calls.read(_key(index), "ZRANGE", key, start, start + limit - 1)
        return [lossless(member) for member in found]

    async def unlisted(self, tag: str, ids: Sequence[str]) -> list[str]:
        if not ids:
            return []
        key = keys.index(tag, api.ALL_EXECUTIONS)
        scores = await self._calls.read(key, "ZMSCORE", key, *as_stored(ids))
        return [member for member, score in zip(ids, scores, strict=True) if score != 0]


class ValkeyLeadership(api.Leadership):
    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def acquire(self, duty: str, identity: str, ttl_ms: int) -> bool:
        args = (duty, identity, ttl_ms, _LISTED_MS)
        return await self._calls.ask("ff_lead", keys.LEADERS_TAG, args, _count, op="acquire") == 1

    async def renew(self, duty: str, identity: str, ttl_ms: int) -> bool:
        key = keys.leader(keys.LEADERS_TAG, duty)
        # Read and renew in one command; renewing another process's lease is harmless.
        owner: Any = await self._calls.transport.call(
            *("GETEX", key, "PX", ttl_ms), key=key, replay_safe=True
        )
        return owner == identity.encode()

    async def remaining_ms(self, duty: str) -> int | None:
        key = keys.leader(keys.LEADERS_TAG, duty)
        left: Any = await self._calls.transport.call("PTTL", key, key=key)
        return left if left >= 0 else None

    async def resign(self, duty: str, identity: str) -> None:
        await self._calls.fcall("ff_resign", keys.LEADERS_TAG, (duty, identity), op="resign")

    async def leaders(self) -> list[api.Leader]:
        duties = ["", *await self._calls.registered(keys.leaders(keys.LEADERS_TAG), str)]
        owners = await asyncio.gather(*(self._owner(duty) for duty in duties))
        return [
            api.Leader(shown(lossless(owner)).rpartition(":")[0], bool(duty))
            for duty, owner in zip(duties, owners, strict=True)
            if owner is not None
        ]

    async def put_report(self, report: bytes, ttl_ms: int) -> None:
        key = keys.LEADER_REPORT
        command = ("SET", key, report, "PX", ttl_ms)
        await self._calls.transport.call(*command, key=key, replay_safe=True)

    async def get_report(self) -> bytes | None:
        key = keys.LEADER_REPORT
        return await self._calls.read(key, "GET", key)

    async def _owner(self, duty: str) -> bytes | None:
        key = keys.leader(keys.LEADERS_TAG, duty)
        return await self._calls.read(key, "GET", key)


def _name(index: api.Index) -> str:
    """The name of an index after `ff:idx:T:`."""
    if not index.lane:
        return index.name
    return f"lane:{keys.lane_part(index.lane)}:{index.name}"


def _unreadable(index: api.Index, why: bytes) -> EngineError:
    return CorruptionError("corruption", f"{_key(index)}: {shown(lossless(why))}")


def _key(index: api.Index) -> str:
    return keys.index(index.tag, _name(index))


def _index(tag: str, name: str) -> api.Index:
    if not name.startswith("lane:"):
        return api.Index(tag, name)
    _, lane, kind = name.split(":", 2)
    return api.Index(tag, kind, keys.lane_of(lane))


def _texts(reply: list[Any]) -> list[str]:
    return [text(each) for each in reply[2]]


def _count(reply: list[Any]) -> int:
    return int(reply[2])


def _is_before(stamp: str, edge: int) -> bool:
    """Whether a lane was last registered before this time; an unreadable stamp counts as old."""
    return not stamp.isdecimal() or int(stamp) < edge


def _audit(reply: list[Any]) -> api.Audit:
    verdicts = [shown(lossless(verdict)) for verdict in reply[2]]
    return api.Audit(verdicts, [lossless(lane) for lane in reply[3]])


def _dependency_audits(reply: list[Any]) -> list[api.DependencyAudit]:
    if not reply[2]:
        raise ValueError(reply)
    return [
        api.DependencyAudit(shown(lossless(verdict)), text(cursor)) for verdict, cursor in reply[2]
    ]


def _survey_parts(request: api.SurveyRequest) -> list[tuple[str, list[str | int]]]:
    """Split a partition's survey into calls of a few lanes each; the first covers the rest."""
    known: dict[str, list[str]] = {}
    for index in request.known:
        known.setdefault(index.lane, []).append(_name(index))
    lanes = sorted({*request.lanes, *known} - {""})
    parts: list[tuple[str, list[str | int]]] = []
    for start in range(0, max(1, len(lanes)), _LANES_PER_PART):
        chunk = lanes[start : start + _LANES_PER_PART]
        names = [name for lane in chunk for name in known.get(lane, ())]
        if not start:
            names += known.get("", ())
        head = (request.tag, int(not start))
        parts.append((request.tag, [*head, len(chunk), *chunk, len(names), *names]))
    return parts


def _surveys(reply: list[Any]) -> list[api.Survey]:
    def survey(tag: str, fingerprint: bytes, names: list[bytes]) -> api.Survey:
        indexes = tuple(_index(tag, lossless(name)) for name in names)
        return api.Survey(tag, text(fingerprint), indexes)

    if not reply[2]:
        raise ValueError(reply)
    return [survey(text(tag), *rest) for tag, *rest in reply[2]]


def _joined(tag: str, parts: Sequence[api.Survey]) -> api.Survey:
    fingerprint = " ".join(part.fingerprint for part in parts)
    return api.Survey(tag, fingerprint, tuple(index for part in parts for index in part.indexes))
