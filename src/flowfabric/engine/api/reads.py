"""Reading executions: one, or page by page."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from flowfabric.core.contracts import executions as contracts
from flowfabric.core.ids import ExecutionId, validate_lane, validate_namespace, validate_text
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.state import PublicState
from flowfabric.core.tags import validate_tag_filter
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern
from flowfabric.engine.api.events import Event

Outcome = tuple[contracts.ExecutionInfo, bytes | None]
"""State and result of an execution, read together."""


class Reads(Concern, Protocol):
    """Reading one execution."""

    async def read_execution_info(self, execution_id: ExecutionId) -> contracts.ExecutionInfo: ...
    async def read_execution_state(self, execution_id: ExecutionId) -> PublicState: ...
    async def read_execution_policy(self, execution_id: ExecutionId) -> ExecutionPolicy: ...
    async def read_outcome(self, execution_id: ExecutionId) -> Outcome: ...
    async def get_execution_namespace(self, execution_id: ExecutionId) -> str | None: ...
    async def get_execution_tag(self, execution_id: ExecutionId, key: str) -> str | None: ...
    async def get_execution_tags(self, execution_id: ExecutionId) -> Mapping[str, str]: ...
    async def read_current_attempt_index(self, execution_id: ExecutionId) -> int: ...
    async def read_total_attempt_count(self, execution_id: ExecutionId) -> int: ...
    async def read_attempts(self, execution_id: ExecutionId) -> list[contracts.AttemptRecord]: ...
    async def read_execution_context(
        self, execution_id: ExecutionId
    ) -> contracts.ExecutionContext: ...

    async def describe_execution(
        self, execution_id: ExecutionId
    ) -> contracts.ExecutionSnapshot | None:
        """The strictly decoded execution, or None if it does not exist."""
        ...

    async def get_execution_result(self, execution_id: ExecutionId) -> bytes | None:
        """The result bytes, or None if there is none yet or no longer."""
        ...

    async def read_exec_core_fields(
        self, execution_id: ExecutionId, names: Sequence[str]
    ) -> dict[str, str | None]:
        """Record fields by their documented names, for tools; None where unset."""
        ...

    async def read_execution_history(self, execution_id: ExecutionId) -> list[Event]:
        """The newest unusual lease events of one execution, oldest first."""
        ...

    async def explain_execution(self, execution_id: ExecutionId) -> contracts.WhyWaiting:
        """Why it is not running; capabilities are compared with the workers that are live now."""
        ...


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Every part that is given must match."""

    namespace: str | None = None
    lane: str | None = None
    kind: str | None = None
    state: str | None = None
    finished: bool | None = None
    before: int | None = None
    """Only what finished before this time or, if it has not, was created before it."""
    tags: Mapping[str, str] = {}

    def validate(self) -> None:
        """Raise an error for a misspelled filter, which would look like an empty deployment."""
        if self.state is not None:
            check.one_of(self.state, "state", list(PublicState))
        if self.lane is not None:
            validate_lane(self.lane, "lane")
        if self.namespace is not None:
            validate_namespace(self.namespace)
        if self.kind is not None:
            validate_text(self.kind, "kind", required=True)
        if self.finished is not None:
            check.flag(self.finished, "finished")
        if self.before is not None:
            check.timestamp(self.before, "before")
        if self.tags:
            validate_tag_filter(self.tags)

    def accepts(self, row: contracts.ExecutionSummary | contracts.ExecutionInfo) -> bool:
        """Whether the record matches; tags are checked separately."""
        return (
            self.namespace in (None, row.namespace)
            and self.lane in (None, row.lane_id)
            and self.kind in (None, row.execution_kind)
            and self.state in (None, row.public_state)
            and self.finished in (None, row.completed_at is not None)
            and (self.before is None or int(row.completed_at or row.created_at) < self.before)
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
    ) -> contracts.ExecutionPage:
        """Executions by partition and id. A filtered page may be short while a cursor follows.

        With a partition the cursor is the last id looked at; without, it is opaque.
        """
        ...

    async def list_lane(
        self, lane_id: str, state: str, *, partition: int, cursor: str = "", limit: int = 50
    ) -> contracts.ExecutionPage:
        """Executions of one lane in one state, in the order of its index.

        Executions that no live worker can take are `blocked_route`, not `eligible`.
        """
        ...

    async def count_lanes(self, lanes: Sequence[str]) -> dict[str, dict[str, int]]:
        """How many executions each lane has in each state: `eligible`, `active`, …"""
        ...

    async def oldest_eligible(self, lanes: Sequence[str]) -> dict[str, int]:
        """For how many ms the longest-waiting eligible execution of each lane has been eligible.

        0 for a lane without one. Executions that no live worker can take do not count.
        """
        ...

    async def find_executions(
        self, uuid_prefix: str, limit: int = 10, *, partition: int | None = None
    ) -> list[ExecutionId]:
        """Executions whose UUID starts with the text, in one partition or in all of them."""
        ...
