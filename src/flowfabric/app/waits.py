"""Waiting for people and services inside a handler."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, Literal, Required, Self, TypedDict, TypeVar

import msgspec

from flowfabric.app import codec
from flowfabric.core import conditions
from flowfabric.core.annotations import annotation
from flowfabric.core.conditions import Condition
from flowfabric.core.contracts import suspension
from flowfabric.core.contracts.suspension import PastWait, PendingWaitpoint, ResumeSignal
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import FlowFabricError, invalid_input
from flowfabric.core.ids import new_uuid
from flowfabric.sdk.task import ClaimedTask, Parked

_WAITPOINT_LIFE_MS = 7 * 86_400_000

V = TypeVar("V")
Limit = Duration | None
Names = str | Collection[str] | None


class WaitOptions(TypedDict, total=False):
    """What a wait shows to people. It does not affect what ends the wait."""

    prompt: str | None
    """What is asked, at most 1,024 bytes; `flowfabric waiting` shows it."""
    details: Any
    """What the question is about: any value that JSON can represent, at most 8 KiB."""
    reason: str


class OrRaise(WaitOptions, total=False):
    """Options of a wait that raises `WaitTimeout`."""

    on_timeout: Literal["raise"]


class OrNone(WaitOptions, total=False):
    """Options of a wait that returns None after its timeout."""

    on_timeout: Required[Literal["default"]]
    default: None


class Or(WaitOptions, Generic[V], total=False):
    """Options of a wait that returns a default after its timeout."""

    on_timeout: Required[Literal["default"]]
    default: Required[V]


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a wait. `payload` is decoded if it is JSON; otherwise it is the raw bytes.

    `source_identity` is trustworthy only if `source_type` is "operator". Otherwise it is what the
    sender said.
    """

    name: str
    payload: Any = None
    source_identity: str = ""
    source_type: str
    signal_id: str = ""
    waitpoint: str = ""
    """The name passed to `wait_for`."""

    def payload_as(self, kind: type[V]) -> V:
        """The payload as this type: a dataclass, a model, a datetime, …

        Raises `PayloadMismatch` if it does not fit; left to itself, that fails the execution.

        >>> order = (await ctx.wait_for("order")).payload_as(Order)
        """
        return annotation(kind).fit(self.payload, f"the payload of {self.name!r}")

    @classmethod
    def of(cls, signal: ResumeSignal, waitpoint: str) -> Self:
        """The handler's view of a delivered signal."""
        try:
            payload = codec.decode(signal.payload, signal.payload_encoding)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Delivery checks JSON payloads. A bad one that got through must not fail the handler.
            payload = signal.payload
        return cls(
            name=signal.signal_name,
            payload=payload,
            source_identity=signal.source_identity,
            source_type=signal.source_type,
            signal_id=signal.signal_id,
            waitpoint=waitpoint,
        )


