"""Who did what: one log record for every operator call and every end of an execution.

Payloads, results and leases' secrets never get here; the event feed keeps the durable trail.
"""

from __future__ import annotations

import functools
import getpass
import inspect
import logging
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import CoroutineType
from typing import Any, ParamSpec, TypeAlias, TypeVar

from flowfabric.core.contracts.executions import Cancelled, Completed, TerminalFailed
from flowfabric.core.contracts.leases import Handle, ReclaimCapExceeded
from flowfabric.core.contracts.suspension import RotationSummary
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import WaitpointToken
from flowfabric.engine.api.executions import Completion

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Method: TypeAlias = "Callable[P, CoroutineType[Any, Any, R]]"

OVERRIDE = "operator_override"

_caller: ContextVar[str] = ContextVar("flowfabric_caller", default="")
_OUTCOMES: dict[type, str] = {
    Completed: "success",
    TerminalFailed: "failed",
    Cancelled: "cancelled",
    ReclaimCapExceeded: "failed",
}
_TIMED_OUT = {
    "expired": "expired",
    "failed": "failed",
    "fail": "failed",
    "cancel": "cancelled",
    "expire": "expired",
}
"""Answers of the timer operations that mean an end, and which."""
_TOLD = (
    *("source", "lane_id", "reason", "revoked_by", "requested_by", "new_priority", "state"),
    *("failure_category", "signal_name", "waitpoint_id", "decided_by", "trigger_type"),
    *("worker_id", "worker_instance_id", "priority_weight_ms", "reclaim_grace_ms"),
    *("partition", "kid", "new_kid", "grace_ms"),
)
"""Arguments worth a field; whatever else a call takes stays out of the log."""


@contextmanager
def acting_as(identity: str) -> Generator[None]:
    """Name whoever the calls in this block are made for, for example a server's authenticated user.

    >>> with acting_as("ada@example.com"):
    ...     await backend.cancel_execution(execution_id)  # doctest: +SKIP
    """
    before = _caller.set(identity)
    try:
        yield
    finally:
        _caller.reset(before)


def caller() -> str:
    """Who acts: as named by `acting_as`, otherwise the account of this process."""
    return _caller.get() or _account()


@functools.cache
def _account() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that no account belongs to.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def operator_call(
    method: Method[P, R], *, by: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> Method[P, R]:
    """Log calls of this operation with their caller, the refused ones too.

    `by` tells from the arguments whether an operator makes the call.
    """
    return _logged(method, by)


def audited(method: Method[P, R]) -> Method[P, R]:
    """Log calls that override a lease's owner, and every end of an execution."""
    return _logged(method, lambda given: given.get("source") == OVERRIDE)


def _logged(method: Method[P, R], by_operator: Callable[[Mapping[str, Any]], bool]) -> Method[P, R]:
    signature = inspect.signature(method)
    op = method.__name__

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not log.isEnabledFor(logging.INFO):
            return await method(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        operator = by_operator(given)
        try:
            outcome = await method(*args, **kwargs)
        except EngineError as error:
            if operator:
                _tell_operator(op, given, error.code, "")
            raise
        end = _OUTCOMES.get(type(outcome), "")
        if operator:
            _tell_operator(op, given, "ok", end, **_details(outcome))
        elif end:
            ended(op, end, **_subject(given), source=given.get("source", ""))
        return outcome

    return call


def _details(outcome: object) -> dict[str, Any]:
    """What an outcome adds to the record; never a token or a secret."""
    if isinstance(outcome, WaitpointToken):
        return {"token_kid": outcome.kid, "token_fingerprint": outcome.fingerprint}
    if isinstance(outcome, RotationSummary):
        return {
            "action": "waitpoint_hmac_rotation_complete",
            "total_partitions": len(outcome.entries),
            "rotated": outcome.rotated,
            "failed_count": len(outcome.failed),
        }
    return {}


def _tell_operator(
    op: str, given: Mapping[str, Any], code: str, outcome: str, **details: Any
) -> None:
    fields = {name: given[name] for name in _TOLD if given.get(name) not in (None, "")}
    if outcome:
        fields["outcome"] = outcome
    who = caller()
    log.info(
        "%s by %s: %s",
        op,
        who,
        code,
        extra={
            "action": "operator_call",
            "op": op,
            "code": code,
            "caller": who,
            **_subject(given),
            **fields,
            **details,
        },
    )


def _subject(given: Mapping[str, Any]) -> dict[str, Any]:
    """Which execution, attempt and lease a call was about."""
    holder = given.get("fence") or given.get("handle")
    if isinstance(holder, Handle):
        return subject_of(holder)
    named = given.get("execution_id") or getattr(given.get("grant"), "execution_id", None)
    return {} if named is None else {"execution_id": str(named)}


def subject_of(handle: Handle) -> dict[str, Any]:
    """The log fields of a lease."""
    return {
        "execution_id": str(handle.execution_id),
        "attempt_id": handle.attempt_id,
        "attempt_index": handle.attempt_index,
        "lease_epoch": handle.lease_epoch,
        "lane": handle.lane_id,
        "worker_instance_id": handle.worker_instance_id,
    }


def ended(op: str, outcome: str, *, source: str = "", **subject: Any) -> None:
    """An execution reached its end."""
    fields = {**subject, "source": source} if source else subject
    log.info(
        "execution ended: %s",
        outcome,
        extra={"action": "execution_ended", "op": op, "outcome": outcome, **fields},
    )


def batch_ended(op: str, items: Sequence[Completion], answers: Sequence[object]) -> None:
    """The ends of a batch; nothing is built while nobody listens."""
    if log.isEnabledFor(logging.INFO):
        for item, answer in zip(items, answers, strict=True):
            if not isinstance(answer, EngineError):
                ended(op, "success", **subject_of(item.handle), source="lease_holder")


def timed_out(op: str, ids: Sequence[str], answers: Sequence[str]) -> None:
    """The ends that a timer brought."""
    if log.isEnabledFor(logging.INFO):
        for execution_id, answer in zip(ids, answers, strict=True):
            if answer in _TIMED_OUT:
                ended(op, _TIMED_OUT[answer], execution_id=execution_id)
