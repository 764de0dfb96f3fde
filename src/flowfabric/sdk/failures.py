"""What is stored and logged about a handler that failed."""

import os
import re
import traceback
from pathlib import Path
from typing import Self

import msgspec

from flowfabric.core import errors
from flowfabric.core.text import truncate_utf8

_CHAIN_BYTES = 4096
_REPORT_BYTES = 8192
_FRAMES = 20
_LOGGED_CHARS = 1000
_TRACEBACK_CHARS = 32_768
_HEADER = "\nTraceback (most recent call last):\n"
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_exception_type = re.compile(r"(?:handler crashed: )?([^\s:]+)").match
# The first match counts.
_CATEGORIES: dict[type[BaseException], str] = {
    errors.RetryableError: "transient",
    errors.PayloadMismatch: errors.PayloadMismatch.category,
    errors.PermanentError: "permanent",
    errors.BudgetExceeded: "budget_exceeded",
    TimeoutError: "timeout",
    Exception: "handler_error",
    BaseException: "handler_panic",
}


class HandlerFailure(errors.FlowFabricError):
    """Fails the attempt with exactly this reason and category."""

    def __init__(self, reason: str, category: str) -> None:
        super().__init__(reason, category)
        self.reason = reason
        self.category = category

    def __str__(self) -> str:
        return f"{self.category}: {self.reason}"


class FinalFailure(errors.FlowFabricError):
    """Fails the execution with what the handler raised: `raise FinalFailure from error`."""


class StoredFailure(msgspec.Struct, frozen=True):
    """What the stored reason of a failure consists of."""

    message: str
    exception_type: str | None
    """The name of the exception's class; None if no handler raised one."""
    traceback: str | None
    """As Python prints it, without the frames of this package and at most 20 others."""

    @classmethod
    def parse(cls, reason: str) -> Self:
        """Parse a report by `describe`; any other reason is only a message."""
        message, header, frames = reason.rpartition(_HEADER)
        kind = _exception_type(message)
        if not header or kind is None:
            return cls(reason, None, None)
        return cls(message, kind[1], f"{header[1:]}{frames}\n{message}")


class FailureDescription(msgspec.Struct, frozen=True):
    """An exception in words."""

    reason: str
    """The message followed by every cause in the chain."""
    category: str
    report: str
    """The reason, then where it happened: the innermost frames that fit."""
    log_message: str
    exc_info: BaseException | None
    """What a log record also shows; None if its traceback is of no use, or huge."""


def describe(error: BaseException) -> FailureDescription:
    """An exception in words. Never raises, although the exception's class is user code."""
    try:
        return _describe(error)
    except BaseException:  # noqa: BLE001 - whatever it raises, the failure is recorded
        text = "The handler failed with an exception that cannot be described."
        return FailureDescription(text, "handler_error", text, text, None)


def _describe(error: BaseException) -> FailureDescription:
    if isinstance(error, HandlerFailure):
        reason = error.reason
        report = truncate_utf8(reason, _CHAIN_BYTES)
        return FailureDescription(reason, error.category, report, str(error), None)
    if isinstance(error, FinalFailure) and error.__cause__ is not None:
        return msgspec.structs.replace(_describe(error.__cause__), category="permanent")
    category = next(name for kind, name in _CATEGORIES.items() if isinstance(error, kind))
    reason = _chain(error)
    report = _with_frames(truncate_utf8(reason, _CHAIN_BYTES), error)
    message = _titled(error)
    if len(message) > _LOGGED_CHARS:
        message = f"{message[:_LOGGED_CHARS]}…"
    if isinstance(error, errors.BudgetExceeded):
        # The limit ended the attempt, so the place in the code explains nothing.
        return FailureDescription(reason, category, report, message, None)
    if sum(map(len, traceback.format_exception(error))) <= _TRACEBACK_CHARS:
        return FailureDescription(reason, category, report, message, error)
    return FailureDescription(reason, category, report, f"{message}\n{report}", None)


def _chain(error: BaseException) -> str:
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        parts.append(_titled(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    reason = ": ".join(parts)
    return reason if isinstance(error, Exception) else f"handler crashed: {reason}"


def _titled(error: BaseException) -> str:
    name, message = type(error).__name__, _message(error)
    return f"{name}: {message}" if message else name


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - its __str__ is user code
        return "(its message cannot be shown)"


def _with_frames(reason: str, error: BaseException) -> str:
    tail = error.__traceback__
    while tail is not None and tail.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        # The first frames are our own calls of the handler.
        tail = tail.tb_next
    lines = traceback.format_tb(tail)[-_FRAMES:]
    room = _REPORT_BYTES - len(reason.encode(errors="replace")) - len(_HEADER)
    while lines and len("".join(lines).encode(errors="replace")) > room:
        del lines[0]
    where = "".join(lines).rstrip()
    return f"{reason}{_HEADER}{where}" if where else reason
