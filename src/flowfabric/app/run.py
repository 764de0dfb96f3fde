"""A submitted execution, seen from the submitter."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from flowfabric.app import codec
from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.sdk.client import Client, Outcome

__all__ = ["Run"]

R = TypeVar("R")


class Run(Generic[R]):
    """A handle on one execution: its state, its result, and a way to cancel it."""

    __slots__ = ("_client", "_returns", "duplicate", "id")

    def __init__(
        self, client: Client, execution_id: ExecutionId, returns: Any = Any, *, duplicate: bool
    ) -> None:
        self._client = client
        self._returns = returns
        self.id = execution_id
        self.duplicate = duplicate
        """Whether the id or idempotency key was already taken: this is the earlier execution."""

    async def state(self) -> PublicState:
        """Where the execution is now."""
        return await self._client.backend.read_execution_state(self.id)

    async def info(self) -> ExecutionInfo:
        """Everything an operator would see of it."""
        return await self._client.backend.read_execution_info(self.id)

    async def wait(self, timeout: float | None = None) -> Outcome:
        """Wait until it has ended, however it ended."""
        return await self._client.wait(self.id, timeout)

    async def result(self, timeout: float | None = None) -> R:
        """Wait for the result. `ExecutionFailed` and its siblings tell why there is none."""
        data = await self._client.result(self.id, timeout)
        info = None if data is None else await self.info()
        encoding = codec.JSON if info is None else info.result_encoding
        return codec.decode(data, encoding, self._returns)

    async def cancel(self, reason: str = "") -> None:
        """End it deliberately; a running handler learns of it with its next renewal."""
        await self._client.cancel(self.id, reason)

    def __repr__(self) -> str:
        return f"Run({self.id})"
