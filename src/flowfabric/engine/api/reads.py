"""Reading one execution."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from flowfabric.core.contracts.executions import (
    AttemptRecord,
    ExecutionContext,
    ExecutionInfo,
    ExecutionSnapshot,
    WhyWaiting,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.state import PublicState
from flowfabric.engine.api.concern import Concern
from flowfabric.engine.api.events import Event


class Reads(Concern, Protocol):
    """Reading one execution."""

    async def read_execution_info(self, execution_id: ExecutionId) -> ExecutionInfo:
        """An execution as operators read it."""
        ...

    async def read_execution_state(self, execution_id: ExecutionId) -> PublicState:
        """The public state: the authoritative completion signal."""
        ...

    async def describe_execution(self, execution_id: ExecutionId) -> ExecutionSnapshot | None:
        """The strictly decoded execution, or None if it does not exist."""
        ...

    async def get_execution_result(self, execution_id: ExecutionId) -> bytes | None:
        """The result bytes, or None if there is none yet or no longer."""
        ...

    async def read_outcome(self, execution_id: ExecutionId) -> tuple[ExecutionInfo, bytes | None]:
        """State and result, read together."""
        ...

    async def read_execution_context(self, execution_id: ExecutionId) -> ExecutionContext:
        """The input of a handler."""
        ...

    async def read_execution_policy(self, execution_id: ExecutionId) -> ExecutionPolicy:
        """The policy of an execution, defaults filled in."""
        ...

    async def get_execution_namespace(self, execution_id: ExecutionId) -> str | None:
        """The namespace, or None if the execution does not exist."""
        ...

    async def get_execution_tag(self, execution_id: ExecutionId, key: str) -> str | None:
        """One tag's value, or None."""
        ...

    async def get_execution_tags(self, execution_id: ExecutionId) -> Mapping[str, str]:
        """All tags of an execution."""
        ...

    async def read_exec_core_fields(
        self, execution_id: ExecutionId, names: Sequence[str]
    ) -> dict[str, str | None]:
        """Record fields by their documented names, for tools; None where unset."""
        ...

    async def read_current_attempt_index(self, execution_id: ExecutionId) -> int:
        """The number of the last attempt, 0 before the first claim."""
        ...

    async def read_total_attempt_count(self, execution_id: ExecutionId) -> int:
        """How many attempts there were; the index of the next new one."""
        ...

    async def read_attempts(self, execution_id: ExecutionId) -> list[AttemptRecord]:
        """Every attempt, oldest first."""
        ...

    async def read_execution_history(self, execution_id: ExecutionId) -> list[Event]:
        """The newest unusual lease events of one execution, oldest first."""
        ...

    async def explain_execution(self, execution_id: ExecutionId) -> WhyWaiting:
        """Why an execution is not running.

        Missing capabilities are judged by the workers that are live now, and only while it waits
        for one.
        """
        ...
