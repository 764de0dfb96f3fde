"""Which executions this process may touch, when several deployments share one keyspace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend


class ScannerFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Accepts executions of one namespace, or with one tag; empty accepts all without a read.

    Whatever cannot be read is not accepted: the next cycle looks again.

    >>> ScannerFilter(namespace="acme", instance_tag=("region", "eu")).is_empty
    False
    """

    namespace: str | None = None
    instance_tag: tuple[str, str] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether everything is accepted."""
        return self.namespace is None and self.instance_tag is None

    async def accepted(self, backend: ValkeyBackend, ids: Sequence[str]) -> list[str]:
        """Those of the ids that match, in order."""
        if self.is_empty:
            return list(ids)
        verdicts = await asyncio.gather(*(self._accepts(backend, member) for member in ids))
        return [member for member, ok in zip(ids, verdicts, strict=True) if ok]

    async def _accepts(self, backend: ValkeyBackend, member: str) -> bool:
        try:
            execution_id = backend.calls.checked(ExecutionId.parse(member))
            if self.namespace is not None:
                found = await _namespace(backend, execution_id)
                if found != self.namespace.encode():
                    return False
            if self.instance_tag is not None:
                name, wanted = self.instance_tag
                key = keys.tags(execution_id.tag, execution_id)
                value: Any = await backend.transport.call("HGET", key, name, key=key)
                return value == wanted.encode()
        except EngineError:
            return False
        return True


async def _namespace(backend: ValkeyBackend, execution_id: ExecutionId) -> bytes | None:
    """The stored namespace. Every record has a state; only then does absent mean the default."""
    key = keys.core(execution_id.tag, execution_id)
    reply: Any = await backend.transport.call("HMGET", key, "state", "namespace", key=key)
    state, namespace = reply
    if state is None:
        return None
    return namespace or b"default"
