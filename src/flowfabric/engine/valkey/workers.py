"""The registry of worker processes. Advisory: leases do not depend on it."""

from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import Revoked
from flowfabric.core.errors import NotFoundError, StateError, invalid_input
from flowfabric.core.ids import (
    ExecutionId,
    new_uuid,
    validate_lanes,
    validate_namespace,
    validate_namespaces,
    validate_worker_id,
)
from flowfabric.core.stored import Stored, stored_text
from flowfabric.core.text import lossless, raw, shown
from flowfabric.engine.api import check
from flowfabric.engine.api.leases import Leases
from flowfabric.engine.api.upkeep import Drain
from flowfabric.engine.api.workers import (
    DRAIN_TIMEOUT_MS,
    Draining,
    Heartbeat,
    NotRegistered,
    Registration,
    Removal,
    WorkerEntry,
    WorkerLease,
    WorkerLeases,
    Workers,
)
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, finished, text
from flowfabric.engine.valkey.pages import Damage, given_cursor, reading_cursor
from flowfabric.engine.valkey.places import ValkeyPlaces, add_names
from flowfabric.engine.valkey.record import Record

_REGISTERED: dict[bytes, Registration] = {b"registered": "registered", b"refreshed": "refreshed"}
_MARKED: dict[bytes, Removal] = {b"marked": "marked", b"not_registered": "not_registered"}
_LANE_SEPARATOR = "\x1f"
"""Lane names may contain commas but no control characters."""
_LAST_NAMESPACE = "\x7f"
"""Sorts after every namespace."""
_REASON_BYTES = 256
_FAN_OUT = 16
_SWEPT_AT_ONCE = 200
_MAX_PAGE = 10_000