class WaitTimeout(FlowFabricError, TimeoutError):
    """Nobody answered a wait in time."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"nobody answered {self.name!r} in time"


class Waits:
    """The waits of one handler, found by name: a restarted handler passes those that were answered
    and stops at the next.

    Answers stay valid through every resume, retry and reclaim, until the execution ends or is
    replayed.
    """

    def __init__(self, task: ClaimedTask) -> None:
        self._task = task
        self._taken: set[str] = set()
        self._pending: dict[str, PendingWaitpoint] = {}
        self._past: list[PastWait] | None = None
        self._turn = asyncio.Lock()

    def _key(self, name: str) -> str:
        """The name, with a number if it was used before, so that each use has its own answer."""
        key, count = name, 1
        while key in self._taken:
            count += 1
            key = f"{name}#{count}"
        return key

    async def waitpoint(
        self, name: str, expires_in: Limit, prompt: str | None, details: Any
    ) -> PendingWaitpoint:
        """Id and token to hand out before the next `wait_for(name)`.

        A restarted handler gets the same ones. A new attempt gets new ones and closes the old
        waitpoint, unless that was answered.
        """
        key = self._key(name)
        life = _WAITPOINT_LIFE_MS if expires_in is None else to_ms(expires_in, "expires_in")
        async with self._turn:
            if key not in self._pending:
                for wait in await self._past_waits([key]):
                    if wait.ended or self._usable(wait) or wait.signal_ids:
                        self._pending[key] = _pending(wait)
                        break
                else:
                    self._pending[key] = await self._task.create_pending_waitpoint(
                        key, life, **_question(prompt, details)
                    )
        return self._pending[key]

    def _usable(self, wait: PastWait) -> bool:
        """Whether this attempt can still suspend on it."""
        return wait.state == "pending" and wait.attempt_index == self._task.attempt_index

    async def wait_for(
        self, name: str, signals: Names, timeout: Limit, options: WaitOptions
    ) -> list[Signal]:
        """`wait` for one of these signals, or for any."""
        if signals is not None and not isinstance(signals, str):
            names = tuple(sorted(signals))
            signals = names[0] if len(names) == 1 else names or None
        return await self.wait(conditions.Single(name, signals), timeout, options)

    async def wait(self, given: Condition, timeout: Limit, options: WaitOptions) -> list[Signal]:
        """Release the worker until the condition is met; returns the signals when the handler
        runs again. Raises `WaitTimeout` after the timeout, unless it was a `TimeoutOnly` wait.
        """
        # Every wait needs a waitpoint, even if its condition names none.
        names = conditions.referenced_waitpoint_keys(given) or ["condition"]
        keys = {name: self._key(name) for name in names}
        self._taken.update(keys.values())
        condition = _renamed(given, keys)
        async with self._turn:
            if self._task.finished_by == "suspend":
                # Another wait of the same handler suspended it in the meantime.
                raise Parked
            ended = await self._answered(condition, keys)
            if ended is None:
                ended = await self._suspend(condition, keys.values(), timeout, options)
        name_of = {key: name for name, key in keys.items()}
        return [Signal.of(signal, name_of[signal.waitpoint_key]) for signal in ended]

    async def _answered(
        self, condition: Condition, keys: Mapping[str, str]
    ) -> list[ResumeSignal] | None:
        """The signals that already ended this wait; None if it is still open."""
        past = await self._past_waits(keys.values())
        ended = [wait for wait in past if wait.ended]
        if not ended:
            # An earlier attempt may have handed out a waitpoint that was answered before its wait.
            past = [wait for wait in past if not self._usable(wait)]
            return await self._received(condition, past) or None
        if not any(wait.timed_out for wait in ended):
            return await self._received(condition, ended)
        if isinstance(condition, conditions.TimeoutOnly):
            return []
        raise WaitTimeout(", ".join(keys))

    async def _received(self, condition: Condition, past: Sequence[PastWait]) -> list[ResumeSignal]:
        """The received signals if they meet the condition; otherwise empty."""
        found = await asyncio.gather(*(self._task.wait_signals(wait) for wait in past))
        signals = {signal.signal_id: signal for some in found for signal in some}
        accepted = sorted(signals.values(), key=lambda signal: signal.accepted_at)
        return conditions.contributors(condition, accepted)

    async def _past_waits(self, keys: Collection[str]) -> list[PastWait]:
        """The earlier waits under these keys, the latest first."""
        if self._task.attempt_index == 0 and self._task.handle.kind == "fresh":
            return []
        if self._past is None:
            past = await self._task.past_waits(*keys)
            current = self._task.attempt_index
            stale = [w for w in past if w.state == "pending" and w.attempt_index < current]
            for wait in stale:
                # Close them first, so that the second read sees every answer.
                await self._task.close_waitpoint(wait.waitpoint_id, "attempt_ended")
            if stale:
                past = await self._task.past_waits(*keys)
            self._past = sorted(past, key=lambda wait: wait.closed_at, reverse=True)
        return [wait for wait in self._past if wait.waitpoint_key in keys]

    async def _suspend(
        self, condition: Condition, keys: Collection[str], timeout: Limit, given: WaitOptions
    ) -> list[ResumeSignal]:
        options = _question(given.get("prompt"), given.get("details"))
        options["reason_code"] = given.get("reason", "waiting_for_signal")
        if timeout is not None:
            now = await self._task.backend.meta.server_time_ms()
            options["timeout_at"] = now + to_ms(timeout, "timeout")
            # The handler decides what a timeout means.
            options["timeout_behavior"] = "auto_resume"
        pending = await self._pending_of(keys)
        if pending is not None:
            outcome = await self._task.try_suspend_on_pending(pending, condition, **options)
        else:
            fresh = [suspension.FreshWaitpoint(new_uuid(), key) for key in keys]
            outcome = await self._task.try_suspend(condition, waitpoints=fresh, **options)
        if isinstance(outcome, suspension.AlreadySatisfiedSuspension):
            return await self._task.resume_signals()
        raise Parked

    async def _pending_of(self, keys: Collection[str]) -> PendingWaitpoint | None:
        """The waitpoint that was handed out for one of the keys, now or at an earlier start."""
        for wait in await self._past_waits(keys):
            if self._usable(wait):
                self._pending.setdefault(wait.waitpoint_key, _pending(wait))
        found = [self._pending[key] for key in keys if key in self._pending]
        if found and len(keys) > 1:
            key = found[0].waitpoint_key
            problem = f"{key!r} was handed out, so it cannot be combined with others"
            raise invalid_input("condition", problem)
        return found[0] if found else None


def _renamed(condition: Condition, keys: Mapping[str, str]) -> Condition:
    """The condition with keys for names."""
    match condition:
        case conditions.Single():
            return conditions.Single(keys[condition.waitpoint_key], condition.signal_name)
        case conditions.Count():
            renamed = tuple(keys[key] for key in condition.waitpoints)
            return msgspec.structs.replace(condition, waitpoints=renamed)
        case conditions.AllOf():
            return conditions.AllOf(tuple(_renamed(member, keys) for member in condition.members))
        case _:
            return condition


def _question(prompt: str | None, details: Any) -> dict[str, Any]:
    """The question in the engine's form."""
    if details is not None:
        details = msgspec.Raw(codec.encode(details, "details")[0])
    return {"prompt": prompt, "details": details}


def _pending(wait: PastWait) -> PendingWaitpoint:
    return PendingWaitpoint(wait.waitpoint_id, wait.waitpoint_key, wait.waitpoint_token)
