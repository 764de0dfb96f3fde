"""Which workers are alive, by the server's clock."""

from __future__ import annotations

from typing import Any

from flowfabric.core import keys
from flowfabric.engine.backend import Backend
from flowfabric.engine.registry import WorkerEntry

__all__ = ["live_workers", "server_now_ms"]


async def server_now_ms(backend: Backend) -> int:
    """The server's time."""
    reply: Any = await backend.transport.call("TIME", key="")
    return int(reply[0]) * 1000 + int(reply[1]) // 1000


async def live_workers(
    backend: Backend, now_ms: int, namespace: str | None = None
) -> list[WorkerEntry]:
    """Workers whose last heartbeat still counts, of one namespace or of all.

    A worker takes work of any namespace; its own only says where it is registered.
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
        found += await backend.list_workers(each)
    return [w for w in found if w.last_heartbeat_ms + w.liveness_ttl_ms > now_ms]
