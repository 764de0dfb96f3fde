"""Contexts without an engine: call a handler in a test, and check what it did."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from flowfabric.app import codec
from flowfabric.app.context import Context, SyncContext
from flowfabric.app.waits import Limit, Signal, WaitOptions, Waits, WaitTimeout
from flowfabric.core import conditions
from flowfabric.core.conditions import AcceptedSignal, Condition
from flowfabric.core.contracts.budgets import Reserved, UsageOk, UsageOutcome
from flowfabric.core.contracts.flows import FlowInput, FlowInputs, GraphNode, Spawned
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.contracts.suspension import PendingWaitpoint
from flowfabric.core.errors import LeaseLost
from flowfabric.core.ids import ExecutionId, WaitpointToken, new_uuid
from flowfabric.core.partition import PartitionCounts
from flowfabric.sdk.runtime import WorkerRuntime
from flowfabric.sdk.task import ClaimedTask

T = TypeVar("T")

Answer = str | Signal | None
"""A signal, or only its name. With None, the wait times out."""
Answers = Mapping[str, Answer | Sequence[Answer]]
"""Answers by the name of the wait; a list answers several waits, or one wait several times."""


class UnansweredWait(AssertionError):
    """The handler waits for something that `answers` does not contain."""


class ProgressReport(NamedTuple):
    """One call of `ctx.progress`."""

    pct: int | None
    message: str | None


class BudgetSpend(NamedTuple):
    """Usage that a handler reported to a budget or settled from a hold."""

    budget: str
    amounts: Mapping[str, int]


class Recorder:
    """What a handler did with its context."""

    def __init__(self) -> None:
        self.reports: list[ProgressReport] = []
        """Its calls of `ctx.progress`, in order."""
        self.frames: list[Frame] = []
        """The output it wrote, in order."""
        self.waits: list[str] = []
        """The names it waited for, in order."""
        self.prompts: list[str] = []
        """What it asked people, in order."""
        self.spawned: list[str] = []
        """The keys of the children that it waited for, in order."""
        self.spent: list[BudgetSpend] = []
        """What it reported or settled, in order."""

    @property
    def output(self) -> str:
        """All output as one text."""
        return b"".join(frame.payload for frame in self.frames).decode(errors="replace")


class FakeContext(Recorder, Context):
    """A context for `async def` handlers that records what they do and answers their waits.

    `inputs` are the results of other nodes for `ctx.inputs`; None means that the node failed.
    `children` are the results of the children that the handler waits for, by key.

    >>> ctx = FakeContext({"approval": "approved"}, tags={"team": "web"})
    >>> assert await deploy(ctx, "1.2") == "deployed"
    >>> assert ctx.waits == ["approval"]
    """

    def __init__(
        self,
        answers: Answers | None = None,
        *,
        tags: Mapping[str, str] | None = None,
        attempt: int = 1,
        inputs: Mapping[str, Any] | None = None,
        children: Mapping[str, Any] | None = None,
    ) -> None:
        Recorder.__init__(self)
        flow = None if inputs is None and children is None else _FakeFlow(self, children or {})
        given = FlowInputs({name: _passed(value) for name, value in (inputs or {}).items()})
        claim = _FakeClaim(None if flow is None else flow.id, given)
        task = cast("ClaimedTask", _FakeTask(self, tags or {}, attempt, claim, flow))
        Context.__init__(self, task, cast("WorkerRuntime", _FakeRuntime))
        self._waits = self._fake_waits = _FakeWaits(task, self, answers or {})

    async def signals(self) -> list[Signal]:
        """The signals that ended the last wait."""
        return self._fake_waits.last


class FakeSyncContext(Recorder, SyncContext):
    """A context for `def` handlers that records what they do and answers their waits.

    >>> ctx = FakeSyncContext()
    >>> assert reindex(ctx, "books") == 3
    >>> assert ctx.reports[-1].pct == 100
    """

    def __init__(
        self,
        answers: Answers | None = None,
        *,
        tags: Mapping[str, str] | None = None,
        attempt: int = 1,
        inputs: Mapping[str, Any] | None = None,
        children: Mapping[str, Any] | None = None,
    ) -> None:
        fake = FakeContext(answers, tags=tags, attempt=attempt, inputs=inputs, children=children)
        self.reports, self.frames, self.spawned = fake.reports, fake.frames, fake.spawned
        self.waits, self.prompts, self.spent = fake.waits, fake.prompts, fake.spent
        super(SyncContext, self).__init__(fake, _Inline())
        self._task, self._runtime = fake._task, fake._runtime  # noqa: SLF001


class _FakeRuntime:
    shutting_down = False


class _FakeTask:
    """The part of a claimed task that contexts use."""

    lease_lost: LeaseLost | None = None
    lease_epoch = 1
    execution_kind = "task"

    def __init__(
        self,
        recorder: Recorder,
        tags: Mapping[str, str],
        attempt: int,
        claim: "_FakeClaim",
        flow: "_FakeFlow | None",
    ) -> None:
        self._recorder = recorder
        self.tags = tags
        self.attempt_index = attempt - 1
        self.execution_id = ExecutionId.solo("default", PartitionCounts())
        self.claim = claim
        self.backend = flow
        self.attempt_id = new_uuid()
        self._held: dict[str, Mapping[str, int]] = {}

    async def spawn_children(self, nodes: Sequence[GraphNode], *_: object, **__: object) -> Spawned:
        flow = cast("_FakeFlow", self.backend)
        return flow.spawn([(node.key, node.key.rpartition("_")[0]) for node in nodes])

    @property
    def log_fields(self) -> dict[str, object]:
        return {"execution_id": str(self.execution_id), "attempt_index": self.attempt_index}

    def is_lease_healthy(self) -> bool:
        return True

    async def report_usage(
        self, budget: str, usage: Mapping[str, int], *_: object, **__: object
    ) -> UsageOutcome:
        self._recorder.spent.append(BudgetSpend(budget, dict(usage)))
        return UsageOk()

    async def reserve(
        self, _budget: str, amounts: Mapping[str, int], reservation_id: str, **_: object
    ) -> Reserved:
        self._held[reservation_id] = amounts
        return Reserved(reservation_id, amounts)

    async def settle(
        self, budget: str, reservation_id: str, actual: Mapping[str, int] | None
    ) -> UsageOutcome:
        spent = {**self._held.pop(reservation_id), **(actual or {})}
        return await self.report_usage(budget, spent)

    async def release_reservation(self, _budget: str, reservation_id: str) -> None:
        del self._held[reservation_id]

    async def enforce(self, *_: object) -> None:
        """Do nothing: there are no limits here."""

    async def update_progress(self, pct: int | None, message: str | None) -> None:
        self._recorder.reports.append(ProgressReport(pct, message))

    async def write_frame(self, frame: Frame, **_: object) -> None:
        self._recorder.frames.append(frame)

    async def flush_output(self) -> None:
        """Do nothing: output is not buffered here."""


class _FakeClaim(NamedTuple):
    flow_id: str | None
    inputs: FlowInputs


class _FakeFlow:
    """The part of a flow that children need."""

    def __init__(self, recorder: Recorder, results: Mapping[str, Any]) -> None:
        self.id = new_uuid()
        self.flows = self
        self._recorder = recorder
        self._results = results
        self._given: dict[str, FlowInput] = {}

    def spawn(self, children: Sequence[tuple[str, str]]) -> Spawned:
        for key, name in children:
            self._recorder.spawned.append(name)
            if name not in self._results:
                problem = f"The handler waits for the child {name!r}; add its result to children=."
                raise UnansweredWait(problem)
            self._given[key] = _successful(self._results[name])
        return Spawned(0, {})

    async def get_inputs(self, _: ExecutionId) -> FlowInputs:
        return FlowInputs(self._given)


def _passed(value: Any) -> FlowInput:
    """The input from a node with this result."""
    done = _successful(value)
    return FlowInput(done.execution_id, "failed", None) if value is None else done


def _successful(value: Any) -> FlowInput:
    execution_id = ExecutionId.solo("default", PartitionCounts())
    return FlowInput(execution_id, "success", *codec.encode(value))


class _FakeWaits(Waits):
    """Answers waits from a mapping."""

    def __init__(self, task: ClaimedTask, recorder: Recorder, answers: Answers) -> None:
        super().__init__(task)
        self._recorder = recorder
        self._answers = {name: _listed(answer) for name, answer in answers.items()}
        self.last: list[Signal] = []

    async def waitpoint(
        self, name: str, expires_in: Limit, prompt: str | None, details: Any
    ) -> PendingWaitpoint:
        del expires_in, details
        self._note_prompt(prompt)
        return PendingWaitpoint(new_uuid(), name, WaitpointToken("fake:token"))

    async def wait(self, given: Condition, timeout: Limit, options: WaitOptions) -> list[Signal]:
        del timeout
        names = conditions.referenced_waitpoint_keys(given)
        self._recorder.waits += names
        self._note_prompt(options.get("prompt"))
        self.last = self._answer_to(given, names) if names else []
        return self.last

    def _note_prompt(self, prompt: str | None) -> None:
        if prompt is not None:
            self._recorder.prompts.append(prompt)

    def _answer_to(self, condition: Condition, names: list[str]) -> list[Signal]:
        accepted: list[AcceptedSignal] = []
        signals: dict[str, Signal] = {}
        while any(self._answers.get(name) for name in names):
            for name in names:
                if not self._answers.get(name):
                    continue
                answer = self._answers[name].pop(0)
                if answer is None:
                    raise WaitTimeout(", ".join(names))
                accepted.append(_accepted(answer, name))
                signals[accepted[-1].signal_id] = answer
                if met := conditions.contributors(condition, accepted):
                    return [signals[each.signal_id] for each in met]
        got = [f"{each.signal_name!r}" for each in accepted]
        raise UnansweredWait(
            f"The handler waits for {', '.join(map(repr, names))}, and answers= has "
            + (f"only {', '.join(got)}, which does not end the wait." if got else "none.")
            + f' Pass answers={{{names[0]!r}: "approved"}}, or None to let it time out.'
        )


def _listed(answer: Answer | Sequence[Answer]) -> list[Signal | None]:
    several = [answer] if answer is None or isinstance(answer, str | Signal) else answer
    return [
        Signal(name=each, source_type="test") if isinstance(each, str) else each for each in several
    ]


def _accepted(signal: Signal, waitpoint: str) -> AcceptedSignal:
    return AcceptedSignal(
        signal_id=signal.signal_id or new_uuid(),
        signal_name=signal.name,
        waitpoint_key=waitpoint,
        source_type=signal.source_type,
        source_identity=signal.source_identity,
    )


class _Inline:
    """Runs the operations of a fake context, none of which waits."""

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        operation = make()
        try:
            operation.send(None)
        except StopIteration as done:
            return cast("T", done.value)
        operation.close()
        raise RuntimeError("This operation needs an event loop.")
