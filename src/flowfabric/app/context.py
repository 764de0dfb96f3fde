"""What a handler knows and can do about its own run, and the output it writes."""

import logging
import typing
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import msgspec

from flowfabric.app import codec
from flowfabric.app.budgets import BudgetHold, SyncBudgetHold, UsageReport
from flowfabric.app.inputs import Inputs
from flowfabric.app.waits import (
    Limit,
    Names,
    Or,
    OrNone,
    OrRaise,
    Signal,
    WaitOptions,
    Waits,
    WaitTimeout,
)
from flowfabric.core.conditions import Condition
from flowfabric.core.contracts.budgets import UsageOutcome
from flowfabric.core.contracts.streams import Frame, FrameMode
from flowfabric.core.contracts.suspension import PendingWaitpoint
from flowfabric.core.forks import generation
from flowfabric.core.ids import ExecutionId
from flowfabric.sdk.blocking import SyncTwin, blocking
from flowfabric.sdk.loop_thread import LoopCaller, refuse_after_fork
from flowfabric.sdk.runtime import WorkerRuntime
from flowfabric.sdk.task import ClaimedTask

if typing.TYPE_CHECKING:
    from flowfabric.app.children import Children, SyncChildren

V = TypeVar("V")

_FRAME_BYTES = 65_536
_NUMBER_BYTES = 64
"""Space to leave for a part's metadata, which counts towards the frame size."""
_CONTINUES = 0b1000_0000
_CONTINUES_MASK = 0b1100_0000


