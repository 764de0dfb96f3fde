"""Which executions this process may touch when several deployments share one keyspace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend


class ScannerFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Accepts executions of one namespace, or with one tag; an empty filter accepts all.

    >>> ScannerFilter(namespace="acme", instance_tag=("region", "eu")).is_empty
    False
    """

    namespace: str | None = None
    instance_tag: tuple[str, str] | None = None

    @property
    def is_empty(self) -> bool:
        return self.namespace is None and self.instance_tag is None

    async def accepted(self, backend: Backend, ids: Sequence[str]) -> list[str]:
        """The ids that match, in order. An execution that cannot be read does not match."""
        if self.is_empty:
            return list(ids)
        verdicts = await asyncio.gather(*(self._accepts(backend, member) for member in ids))
        return [member for member, ok in zip(ids, verdicts, strict=True) if ok]

    async def _accepts(self, backend: Backend, member: str) -> bool:
        try:
            execution_id = ExecutionId.parse(member)
            if self.namespace is not None:
                found = await backend.reads.get_execution_namespace(execution_id)
                if found != self.namespace:
                    return False
            if self.instance_tag is not None:
                name, value = self.instance_tag
                return await backend.reads.get_execution_tag(execution_id, name) == value
        except EngineError:
            return False
        return True
