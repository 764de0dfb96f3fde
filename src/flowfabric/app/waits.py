"""Waiting for people and services inside a handler."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from flowfabric.app import codec
from flowfabric.core.conditions import (
    AllOf,
    Condition,
    Count,
    Seen,
    SignalName,
    Single,
    TimeoutOnly,
    contributors,
    referenced_waitpoint_keys,
)
from flowfabric.core.contracts.suspension import (
    AlreadySatisfiedSuspension,
    FreshWaitpoint,
    PastWait,
    PendingWaitpoint,
    ResumeSignal,
)
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import FlowFabricError, invalid_input
from flowfabric.core.ids import new_uuid
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.task_waits import Parked

_WAITPOINT_LIFE_MS = 7 * 86_400_000
_NAMELESS = "condition"
"""The key of a condition that names no waitpoint."""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a wait. `payload` is decoded if it is JSON; otherwise it is the raw bytes.

    `source_identity` is trustworthy only if `source_type` is "operator". Otherwise it is what the
    sender said.
    """

    name: str
    payload: Any
    source_identity: str
    source_type: str
    signal_id: str
    waitpoint: str = ""
    """The name it was waited for under."""

    @classmethod
    def of(cls, signal: ResumeSignal, waitpoint: str) -> Signal:
        """The handler's view of a delivered signal."""
        try:
            payload = codec.decode(signal.payload, signal.payload_encoding)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Delivery checks what is labelled JSON. If this still fails, the signal is bad: that
            # must not fail the handler.
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


class _TimedOut:
    """The wait was ended by its timeout."""


