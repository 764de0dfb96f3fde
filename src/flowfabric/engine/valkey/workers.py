"""The registry of worker processes. Advisory: leases do not depend on it."""

from collections.abc import Iterable

from flowfabric.core import capabilities as caps
from flowfabric.core.errors import invalid_input
from flowfabric.core.ids import new_uuid, validate_lanes, validate_namespace, validate_worker_id
from flowfabric.core.stored import Stored, stored_text
from flowfabric.core.text import lossless, raw, shown
from flowfabric.engine.api import check
from flowfabric.engine.api.workers import Registration, Removal, WorkerEntry, Workers
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.pages import Damage
from flowfabric.engine.valkey.places import ValkeyPlaces, add_names

_REGISTERED: dict[bytes, Registration] = {b"registered": "registered", b"refreshed": "refreshed"}
_MARKED: dict[bytes, Removal] = {b"marked": "marked", b"not_registered": "not_registered"}
_LANE_SEPARATOR = "\x1f"
"""Lane names may contain commas but no control characters."""
_REASON_BYTES = 256


class ValkeyWorkers(Workers):
    """`Workers` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places
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
        )
        if namespace not in self._places.known_namespaces:
            await add_names(self._calls, keys.NAMESPACES, [namespace])
            self._places.known_namespaces.add(namespace)
        return await self._calls.ask(
            *("ff_worker_register", tag, args),
            lambda reply: _REGISTERED[reply[2]],
            op="register_worker",
        )

    async def heartbeat_worker(
        self, worker_instance_id: str, namespace: str = "default"
    ) -> int | None:
        tag = _tag(namespace)
        args = (validate_worker_id(worker_instance_id, "worker_instance_id"),)
        return await self._calls.ask(
            *("ff_worker_heartbeat", tag, args),
            lambda reply: None if reply[2] == b"not_registered" else int(reply[3]),
            op="heartbeat_worker",
        )

    async def mark_worker_dead(
        self, worker_instance_id: str, namespace: str = "default", reason: str = "shutdown"
    ) -> Removal:
        tag = _tag(namespace)
        if len(check.text(reason, "reason").encode()) > _REASON_BYTES or not reason.isprintable():
            raise invalid_input("reason", f"must be printable and at most {_REASON_BYTES} bytes")
        args = (validate_worker_id(worker_instance_id, "worker_instance_id"), reason)
        return await self._calls.ask(
            "ff_worker_dead", tag, args, lambda reply: _MARKED[reply[2]], op="mark_worker_dead"
        )

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
        return found

    async def _instances(self, namespace: str, after: str) -> list[tuple[str, str]]:
        index = keys.workers(_tag(namespace))
        members = await self._calls.read(f"namespace {namespace}: workers", "SMEMBERS", index)
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
