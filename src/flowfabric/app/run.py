"""A submitted execution, seen from the submitter."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from flowfabric.app import codec
from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.contracts.streams import Visibility
from flowfabric.core.contracts.suspension import SignalOutcome
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.sdk.client import Client, Outcome
from flowfabric.sdk.tail import Tail

__all__ = ["Run"]

R = TypeVar("R")


class Run(Generic[R]):
    """A handle on one execution: its state, its result, its output, and ways to act on it."""

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
        outcome = await self._client.success(self.id, timeout)
        return codec.decode(outcome.result, outcome.result_encoding, self._returns)

    async def cancel(self, reason: str = "") -> None:
        """End it deliberately; a running handler learns of it with its next renewal."""
        await self._client.cancel(self.id, reason)

    async def signal(
        self, waitpoint: str, name: str, payload: Any = None, **options: Any
    ) -> SignalOutcome:
        """Answer a wait of the handler, named as in `ctx.wait_for`; the payload becomes JSON.

        Takes the options of `Client.deliver_signal`.

        >>> await run.signal("approval", "approved", {"note": "fine"})
        """
        if payload is not None:
            options["payload"], options["payload_encoding"] = codec.encode(payload, "payload")
        return await self._client.signal(self.id, waitpoint, name, **options)

    def stream(
        self,
        attempt: int | Literal["latest"] = "latest",
        follow_attempts: bool = True,  # noqa: FBT001, FBT002 - given by name as a rule
        after: str = "0-0",
        visibility: Visibility = "all",
    ) -> Tail:
        """The handler's output as it comes, until the execution has ended.

        >>> async for frame in run.stream():
        ...     print(frame.payload.decode(), end="")
        """
        return self._client.tail(self.id, attempt, follow_attempts, after, visibility)

    def __repr__(self) -> str:
        return f"Run({self.id})"
