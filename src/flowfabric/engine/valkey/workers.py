"""The registry of worker processes. Advisory: leases do not depend on it."""

from collections.abc import Iterable

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
from flowfabric.engine.valkey.calls import FunctionCalls, finished
from flowfabric.engine.valkey.pages import Damage, given_cursor, reading_cursor
from flowfabric.engine.valkey.places import ValkeyPlaces, add_names
from flowfabric.engine.valkey.record import Record

_REGISTERED: dict[bytes, Registration] = {b"registered": "registered", b"refreshed": "refreshed"}
_MARKED: dict[bytes, Removal] = {b"marked": "marked", b"not_registered": "not_registered"}
_LANE_SEPARATOR = "\x1f"
"""Lane names may contain commas but no control characters."""
_REASON_BYTES = 256
_FAN_OUT = 16
_MAX_PAGE = 10_000


class ValkeyWorkers(Workers):
    """`Workers` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces, leases: Leases) -> None:
        self._calls = calls
        self._places = places
        self._leases = leases
        # Distinguishes our own repeat from another process with the same instance id.
        self._nonce = ""

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
    ) -> Registration:
        tag = _tag(namespace)
        validate_worker_id(worker_id)
        validate_worker_id(worker_instance_id, "worker_instance_id")
        check.positive_ms(liveness_ttl_ms, "liveness_ttl_ms")
        check.flag(only_if_absent, "only_if_absent")
        no_others = not check.flag(takes_other_tasks, "takes_other_tasks")
        self._nonce = self._nonce or new_uuid()
        args = (
            worker_id,
            worker_instance_id,
            _LANE_SEPARATOR.join(sorted(set(validate_lanes(lanes)))),
            caps.to_csv(caps.normalise(capabilities, "worker")),
            liveness_ttl_ms,
            "1" if only_if_absent else "0",
            self._nonce,
            caps.offered_csv((), check.texts(tasks, "tasks"), no_others=no_others),
            " ".join(validate_namespaces(namespaces)),
        )
        if namespace not in self._places.known_namespaces:
            await add_names(self._calls, keys.NAMESPACES, [namespace])
            self._places.known_namespaces.add(namespace)
        outcome, was_draining = await self._calls.ask(
            *("ff_worker_register", tag, args),
            lambda reply: (_REGISTERED[reply[2]], reply[3] == 1),
            op="register_worker",
        )
        if was_draining:
            await self.refuse_claims(worker_instance_id, refuse=False)
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
        removal, was_draining = await self._calls.ask(
            *("ff_worker_dead", tag, args),
            lambda reply: (_MARKED[reply[2]], reply[3] == 1),
            op="mark_worker_dead",
        )
        if was_draining:
            await self.refuse_claims(worker_instance_id, refuse=False)
        if revoke:
            await self.revoke_all(worker_instance_id, reason)
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
        is_alive = await self._calls.ask(
            *("ff_worker_drain", tag, (instance, timeout)),
            lambda reply: reply[2] == b"draining",
            op="drain_worker",
        )
        if not is_alive:
            return NotRegistered()
        # From here on a scanner continues it.
        await add_names(self._calls, keys.DRAINS, [namespace])
        return Draining(await self.refuse_claims(instance))

    async def refuse_claims(self, instance: str, *, refuse: bool = True) -> int:
        """Give a process no more work, or again; returns how many leases it holds."""
        args = ("1" if refuse else "0", instance)

        async def tell(partition: int) -> int:
            tag = f"{{fp:{partition}}}"
            return await self._calls.ask(
                "ff_refuse_claims", tag, args, lambda reply: int(reply[2]), op="drain_worker"
            )

        return sum(await finished(_FAN_OUT, tell, range(self._calls.counts.flow)))

    async def list_worker_leases(
        self, worker_instance_id: str, after: str = "", limit: int = 1000
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
        found, more = await damage.first(limit, due, lambda each: self._lease(each, instance))
        last = found[-1].execution_id if more and found else None
        return WorkerLeases(tuple(found), last, tuple(damage.found))

    async def _lease(self, execution_id: ExecutionId, instance: str) -> WorkerLease | None:
        """The lease, unless it ended since the index was read."""
        record = await Record.read(self._calls, execution_id)
        lease = None if record is None else record.current_lease
        if lease is None or lease.worker_instance_id != instance:
            return None
        return WorkerLease(
            execution_id=execution_id,
            lease_id=lease.lease_id,
            lease_epoch=lease.lease_epoch,
            expires_at_ms=lease.expires_at,
        )

    async def revoke_all(self, instance: str, reason: str) -> int:
        """Revoke every lease of a process; returns how many."""
        revoked, after = 0, ""
        while True:
            page = await self.list_worker_leases(instance, after)
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
            # It ended, or another worker has it by now.
            return False
        return isinstance(outcome, Revoked)

    async def list_workers(
        self, namespace: str | None = "default", after: str = "", limit: int | None = 1000
    ) -> list[WorkerEntry]:
        check.text(after, "after")
        limit = check.MAX_EXACT if limit is None else check.whole(limit, "limit")
        namespaces = await self._places.namespaces_in_use() if namespace is None else [namespace]
        listed = sorted(
            [pair for each in namespaces for pair in await self._instances(each, after)]
        )
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

    async def drains_of(self, namespace: str) -> dict[str, int]:
        """The processes of a namespace that are being drained, with the end of that."""
        key = keys.drains(_tag(namespace))
        found = await self._calls.read(f"{key}: drains", "ZRANGE", key, 0, -1, "WITHSCORES")
        return {lossless(instance): int(ends_at) for instance, ends_at in found}

    async def _instances(self, namespace: str, after: str) -> list[tuple[str, str]]:
        index = keys.workers(_tag(namespace))
        members = await self._calls.read(f"namespace {namespace}: workers", "HKEYS", index)
        return [(name, namespace) for name in map(lossless, members) if name > after]

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


def _tag(namespace: str) -> str:
    return f"{{{validate_namespace(namespace)}}}"
