"""Which worker processes exist. Advisory: it never decides on a lease."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core import keys
from flowfabric.core.errors import invalid_input
from flowfabric.core.ids import new_uuid, validate_lanes, validate_namespace, validate_worker_id
from flowfabric.core.stored import Stored, stored_text
from flowfabric.core.text import lossless, raw, shown
from flowfabric.engine.arguments import checked_text, flag, positive_ms, whole
from flowfabric.engine.calls import Calls
from flowfabric.engine.damage import Damage
from flowfabric.engine.registration import add_names

__all__ = ["Registry", "WorkerEntry"]

_REASON_BYTES = 256
_READ_AHEAD = 100
_LANE_SEPARATOR = "\x1f"
"""Lane names may contain commas but no control characters."""


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One registered worker process."""

    worker_id: str
    worker_instance_id: str
    namespace: str
    lanes: tuple[str, ...]
    capabilities: tuple[str, ...]
    last_heartbeat_ms: int
    liveness_ttl_ms: int
    registered_at_ms: int


def _tag(namespace: str) -> str:
    return f"{{{validate_namespace(namespace)}}}"


class Registry(Calls):
    """Registering, heartbeats and listing."""

    # Tells a repeat of our own registration from another process with the same instance id.
    nonce: str = ""

    async def register_worker(
        self,
        *,
        worker_id: str,
        worker_instance_id: str,
        lanes: Iterable[str],
        capabilities: Iterable[str] = (),
        liveness_ttl_ms: int = 60_000,
        namespace: str = "default",
        only_if_absent: bool = False,
    ) -> Literal["registered", "refreshed"]:
        """Announce a worker process, or refresh what is known of it."""
        tag = _tag(namespace)
        validate_worker_id(worker_id)
        validate_worker_id(worker_instance_id, "worker_instance_id")
        positive_ms(liveness_ttl_ms, "liveness_ttl_ms")
        flag(only_if_absent, "only_if_absent")
        self.nonce = self.nonce or new_uuid()
        args = (
            worker_id,
            worker_instance_id,
            _LANE_SEPARATOR.join(sorted(set(validate_lanes(lanes)))),
            caps.to_csv(caps.normalise(capabilities, "worker")),
            liveness_ttl_ms,
            "1" if only_if_absent else "0",
            self.nonce,
        )
        if namespace not in self.known_namespaces:
            await add_names(self.transport, keys.NAMESPACES, [namespace])
            self.known_namespaces.add(namespace)
        return await self.ask(
            *("ff_worker_register", tag, args),
            lambda reply: _REGISTERED[reply[2]],
            op="register_worker",
        )

    known_namespaces: set[str]

    async def heartbeat_worker(
        self, worker_instance_id: str, namespace: str = "default"
    ) -> int | None:
        """Renew a registration; its next expiry in ms, or None when it is not registered."""
        tag = _tag(namespace)
        args = (validate_worker_id(worker_instance_id, "worker_instance_id"),)
        return await self.ask("ff_worker_heartbeat", tag, args, _expiry, op="heartbeat_worker")

    async def mark_worker_dead(
        self, worker_instance_id: str, namespace: str = "default", reason: str = "shutdown"
    ) -> Literal["marked", "not_registered"]:
        """Remove a worker process from the registry; its leases are judged by their expiry."""
        tag = _tag(namespace)
        if len(checked_text(reason, "reason").encode()) > _REASON_BYTES or not reason.isprintable():
            raise invalid_input("reason", f"must be printable and at most {_REASON_BYTES} bytes")
        args = (validate_worker_id(worker_instance_id, "worker_instance_id"), reason)
        return await self.ask(
            "ff_worker_dead", tag, args, lambda reply: _MARKED[reply[2]], op="mark_worker_dead"
        )

    async def list_workers(
        self, namespace: str = "default", after: str = "", limit: int = 1000
    ) -> list[WorkerEntry]:
        """Live worker processes by instance id, at most `limit` of those after `after`.

        Instances whose record is gone are skipped, and damaged ones with a warning. A page shorter
        than `limit` is the last one.
        """
        tag = _tag(namespace)
        checked_text(after, "after")
        whole(limit, "limit")
        index = keys.workers(tag)
        damage = Damage("list_workers")
        members = await self.read(f"namespace {namespace}: workers", "SMEMBERS", index)
        instances = sorted(name for name in map(lossless, members) if name > after)
        found: list[WorkerEntry] = []
        for start in range(0, len(instances), _READ_AHEAD):
            if len(found) >= limit:
                break
            part = instances[start : start + _READ_AHEAD]
            entries = await damage.keep_all(self._worker(namespace, each) for each in part)
            found += (entry for entry in entries if entry is not None)
        return found[: max(0, limit)]

    async def _worker(self, namespace: str, instance: str) -> WorkerEntry | None:
        context = f"worker {shown(instance)}"
        key = raw(keys.worker_record(_tag(namespace), instance))
        stored = await self.read(f"{context}: record", "HGETALL", key)
        return _entry(namespace, instance, Stored.from_hash(context, stored)) if stored else None


_REGISTERED: dict[bytes, Literal["registered", "refreshed"]] = {
    b"registered": "registered",
    b"refreshed": "refreshed",
}
_MARKED: dict[bytes, Literal["marked", "not_registered"]] = {
    b"marked": "marked",
    b"not_registered": "not_registered",
}


def _expiry(reply: list[Any]) -> int | None:
    return None if reply[2] == b"not_registered" else int(reply[3])


def _entry(namespace: str, instance: str, stored: Stored) -> WorkerEntry:
    return WorkerEntry(
        worker_id=stored.text("worker_id"),
        worker_instance_id=stored_text(raw(instance), stored.context, "worker_instance_id"),
        namespace=namespace,
        lanes=tuple(lane for lane in stored.text("lanes_csv", "").split(_LANE_SEPARATOR) if lane),
        capabilities=stored.parsed("caps_csv", lambda csv: caps.from_csv(csv, "worker")),
        last_heartbeat_ms=stored.number("last_heartbeat_ms"),
        liveness_ttl_ms=stored.number("ttl_ms"),
        registered_at_ms=stored.number("registered_at_ms"),
    )