class ValkeyWorkers(Workers):
    """`Workers` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces, leases: Leases) -> None:
        self._calls = calls
        self._places = places
        self._leases = leases
        self._start_id = ""

    async def register_worker(
        self,
        *,
        worker_id: str,
        worker_instance_id: str,
        lanes: Iterable[str],
        capabilities: Iterable[str] = (),
        tasks: Iterable[str] = (),
        takes_other_tasks: bool = True,
        liveness_ttl_ms: int = 60_000,
        namespace: str = "default",
        namespaces: Iterable[str] = (),
        only_if_absent: bool = False,
        start_id: str | None = None,
    ) -> Registration:
        tag = _tag(namespace)
        validate_worker_id(worker_id)
        validate_worker_id(worker_instance_id, "worker_instance_id")
        check.positive_ms(liveness_ttl_ms, "liveness_ttl_ms")
        check.flag(only_if_absent, "only_if_absent")
        no_others = not check.flag(takes_other_tasks, "takes_other_tasks")
        if start_id is None:
            start_id = self._start_id = self._start_id or new_uuid()
        args = (
            worker_id,
            worker_instance_id,
            _LANE_SEPARATOR.join(sorted(set(validate_lanes(lanes)))),
            caps.to_csv(caps.normalise(capabilities, "worker")),
            liveness_ttl_ms,
            "1" if only_if_absent else "0",
            check.text(start_id, "start_id"),
            caps.offered_csv((), check.texts(tasks, "tasks"), no_others=no_others),
            " ".join(validate_namespaces(namespaces)),
        )
        if namespace not in self._places.known_namespaces:
            await add_names(self._calls, keys.NAMESPACES, [namespace])
            self._places.known_namespaces.add(namespace)
        outcome, drained = await self._calls.ask(
            *("ff_worker_register", tag, args),
            lambda reply: (_REGISTERED[reply[2]], _names(reply[3])),
            op="register_worker",
        )
        if drained:
            await self.refuse_claims(worker_instance_id, drained, refuse=False)
        return outcome

    async def heartbeat_worker(
        self, worker_instance_id: str, namespace: str = "default"
    ) -> Heartbeat | None:
        tag = _tag(namespace)
        args = (validate_worker_id(worker_instance_id, "worker_instance_id"),)
        return await self._calls.ask(
            *("ff_worker_heartbeat", tag, args),
            lambda reply: (
                None
                if reply[2] == b"not_registered"
                else Heartbeat(int(reply[3]), draining=reply[4] == 1)
            ),
            op="heartbeat_worker",
        )

    async def mark_worker_dead(
        self,
        worker_instance_id: str,
        namespace: str = "default",
        reason: str = "shutdown",
        *,
        revoke_leases: bool = False,
    ) -> Removal:
        tag = _tag(namespace)
        if len(check.text(reason, "reason").encode()) > _REASON_BYTES or not reason.isprintable():
            raise invalid_input("reason", f"must be printable and at most {_REASON_BYTES} bytes")
        args = (validate_worker_id(worker_instance_id, "worker_instance_id"), reason)
        revoke = check.flag(revoke_leases, "revoke_leases")
        removal, served, drained = await self._calls.ask(
            *("ff_worker_dead", tag, args),
            lambda reply: (_MARKED[reply[2]], _names(reply[3]), _names(reply[4])),
            op="mark_worker_dead",
        )
        if drained:
            await self.refuse_claims(worker_instance_id, drained, refuse=False)
        if revoke:
            await self.revoke_all(worker_instance_id, served, reason)
        return removal

    async def drain_worker(
        self,
        worker_instance_id: str,
        namespace: str = "default",
        timeout_ms: int = DRAIN_TIMEOUT_MS,
    ) -> Draining | NotRegistered:
        tag = _tag(namespace)
        instance = validate_worker_id(worker_instance_id, "worker_instance_id")
        timeout = check.whole(timeout_ms, "timeout_ms", 0, check.MAX_EXACT)
        served = await self._calls.ask(
            *("ff_worker_drain", tag, (instance, timeout)),
            lambda reply: _names(reply[3]) if reply[2] == b"draining" else None,
            op="drain_worker",
        )
        if served is None:
            return NotRegistered()
        # A scanner continues the drain from here.
        await add_names(self._calls, keys.DRAINS, [namespace])
        return Draining(await self.refuse_claims(instance, served))

    async def refuse_claims(
        self, instance: str, namespaces: Sequence[str], *, refuse: bool = True
    ) -> int:
        """Refuse a process work of these namespaces, or allow it again; how many leases it holds.

        `*` stands for all namespaces.
        """
        args = ("1" if refuse else "0", instance, " ".join(namespaces))

        async def tell(partition: int) -> int:
            tag = f"{{fp:{partition}}}"
            return await self._calls.ask(
                "ff_refuse_claims", tag, args, lambda reply: int(reply[2]), op="drain_worker"
            )

        return sum(await finished(_FAN_OUT, tell, range(self._calls.counts.flow)))

    async def sweep(self, namespace: str) -> int:
        """Remove processes whose registration has expired; returns how many."""
        cursor, swept, tag = "", 0, _tag(namespace)
        while cursor != "0":
            cursor, count, undrained = await self._calls.ask(
                *("ff_worker_sweep", tag, (cursor or "0", _SWEPT_AT_ONCE)),
                lambda reply: (text(reply[2]), int(reply[3]), list(reply[4])),
                op="sweep_workers",
            )
            swept += count
            for instance, drained in zip(undrained[::2], undrained[1::2], strict=True):
                # A process that starts with the same id is not being drained.
                await self.refuse_claims(text(instance), _names(drained), refuse=False)
        return swept

    async def list_worker_leases(
        self, worker_instance_id: str, after: str = "", limit: int = 1000
    ) -> WorkerLeases:
        return await self._leases_of(worker_instance_id, ("*",), after, limit)

    async def _leases_of(
        self, worker_instance_id: str, namespaces: Sequence[str], after: str, limit: int
    ) -> WorkerLeases:
        instance = validate_worker_id(worker_instance_id, "worker_instance_id")
        with reading_cursor():
            start = ExecutionId.parse(after) if given_cursor(after) else ""
        limit = min(check.whole(limit, "limit", 0), _MAX_PAGE)
        damage = Damage("list_worker_leases")

        async def held(tag: str) -> list[ExecutionId]:
            key = raw(keys.worker_leases(tag, instance))
            members = await self._calls.read(f"{tag}: leases of {instance}", "SMEMBERS", key)
            return [each for each in damage.ids(members) if each > start]

        pages = await finished(_FAN_OUT, held, await self._places.used_partitions())
        due = sorted(each for page in pages for each in page)
        found, more = await damage.first(
            limit, due, lambda each: self._lease(each, instance, namespaces)
        )
        last = found[-1].execution_id if more and found else None
        return WorkerLeases(tuple(found), last, tuple(damage.found))

    async def _lease(
        self, execution_id: ExecutionId, instance: str, namespaces: Sequence[str]
    ) -> WorkerLease | None:
        """The lease, unless it ended since the index was read or is of another namespace."""
        record = await Record.read(self._calls, execution_id)
        lease = None if record is None else record.current_lease
        if record is None or lease is None or lease.worker_instance_id != instance:
            return None
        if "*" not in namespaces and record.namespace not in namespaces:
            return None
        return WorkerLease(
            execution_id=execution_id,
            lease_id=lease.lease_id,
            lease_epoch=lease.lease_epoch,
            expires_at_ms=lease.expires_at,
        )

    async def revoke_all(self, instance: str, namespaces: Sequence[str], reason: str) -> int:
        """Revoke the leases of a process in these namespaces; returns how many."""
        revoked, after = 0, ""
        while True:
            page = await self._leases_of(instance, namespaces, after, _MAX_PAGE)
            outcomes = await finished(
                _FAN_OUT, lambda each: self._revoke(each, reason), page.entries
            )
            revoked += sum(outcomes)
            if page.cursor is None:
                return revoked
            after = page.cursor

    async def _revoke(self, held: WorkerLease, reason: str) -> bool:
        try:
            outcome = await self._leases.revoke_lease(
                held.execution_id,
                expected_lease_id=held.lease_id,
                reason=reason,
                revoked_by="worker_registry",
            )
        except (NotFoundError, StateError):
            # It ended, or another worker has it now.
            return False
        return isinstance(outcome, Revoked)

    async def list_workers(
        self, namespace: str | None = "default", after: str = "", limit: int | None = 1000
    ) -> list[WorkerEntry]:
        check.text(after, "after")
        limit = check.MAX_EXACT if limit is None else check.whole(limit, "limit")
        namespaces = await self._places.namespaces_in_use() if namespace is None else [namespace]
        instance, _, last = after.partition(" ")
        # Without a namespace, all entries of this instance are before the page.
        start = (instance, last or _LAST_NAMESPACE)
        pairs = [pair for each in namespaces for pair in await self._instances(each)]
        listed = sorted(pair for pair in pairs if pair > start)
        found, _ = await Damage("list_workers").first(
            max(0, limit), listed, lambda each: self._worker(*each)
        )
        draining = {
            (each, instance) for each in namespaces for instance in await self.drains_of(each)
        }
        return [
            msgspec.structs.replace(entry, draining=True)
            if (entry.namespace, entry.worker_instance_id) in draining
            else entry
            for entry in found
        ]

    async def drains_of(self, namespace: str) -> dict[str, Drain]:
        """The processes of a namespace that are being drained, by instance id."""
        key = keys.drains(_tag(namespace))
        found = await self._calls.read(f"{key}: drains", "HGETALL", key)
        stored = Stored.from_hash(f"{key}: drains", found)
        return {
            each: stored.parsed(each, partial(_drain, namespace, each)) for each in stored.fields
        }

    async def _instances(self, namespace: str) -> list[tuple[str, str]]:
        index = keys.workers(_tag(namespace))
        members = await self._calls.read(f"namespace {namespace}: workers", "HKEYS", index)
        return [(name, namespace) for name in map(lossless, members)]

    async def _worker(self, instance: str, namespace: str) -> WorkerEntry | None:
        context = f"worker {shown(instance)}"
        key = raw(keys.worker_record(_tag(namespace), instance))
        found = await self._calls.read(f"{context}: record", "HGETALL", key)
        if not found:
            return None
        stored = Stored.from_hash(context, found)
        tasks, takes_others = caps.read_tasks(stored.text("tasks_csv", ""))
        return WorkerEntry(
            worker_id=stored.text("worker_id"),
            worker_instance_id=stored_text(raw(instance), stored.context, "worker_instance_id"),
            namespace=namespace,
            namespaces=tuple(stored.text("namespaces", "").split()),
            lanes=tuple(
                lane for lane in stored.text("lanes_csv", "").split(_LANE_SEPARATOR) if lane
            ),
            capabilities=stored.parsed("caps_csv", lambda csv: caps.from_csv(csv, "worker")),
            tasks=tasks,
            takes_other_tasks=takes_others,
            last_heartbeat_ms=stored.number("last_heartbeat_ms"),
            liveness_ttl_ms=stored.number("ttl_ms"),
            registered_at_ms=stored.number("registered_at_ms"),
        )


def _names(stored: bytes) -> tuple[str, ...]:
    return tuple(stored.decode().split())


def _drain(namespace: str, instance: str, stored: str) -> Drain:
    ends_at, *namespaces = stored.split()
    return Drain(namespace, instance, int(ends_at), tuple(namespaces))


def _tag(namespace: str) -> str:
    return f"{{{validate_namespace(namespace)}}}"
