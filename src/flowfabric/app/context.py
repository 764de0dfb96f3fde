"""What a handler may know and do about its own run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Literal

from flowfabric.app.output import OutputStream, write_output
from flowfabric.app.waits import Waits
from flowfabric.core.conditions import Condition
from flowfabric.core.contracts.streams import FrameMode
from flowfabric.core.durations import Duration
from flowfabric.core.ids import ExecutionId
from flowfabric.sdk.task import ClaimedTask
from flowfabric.valkey.forks import generation

__all__ = ["Context"]


class Context:
    """The first parameter of a handler that asks for it.

    In a `def` handler the operations block the handler's thread; in an `async def` handler they
    are awaited.

    >>> @app.task()
    ... async def reindex(ctx: Context, name: str) -> int:
    ...     await ctx.progress(50, "half way")
    ...     return ctx.attempt
    """

    __slots__ = ("_born", "_loop", "_shutting_down", "_task", "_waits")

    def __init__(
        self,
        task: ClaimedTask,
        shutting_down: Callable[[], bool],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._task = task
        self._shutting_down = shutting_down
        self._loop = loop
        self._born = generation()
        self._waits: Waits | None = None

    @property
    def execution_id(self) -> ExecutionId:
        """The execution being run."""
        return self._task.execution_id

    @property
    def kind(self) -> str:
        """The task's name."""
        return self._task.execution_kind

    @property
    def attempt(self) -> int:
        """0 for the first attempt; a retry or a reclaim counts up, a resume does not."""
        return self._task.attempt_index

    @property
    def lease_epoch(self) -> int:
        """A number that only grows with every claim: hand it to external systems as a fence."""
        return self._task.lease_epoch

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags at claim time."""
        return self._task.tags

    @property
    def lease_healthy(self) -> bool:
        """Whether this run still owns the execution; look before an irreversible side effect."""
        return self._task.is_lease_healthy()

    @property
    def shutting_down(self) -> bool:
        """Whether the worker is about to stop: come to a good end soon."""
        return self._shutting_down()

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger with the ids of this run bound to every record."""
        return logging.LoggerAdapter(
            logging.getLogger(f"flowfabric.task.{self.kind}"),
            {"execution_id": str(self.execution_id), "attempt_index": self.attempt},
        )

    def progress(self, pct: int | None = None, message: str | None = None) -> Any:
        """Tell how far the run is; shown by `flowfabric show`."""
        return self._do(self._task.update_progress(pct, message))

    # --- waiting and output ---------------------------------------------------------------

    @property
    def waits(self) -> Waits:
        """The waits of this run."""
        if self._waits is None:
            self._waits = Waits(self._task)
        return self._waits

    def wait_for(
        self,
        name: str,
        signals: str | Collection[str] | None = None,
        timeout: Duration | None = None,
        on_timeout: Literal["raise", "default"] = "raise",
        default: Any = None,
        reason: str = "waiting_for_signal",
    ) -> Any:
        """Wait for an answer without holding the worker; returns the `Signal`.

        The handler ends here and starts again from its beginning when somebody answers; waits
        that were answered return at once. `signals` limits which names count. After `timeout`
        it raises `WaitTimeout`, or returns `default` with `on_timeout="default"`.

        >>> verdict = await ctx.wait_for("approval", timeout="24h")
        """
        return self._do(self.waits.wait_for(name, signals, timeout, on_timeout, default, reason))

    def wait_condition(
        self,
        condition: Condition,
        timeout: Duration | None = None,
        reason: str = "waiting_for_signal",
    ) -> Any:
        """Wait until a condition over several waitpoints is met; returns its signals.

        >>> both = AllOf((Single("legal", "approved"), Single("finance", "approved")))
        >>> await ctx.wait_condition(both, timeout="24h")
        """
        return self._do(self.waits.wait_condition(condition, timeout, reason))

    def waitpoint(self, name: str, expires_in: Duration | None = None) -> Any:
        """Id and token of the next `wait_for(name)`, to hand out before waiting."""
        return self._do(self.waits.waitpoint(name, expires_in))

    def stream(self, data: Any, frame_type: str = "delta", mode: FrameMode = "durable") -> Any:
        """Write output that anyone can follow live: bytes, text, or anything JSON can say.

        It is sent in the background, in order, and stored before the run ends or waits.

        >>> await ctx.stream(token)
        """
        return self._do(write_output(self._task, data, frame_type, mode))

    def open_stream(self, frame_type: str = "delta", mode: FrameMode = "durable") -> OutputStream:
        """Output of one mode: `summary` patches a document, `best_effort` may be dropped.

        >>> async with ctx.open_stream("progress", mode="summary") as summary:
        ...     await summary.write({"pages": 3})
        """
        return OutputStream(self._task, self._do, frame_type, mode)

    def signals(self) -> Any:
        """The signals that ended the last suspension of this attempt."""
        return self._do(self._task.resume_signals())

    def check(self) -> None:
        """Raise `LeaseLost` when another worker may have taken over."""
        if self._task.lease_lost is not None:
            raise self._task.lease_lost

    def _do(self, operation: Coroutine[Any, Any, Any]) -> Any:
        if generation() != self._born:
            operation.close()
            raise RuntimeError(
                "This process was forked inside a handler: only its parent can use the context."
            )
        if self._loop is None:
            return operation
        try:
            done = asyncio.run_coroutine_threadsafe(operation, self._loop)
        except RuntimeError:
            # The loop has ended, so the operation never begins.
            operation.close()
            raise
        return done.result()
