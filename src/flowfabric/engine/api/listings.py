"""Listing executions, page by page."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from flowfabric.core.contracts.executions import ExecutionPage, ExecutionSummary
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.concern import Concern


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Every part that is given must match."""

    namespace: str | None = None
    lane: str | None = None
    kind: str | None = None
    state: str | None = None
    tags: Mapping[str, str] = {}

    def accepts(self, row: ExecutionSummary) -> bool:
        """Whether the record matches; tags are checked separately."""
        return (
            (self.namespace is None or row.namespace == self.namespace)
            and (self.lane is None or row.lane_id == self.lane)
            and (self.kind is None or row.execution_kind == self.kind)
            and (self.state is None or row.public_state.value == self.state)
        )


class Listings(Concern, Protocol):
    """Listing executions, page by page."""

    async def list_executions(
        self,
        *,
        partition: int | None = None,
        cursor: str = "",
        limit: int = 50,
        where: Filter | None = None,
    ) -> ExecutionPage:
        """Executions by partition and id. A filtered page may be short while a cursor follows.

        With a partition the cursor is the last id looked at; without, it is opaque.
        """
        ...

    async def list_lane(
        self, lane_id: str, state: str, *, partition: int, cursor: str = "", limit: int = 50
    ) -> ExecutionPage:
        """Executions of one lane in one state, in the order of its index."""
        ...

    async def find_executions(self, uuid_prefix: str, limit: int = 10) -> list[ExecutionId]:
        """Executions whose UUID starts with a prefix: people abbreviate ids."""
        ...