class _TaskLog(logging.LoggerAdapter[logging.Logger]):
    """Adds its own fields to those of each call; the base class would replace them."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs


class HandlerInfo:
    """What a handler knows about its run. `Context` and `SyncContext` add what it can do."""

    __slots__ = ()

    _task: ClaimedTask
    _runtime: WorkerRuntime

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
        """The number of this attempt, from 1. A retry or a reclaim adds one, a resume does not."""
        return self._task.attempt_index + 1

    @property
    def lease_epoch(self) -> int:
        """Grows with every claim: pass it to external systems as a fencing token."""
        return self._task.lease_epoch

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags at claim time."""
        return self._task.tags

    @property
    def flow_id(self) -> str | None:
        """The id of the flow that this execution belongs to, or None."""
        return self._task.claim.flow_id

    @property
    def inputs(self) -> Inputs:
        """The results of other nodes that were passed to this one, by parameter name.

        >>> ctx.inputs.get("photo", Photo)
        """
        return Inputs(self._task.claim.inputs)

    @property
    def lease_healthy(self) -> bool:
        """Whether this run still owns the execution. Check it before an irreversible effect."""
        return self._task.is_lease_healthy()

    @property
    def shutting_down(self) -> bool:
        """Whether the worker is stopping: finish soon or save your progress."""
        return self._runtime.shutting_down

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that adds the task and the ids of this run to every record."""
        return _TaskLog(logging.getLogger(f"flowfabric.task.{self.kind}"), self._task.log_fields)

    def check(self) -> None:
        """Raise `LeaseLost` if another worker may have taken over."""
        if self._task.lease_lost is not None:
            raise self._task.lease_lost


async def _write(task: ClaimedTask, data: Any, frame_type: str, mode: FrameMode) -> None:
    """Write bytes, text or any value that JSON can represent. Large data takes several frames.

    Such frames carry `{"part": 1, "of": 3}` as metadata. Waits only while much output is unsent.
    """
    if isinstance(data, bytes):
        raw, encoding = data, "binary"
    elif isinstance(data, str):
        raw, encoding = data.encode(errors="replace"), "utf8"
    else:
        raw, encoding = codec.encode(data, "data")[0], codec.JSON
    if len(raw) <= _FRAME_BYTES or mode == "summary":
        frame = Frame(payload=raw, frame_type=frame_type, encoding=encoding)
        await task.write_frame(frame, mode=mode)
        return
    parts = list(_parts(raw, whole_characters=encoding != "binary"))
    for number, part in enumerate(parts, 1):
        about = msgspec.json.encode({"part": number, "of": len(parts)}).decode()
        frame = Frame(payload=part, frame_type=frame_type, encoding=encoding, metadata_json=about)
        await task.write_frame(frame, mode=mode)


def _parts(raw: bytes, *, whole_characters: bool) -> Iterator[bytes]:
    """Pieces that fit a frame; text is cut between characters."""
    start = 0
    while start < len(raw):
        end = start + _FRAME_BYTES - _NUMBER_BYTES
        while whole_characters and end < len(raw) and raw[end] & _CONTINUES_MASK == _CONTINUES:
            end -= 1
        yield raw[start:end]
        start = end


class OutputStream:
    """Output of one mode and type; leaving the block waits until it is stored.

    If the block raises, the output is stored at the end of the run instead.
    """

    def __init__(self, task: ClaimedTask, frame_type: str, mode: FrameMode) -> None:
        self._task = task
        self._frame_type = frame_type
        self._mode: FrameMode = mode
        self._generation = generation()

    async def write(self, data: Any) -> None:
        """Add bytes, text, or any value that JSON can represent."""
        refuse_after_fork(self._generation)
        await _write(self._task, data, self._frame_type, self._mode)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._task.flush_output()


class SyncOutputStream(SyncTwin[OutputStream]):
    """`OutputStream` without `await`, for `def` handlers."""

    write = blocking(OutputStream.write)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._call(lambda stream: stream.__aexit__(kind))


class Context(HandlerInfo):
    """The context of an `async def` handler that annotates its first parameter with it.

    >>> @app.task
    ... async def reindex(ctx: Context, name: str) -> int:
    ...     await ctx.progress(50, "half way")
    ...     return ctx.attempt
    """

    __slots__ = ("_generation", "_reports", "_runtime", "_task", "_waits")

    def __init__(self, task: ClaimedTask, runtime: WorkerRuntime) -> None:
        self._task = task
        self._runtime = runtime
        self._generation = generation()
        self._waits: Waits | None = None
        self._reports: dict[str, int] = {}

    def _claimed(self) -> ClaimedTask:
        refuse_after_fork(self._generation)
        return self._task

    async def progress(self, pct: int | None = None, message: str | None = None) -> None:
        """Report progress; `flowfabric show` displays it."""
        await self._claimed().update_progress(pct, message)

    def _own_waits(self) -> Waits:
        task = self._claimed()
        if self._waits is None:
            self._waits = Waits(task)
        return self._waits

    @overload
    async def wait_for(
        self, name: str, signals: Names = None, timeout: Limit = None, **otherwise: Unpack[OrRaise]
    ) -> Signal: ...

    @overload
    async def wait_for(
        self, name: str, signals: Names = None, timeout: Limit = None, **otherwise: Unpack[OrNone]
    ) -> Signal | None: ...

    @overload
    async def wait_for(
        self, name: str, signals: Names = None, timeout: Limit = None, **otherwise: Unpack[Or[V]]
    ) -> Signal | V: ...

    async def wait_for(
        self,
        name: str,
        signals: Names = None,
        timeout: Limit = None,
        *,
        on_timeout: Literal["raise", "default"] = "raise",
        default: Any = None,
        prompt: str | None = None,
        details: Any = None,
        reason: str = "waiting_for_signal",
    ) -> Any:
        """Wait for an answer without holding the worker; returns the `Signal`.

        The handler stops here. When a signal arrives it starts again from its beginning, and
        waits that were answered return at once. `signals` limits which names count. After
        `timeout` it raises `WaitTimeout`, or returns `default` with `on_timeout="default"`.
        `prompt` and `details` describe the question to people.

        >>> verdict = await ctx.wait_for("approval", prompt="Deploy v2?", timeout="24h")
        """
        try:
            asked = WaitOptions(prompt=prompt, details=details, reason=reason)
            received = await self._own_waits().wait_for(name, signals, timeout, asked)
        except WaitTimeout:
            if on_timeout == "default":
                return default
            raise
        if received:
            return received[0]
        # An operator resumed the execution without a signal.
        return Signal(name="resumed", source_type="operator", waitpoint=name)

    async def wait_condition(
        self,
        condition: Condition,
        timeout: Limit = None,
        *,
        prompt: str | None = None,
        details: Any = None,
        reason: str = "waiting_for_signal",
    ) -> list[Signal]:
        """Wait until a condition over several waitpoints is met; returns its signals.

        The list is empty if an operator resumed the execution by hand.

        >>> both = AllOf((Single("legal", "approved"), Single("finance", "approved")))
        >>> await ctx.wait_condition(both, timeout="24h")
        """
        asked = WaitOptions(prompt=prompt, details=details, reason=reason)
        return await self._own_waits().wait(condition, timeout, asked)

    async def waitpoint(
        self,
        name: str,
        expires_in: Limit = None,
        *,
        prompt: str | None = None,
        details: Any = None,
    ) -> PendingWaitpoint:
        """Id and token of the next `wait_for(name)`, to hand out before waiting."""
        return await self._own_waits().waitpoint(name, expires_in, prompt, details)

    def usage(self, budget: str, *, dedup_key: str | None = None, **amounts: int) -> UsageReport:
        """Count what this task spent. Await it, or use it as a block to also count `wall_ms`.

        If a hard limit does not allow it, `on_hard_limit` of the budget decides: the call raises
        `BudgetExceeded`, which fails the execution; or it suspends the execution until an operator
        resumes it; or it returns the breach. If a handler starts again in the same attempt, a call
        that it repeats with the same amounts is counted once.

        >>> await ctx.usage("team", tokens=812)
        >>> async with ctx.usage("team", calls=1) as usage:
        ...     answer = await ask_model(prompt)
        ...     usage.add(tokens=answer.tokens)
        """
        task, number = self._claimed(), self._reports.get(budget, 0)
        if dedup_key is None:
            number = self._reports[budget] = number + 1
        return UsageReport(task, budget, amounts, dedup_key, number)

    def reserve(self, budget: str, **amounts: int) -> BudgetHold:
        """Hold a part of a budget during a block, so that parallel tasks never overspend.

        Raises `BudgetExceeded` or suspends the execution if the hold does not fit. If the worker
        crashes, the hold is released.

        >>> async with ctx.reserve("team", tokens=1000) as hold:
        ...     answer = await ask_model(prompt, max_tokens=1000)
        ...     await hold.settle(tokens=answer.tokens)
        """
        return BudgetHold(self._claimed(), budget, amounts)

    def spawn(self) -> "Children":
        """Add nodes to this execution's flow and wait for their results.

        >>> children = ctx.spawn()
        >>> children.map(resize, [100, 300, 900], photo)
        >>> results = await children.results()
        """
        from flowfabric.app.children import Children  # noqa: PLC0415 - tasks need contexts

        return Children(self._claimed())

    async def signals(self) -> list[Signal]:
        """The signals that ended the last suspension of this attempt."""
        received = await self._claimed().resume_signals()
        return [Signal.of(signal, signal.waitpoint_key) for signal in received]

    async def stream(
        self, data: Any, frame_type: str = "delta", mode: FrameMode = "durable"
    ) -> None:
        """Write output that others can follow live: bytes, text, or any value JSON can represent.

        It is sent in the background, in order, and stored before the run ends or waits.

        >>> await ctx.stream(token)
        """
        await _write(self._claimed(), data, frame_type, mode)

    def open_stream(self, frame_type: str = "delta", mode: FrameMode = "durable") -> OutputStream:
        """Output of one mode: `summary` patches a document, `best_effort` may be dropped.

        >>> async with ctx.open_stream("progress", mode="summary") as summary:
        ...     await summary.write({"pages": 3})
        """
        return OutputStream(self._claimed(), frame_type, mode)


class SyncContext(SyncTwin[Context], HandlerInfo):
    """`Context` without `await`, for a `def` handler that annotates its first parameter with it.

    Its operations block the handler's thread.

    >>> @app.task
    ... def reindex(ctx: SyncContext, name: str) -> int:
    ...     ctx.progress(50, "half way")
    ...     return ctx.attempt
    """

    __slots__ = ("_runtime", "_task")

    def __init__(self, task: ClaimedTask, runtime: WorkerRuntime, caller: LoopCaller) -> None:
        super().__init__(Context(task, runtime), caller)
        self._task = task
        self._runtime = runtime

    def spawn(self) -> "SyncChildren":
        """Add nodes to this execution's flow and wait for their results; see `Context.spawn`."""
        from flowfabric.app.children import SyncChildren  # noqa: PLC0415 - tasks need contexts

        return SyncChildren(self._target.spawn(), self._caller)

    def usage(self, budget: str, *, dedup_key: str | None = None, **amounts: int) -> UsageOutcome:
        """Count what this task spent, as awaiting `Context.usage` does."""

        async def report(context: Context) -> UsageOutcome:
            return await context.usage(budget, dedup_key=dedup_key, **amounts)

        return self._call(report)

    progress = blocking(Context.progress)
    reserve = blocking(Context.reserve, SyncBudgetHold)
    wait_condition = blocking(Context.wait_condition)
    waitpoint = blocking(Context.waitpoint)
    signals = blocking(Context.signals)
    stream = blocking(Context.stream)
    open_stream = blocking(Context.open_stream, SyncOutputStream)

    @overload
    def wait_for(
        self, name: str, signals: Names = None, timeout: Limit = None, **otherwise: Unpack[OrRaise]
    ) -> Signal: ...

    @overload
    def wait_for(
        self, name: str, signals: Names = None, timeout: Limit = None, **otherwise: Unpack[OrNone]
    ) -> Signal | None: ...

    @overload
    def wait_for(
        self, name: str, signals: Names = None, timeout: Limit = None, **otherwise: Unpack[Or[V]]
    ) -> Signal | V: ...

    def wait_for(self, *args: Any, **options: Any) -> Any:
        """Wait for an answer, as `Context.wait_for` does; returns the `Signal`."""
        return self._call(lambda context: context.wait_for(*args, **options))
