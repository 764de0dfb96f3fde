"""Live workers."""

from __future__ import annotations

from typing import Any

from flowfabric.engine.api.workers import WorkerEntry
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend


async def read_live_workers(
    backend: ValkeyBackend, now_ms: int, namespace: str | None = None
) -> list[WorkerEntry]:
    """Workers whose heartbeat has not expired, of one namespace or of all.

    A worker runs executions of every namespace; its own is only where it is registered.
    """
    if namespace is None:
        members: Any = await backend.transport.call(
            "SMEMBERS", keys.NAMESPACES, key=keys.NAMESPACES
        )
        namespaces = sorted(member.decode() for member in members)
    else:
        namespaces = [namespace]
    found: list[WorkerEntry] = []
    for each in namespaces:
        found += await backend.workers.list_workers(each)
    return [w for w in found if w.last_heartbeat_ms + w.liveness_ttl_ms > now_ms]
