"""Waiting for people and services inside a handler, and live output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec

from flowfabric.app import codec
from flowfabric.core.conditions import Condition, Single
from flowfabric.core.contracts.streams import Frame, FrameMode
from flowfabric.core.contracts.suspension import (
    AlreadySatisfiedSuspension,
    PendingWaitpoint,
    ResumeSignal,
)
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import FlowFabricError
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.task_waits import Parked

__all__ = ["Signal", "WaitTimeout", "Waits"]

_WAITPOINT_LIFE_MS = 7 * 86_400_000
_FRAME_BYTES = 65_536


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a wait. `payload` is decoded when it is JSON."""

    name: str
    payload: Any
    source_identity: str
    source_type: str
    signal_id: str

    @classmethod
    def of(cls, signal: ResumeSignal) -> Signal:
        """The handler's view of a delivered signal."""
        return cls(
            name=signal.signal_name,
            payload=codec.decode(signal.payload, signal.payload_encoding),
            source_identity=signal.source_identity,
            source_type=signal.source_type,
            signal_id=signal.signal_id,
        )


class WaitTimeout(FlowFabricError):
    """Nobody answered a wait in time."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"nobody answered {self.name!r} in time"


_BY_HAND = Signal(
    name="resumed", payload=None, source_identity="", source_type="operator", signal_id=""
)


class Waits:
    """The waits of one run of a handler. Answers are found by name, so a handler that is
    started again after a wait passes the waits that were answered and stops at the next.
    """

    def __init__(self, task: ClaimedTask) -> None:
        self._task = task
        self._used: dict[str, int] = {}
        self._pending: dict[str, PendingWaitpoint] = {}

    def _key(self, name: str) -> str:
        """A name used again in one run gets a number, so that each use has its own answer."""
        count = self._used[name] = self._used.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    async def waitpoint(self, name: str, expires_in: Duration | None = None) -> PendingWaitpoint:
        """Id and token to hand out before the next `wait_for(name)`."""
        count = self._used.get(name, 0) + 1
        key = name if count == 1 else f"{name}#{count}"
        if key not in self._pending:
            life = _WAITPOINT_LIFE_MS if expires_in is None else to_ms(expires_in, "expires_in")
            self._pending[key] = await self._task.create_pending_waitpoint(key, life)
        return self._pending[key]

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
        names = (signals,) if isinstance(signals, str) else tuple(signals or ())
        key = self._key(name)
        answer = await self._answered(key)
        if answer is None:
            condition = Single(key, names if len(names) > 1 else names[0] if names else None)
            received = await self._park(key, condition, timeout, reason)
        else:
            closed_by, received = answer
            if closed_by.startswith("timed_out"):
                if on_timeout == "default":
                    return default
                raise WaitTimeout(name)
        wanted = [one for one in received if not names or one.signal_name in names]
        return Signal.of(wanted[-1]) if wanted else _BY_HAND

    async def wait_condition(
        self,
        condition: Condition,
        timeout: Duration | None = None,
        reason: str = "waiting_for_signal",
    ) -> list[Signal]:
        """Give the worker back until a condition is met; the signals that met it."""
        cause = self._task.resume_cause
        if cause is not None:
            if cause.close_reason.startswith("timed_out"):
                raise WaitTimeout("condition")
            return [Signal.of(signal) for signal in await self._task.resume_signals()]
        received = await self._park("", condition, timeout, reason)
        return [Signal.of(signal) for signal in received]

    async def _answered(self, key: str) -> tuple[str, list[ResumeSignal]] | None:
        """A first run cannot have been answered yet: only later ones look."""
        if self._task.attempt_index == 0 and self._task.handle.kind == "fresh":
            return None
        return await self._task.answers(key)

    async def _park(
        self, key: str, condition: Condition, timeout: Duration | None, reason: str
    ) -> Sequence[ResumeSignal]:
        options: dict[str, Any] = {"reason_code": reason}
        if timeout is not None:
            now = await self._task.backend.server_time_ms()
            options["timeout_at"] = now + to_ms(timeout, "timeout")
            # The handler decides what a timeout means.
            options["timeout_behavior"] = "auto_resume"
        pending = self._pending.pop(key, None)
        if pending is None:
            outcome = await self._task.try_suspend(condition, **options)
        else:
            outcome = await self._task.try_suspend_on_pending(pending, condition, **options)
        if isinstance(outcome, AlreadySatisfiedSuspension):
            return await self._task.resume_signals()
        raise Parked

    async def stream(self, data: Any, frame_type: str, mode: FrameMode) -> None:
        """Write output that others can follow; large data goes in several frames."""
        if isinstance(data, bytes):
            raw, encoding = data, "binary"
        elif isinstance(data, str):
            raw, encoding = data.encode(), "utf8"
        else:
            raw, encoding = codec.encode(data)[0], "json"
        for start in range(0, len(raw) or 1, _FRAME_BYTES):
            part = raw[start : start + _FRAME_BYTES]
            frame = Frame(payload=part, frame_type=frame_type, encoding=encoding)
            await self._task.output.write(frame, mode=mode)