class Waits:
    """The waits of one run of a handler. Answers are found by name, so a handler that is
    started again after a wait passes the waits that were answered and stops at the next.

    A run lasts from the submission, or a replay, to the end: resumes, retries and reclaims
    belong to it.
    """

    def __init__(self, task: ClaimedTask) -> None:
        self._task = task
        self._taken: set[str] = set()
        self._pending: dict[str, PendingWaitpoint] = {}
        self._past: list[PastWait] | None = None
        self._turn = asyncio.Lock()

    def _key(self, name: str) -> str:
        """A name used again in one run gets a number, so that each use has its own answer."""
        key, count = name, 1
        while key in self._taken:
            count += 1
            key = f"{name}#{count}"
        return key

    # --- handing out ----------------------------------------------------------------------

    async def waitpoint(self, name: str, expires_in: Duration | None = None) -> PendingWaitpoint:
        """Id and token to hand out before the next `wait_for(name)`.

        A handler that starts again gets the same one again, unless it is a new attempt and
        nobody has answered the old one: that one is closed then.
        """
        key = self._key(name)
        async with self._turn:
            if key not in self._pending:
                self._pending[key] = await self._handed_out(key) or await self._create(
                    key, expires_in
                )
        return self._pending[key]

    async def _create(self, key: str, expires_in: Duration | None) -> PendingWaitpoint:
        life = _WAITPOINT_LIFE_MS if expires_in is None else to_ms(expires_in, "expires_in")
        return await self._task.create_pending_waitpoint(key, life)

    async def _handed_out(self, key: str) -> PendingWaitpoint | None:
        """The waitpoint of an earlier start of this handler that still counts."""
        for wait in await self._of([key]):
            if wait.ended or self._usable(wait) or wait.signal_ids:
                return PendingWaitpoint(wait.waitpoint_id, wait.waitpoint_key, wait.waitpoint_token)
        return None

    def _usable(self, wait: PastWait) -> bool:
        """Whether this attempt can still park on it."""
        return wait.state == "pending" and wait.attempt_index == self._task.attempt_index

    # --- waiting --------------------------------------------------------------------------

    async def wait_for(
        self,
        name: str,
        signals: str | Collection[str] | None = None,
        timeout: Duration | None = None,
        on_timeout: Literal["raise", "default"] = "raise",
        default: Any = None,
        reason: str = "waiting_for_signal",
    ) -> Any:
        """Give the worker back until a signal comes; returns it when the handler runs again."""
        ended = await self._wait(Single(name, _wanted(signals)), timeout, reason)
        if isinstance(ended, _TimedOut):
            if on_timeout == "default":
                return default
            raise WaitTimeout(name)
        return ended[0] if ended else _resumed_by_hand(name)

    async def wait_condition(
        self,
        condition: Condition,
        timeout: Duration | None = None,
        reason: str = "waiting_for_signal",
    ) -> list[Signal]:
        """Give the worker back until a condition is met; the signals that met it.

        Empty when an operator resumed the execution by hand.
        """
        ended = await self._wait(condition, timeout, reason)
        if not isinstance(ended, _TimedOut):
            return ended
        if isinstance(condition, TimeoutOnly):
            return []
        raise WaitTimeout(", ".join(referenced_waitpoint_keys(condition)) or _NAMELESS)

    async def _wait(
        self, given: Condition, timeout: Duration | None, reason: str
    ) -> list[Signal] | _TimedOut:
        names = referenced_waitpoint_keys(given) or [_NAMELESS]
        keys = {name: self._key(name) for name in names}
        self._taken.update(keys.values())
        condition = _renamed(given, keys)
        async with self._turn:
            if self._task.finished_by == "suspend":
                # Another wait of the same handler has parked it meanwhile.
                raise Parked
            ended = await self._answered(condition, list(keys.values()))
            if ended is None:
                ended = await self._park(condition, list(keys.values()), timeout, reason)
        if isinstance(ended, _TimedOut):
            return ended
        names_of = {key: name for name, key in keys.items()}
        return [Signal.of(signal, names_of[signal.waitpoint_key]) for signal in ended]

    async def _answered(
        self, condition: Condition, keys: Sequence[str]
    ) -> list[ResumeSignal] | _TimedOut | None:
        """How this wait ended before, or None when it did not."""
        past = await self._of(keys)
        ended = [wait for wait in past if wait.ended]
        if not ended:
            # Answers to what an earlier attempt handed out before it could wait.
            past = [wait for wait in past if not self._usable(wait)]
            return await self._received(condition, past) or None
        if any(wait.timed_out for wait in ended):
            return _TimedOut()
        return await self._received(condition, ended)

    async def _received(self, condition: Condition, past: Sequence[PastWait]) -> list[ResumeSignal]:
        """The signals that meet the condition; none when they do not."""
        found = await asyncio.gather(*(self._task.wait_signals(wait) for wait in past))
        signals = {signal.signal_id: signal for some in found for signal in some}
        accepted = sorted(signals.values(), key=lambda signal: signal.accepted_at)
        met = contributors(condition, [_seen(signal) for signal in accepted])
        return [signals[seen.signal_id] for seen in met]

    async def _of(self, keys: Sequence[str]) -> list[PastWait]:
        """What happened to these keys in this run, the latest first."""
        if self._task.attempt_index == 0 and self._task.handle.kind == "fresh":
            # A first start has no past.
            return []
        if self._past is None:
            past = await self._task.past_waits(*keys)
            if any(self._is_stale(wait) for wait in past):
                # Nobody may answer those any more: what came before that counts.
                for wait in filter(self._is_stale, past):
                    await self._task.close_waitpoint(wait.waitpoint_id, "attempt_ended")
                past = await self._task.past_waits(*keys)
            self._past = sorted(past, key=lambda wait: wait.closed_at, reverse=True)
        return [wait for wait in self._past if wait.waitpoint_key in keys]

    def _is_stale(self, wait: PastWait) -> bool:
        return wait.state == "pending" and wait.attempt_index < self._task.attempt_index

    async def _park(
        self, condition: Condition, keys: Sequence[str], timeout: Duration | None, reason: str
    ) -> list[ResumeSignal]:
        options: dict[str, Any] = {"reason_code": reason}
        if timeout is not None:
            now = await self._task.backend.meta.server_time_ms()
            options["timeout_at"] = now + to_ms(timeout, "timeout")
            # The handler decides what a timeout means.
            options["timeout_behavior"] = "auto_resume"
        pending = await self._pending_of(keys)
        if pending is not None:
            outcome = await self._task.try_suspend_on_pending(pending, condition, **options)
        else:
            fresh = [FreshWaitpoint(new_uuid(), key) for key in keys]
            outcome = await self._task.try_suspend(condition, waitpoints=fresh, **options)
        if isinstance(outcome, AlreadySatisfiedSuspension):
            return await self._task.resume_signals()
        raise Parked

    async def _pending_of(self, keys: Sequence[str]) -> PendingWaitpoint | None:
        """The waitpoint that was handed out for one of the keys, by this start or one before."""
        for wait in await self._of(keys):
            if self._usable(wait):
                self._pending.setdefault(
                    wait.waitpoint_key,
                    PendingWaitpoint(wait.waitpoint_id, wait.waitpoint_key, wait.waitpoint_token),
                )
        found = [self._pending[key] for key in keys if key in self._pending]
        if found and len(keys) > 1:
            raise invalid_input(
                "condition", f"{found[0].waitpoint_key!r} was handed out and must be waited alone"
            )
        return found[0] if found else None


def _wanted(signals: str | Collection[str] | None) -> SignalName:
    if signals is None or isinstance(signals, str):
        return signals
    names = tuple(sorted(signals))
    return names[0] if len(names) == 1 else names or None


def _renamed(condition: Condition, keys: Mapping[str, str]) -> Condition:
    """The condition over the keys that its names have in this place of the handler."""
    match condition:
        case Single():
            return Single(keys[condition.waitpoint_key], condition.signal_name)
        case Count():
            renamed = tuple(keys[key] for key in condition.waitpoints)
            return msgspec.structs.replace(condition, waitpoints=renamed)
        case AllOf():
            return AllOf(tuple(_renamed(member, keys) for member in condition.members))
        case _:
            return condition


def _seen(signal: ResumeSignal) -> Seen:
    return Seen(
        signal.signal_id,
        signal.waitpoint_key,
        signal.signal_name,
        signal.source_type,
        signal.source_identity,
    )


def _resumed_by_hand(name: str) -> Signal:
    return Signal(
        name="resumed",
        payload=None,
        source_identity="",
        source_type="operator",
        signal_id="",
        waitpoint=name,
    )
