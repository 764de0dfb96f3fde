"""What is stored about a handler that failed."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

from flowfabric.core.errors import (
    BudgetExceeded,
    FlowFabricError,
    PermanentError,
    RetryableError,
)
from flowfabric.core.text import truncate_utf8

T = TypeVar("T")

_LAST_RESORT = "The handler failed with an exception that cannot be described."
_CHAIN_BYTES = 4096
_REPORT_BYTES = 8192
_FRAMES = 20
_LOGGED_CHARS = 1000
# The first that fits.
_CATEGORIES: dict[type[BaseException], str] = {
    RetryableError: "transient",
    PermanentError: "permanent",
    BudgetExceeded: "budget_exceeded",
    TimeoutError: "timeout",
    Exception: "handler_error",
}


class HandlerFailure(FlowFabricError):
    """Raised on the way to a handler: the attempt failed with exactly this reason and category."""

    def __init__(self, reason: str, category: str) -> None:
        super().__init__(reason, category)
        self.reason = reason
        self.category = category

    def __str__(self) -> str:
        return f"{self.category}: {self.reason}"


def _or_else(fallback: T) -> Callable[[Callable[[BaseException], T]], Callable[[BaseException], T]]:
    """Return `fallback` when describing an exception raises: its class is user code."""

    def decorate(describe: Callable[[BaseException], T]) -> Callable[[BaseException], T]:
        @functools.wraps(describe)
        def guarded(error: BaseException) -> T:
            try:
                return describe(error)
            except BaseException:  # noqa: BLE001 - whatever it raises, the failure is recorded
                return fallback

        return guarded

    return decorate


@_or_else("handler_error")
def failure_category(error: BaseException) -> str:
    """The category a handler's exception is stored under."""
    if isinstance(error, HandlerFailure):
        return error.category
    for kind, category in _CATEGORIES.items():
        if isinstance(error, kind):
            return category
    return "handler_panic"


@_or_else(_LAST_RESORT)
def failure_reason(error: BaseException) -> str:
    """The message followed by every cause in the chain."""
    if isinstance(error, HandlerFailure):
        return error.reason
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        name, message = _name(cause), _message(cause)
        parts.append(f"{name}: {message}" if message else name)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    reason = ": ".join(parts)
    return reason if isinstance(error, Exception) else f"handler crashed: {reason}"


@_or_else("(an exception whose name cannot be shown)")
def _name(error: BaseException) -> str:
    return f"{type(error).__name__}"


@_or_else("(its message cannot be shown)")
def _message(error: BaseException) -> str:
    return str(error)


@_or_else(cast("tuple[str, BaseException | None]", (_LAST_RESORT, None)))
def loggable(error: BaseException) -> tuple[str, BaseException | None]:
    """A message of reasonable length, and what a log record takes as `exc_info`.

    A traceback shows every message of the chain in full. When one of them is huge, or cannot be
    shown, the stored report stands in for it.
    """
    if isinstance(error, HandlerFailure):
        # Our own verdict: where it was made tells nobody anything.
        return str(error), None
    message = _message(error)
    brief = message if len(message) <= _LOGGED_CHARS else f"{message[:_LOGGED_CHARS]}…"
    if all(len(_message(each)) <= _CHAIN_BYTES for each in _related(error)):
        return brief, error if _has_traceback(error) else None
    return f"{brief}\n{failure_report(error)}", None


@_or_else(fallback=False)
def _has_traceback(error: BaseException) -> bool:
    """Whether a log handler can format this exception."""
    return bool(traceback.format_exception(error))


def _related(error: BaseException) -> Iterator[BaseException]:
    """Every exception that a traceback of this one shows."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        rest += (each.__cause__, each.__context__)
        if isinstance(each, BaseExceptionGroup):
            rest += cast("tuple[BaseException, ...]", each.exceptions)


@_or_else(_LAST_RESORT)
def failure_report(error: BaseException) -> str:
    """The reason on the first lines, then where it happened: the innermost frames that fit."""
    reason = truncate_utf8(failure_reason(error), _CHAIN_BYTES)
    lines = list(_frames(error))
    room = _REPORT_BYTES - len(reason.encode(errors="replace")) - 1
    while lines and len("".join(lines).encode(errors="replace")) > room:
        del lines[0]
    where = "".join(lines).rstrip()
    return f"{reason}\n{where}" if where else reason


@_or_else(cast("list[str]", []))
def _frames(error: BaseException) -> list[str]:
    # The first frame is our own call of the handler.
    tail = error.__traceback__.tb_next if error.__traceback__ is not None else None
    if isinstance(error, HandlerFailure) or tail is None:
        return []
    return traceback.format_tb(tail)[-_FRAMES:]
