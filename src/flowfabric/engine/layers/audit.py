"""Logs operator calls, every end of an execution, and executions that are reclaimed too often.

Records never contain payloads, results or secrets. The event feed keeps the durable trail.
"""

import copy
import functools
import getpass
import inspect
import logging
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import NoneType
from typing import Any

import msgspec

from flowfabric.core.contracts.executions import Cancelled, Completed, TerminalFailed
from flowfabric.core.contracts.leases import Claim, ClaimedMany, Handle, ReclaimCapExceeded
from flowfabric.core.contracts.suspension import RotationSummary
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, IdParseError, WaitpointToken
from flowfabric.engine.api import check
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.reads import Reads

log = logging.getLogger(__name__)
audit_log = logging.getLogger("flowfabric.audit")
ends = logging.getLogger(f"{__name__}.ends")
"""A separate logger, because there is one record per execution."""
Method = Callable[..., Any]
Layer = Callable[[Method], Method]
_OPERATOR_CALLS = {
    "executions": ("change_priority", "replay_execution", "purge_execution"),
    "claims": (
        *("issue_grant_and_claim", "issue_reclaim_grant", "block_execution_for_admission"),
        *("block_route", "unblock_execution"),
    ),
    "suspensions": ("resume_execution",),
    "budgets": (
        *("create_budget", "update_budget_limits", "reset_budget", "delete_budget"),
        *("report_usage_admin", "record_spend", "release_budget"),
    ),
    "flows": ("cancel_flow", "replay_flow", "delete_flow", "release_flow"),
    "lanes": ("set_lane_state", "set_lane_config"),
    "leases": ("revoke_lease",),
    "quotas": ("create_quota_policy", "update_quota_policy"),
    "workers": ("drain_worker", "mark_worker_dead"),
    "waitpoints": ("close_waitpoint",),
    "signals": ("deliver_approval_signal", "read_waitpoint_token"),
    "secrets": (
        *("rotate_waitpoint_hmac_secret", "rotate_waitpoint_hmac_secret_all"),
        "seed_waitpoint_hmac_secret",
    ),
}
_ENDINGS = (
    *("complete_execution", "fail_execution", "cancel_execution", "delay_execution"),
    "move_to_waiting_children",
)
_OVERRIDE = "operator_override"
_OUTCOMES: dict[type, str] = {
    Completed: "success",
    TerminalFailed: "failed",
    Cancelled: "cancelled",
    ReclaimCapExceeded: "failed",
}
_BATCH_OUTCOMES: dict[type, tuple[str, str]] = {
    Completed: ("complete_many", "success"),
    NoneType: ("complete_many", "success"),
    TerminalFailed: ("fail_execution", "failed"),
}
"""The operation and outcome for each kind of batch item."""
_TIMED_OUT = {
    "expired": "expired",
    "failed": "failed",
    "fail": "failed",
    "cancel": "cancelled",
    "expire": "expired",
}
"""The outcome of an execution for each answer of a timer that ended it."""
_FIELDS = (
    *("source", "lane_id", "reason", "revoked_by", "requested_by", "new_priority", "state"),
    *("failure_category", "signal_name", "waitpoint_id", "decided_by", "trigger_type"),
    *("worker_id", "worker_instance_id", "revoke_leases", "timeout_ms"),
    *("priority_weight_ms", "reclaim_grace_ms"),
    *("placement", "shards", "emit_renewals"),
    *("partition", "kid", "new_kid", "grace_ms", "reason_detail", "expected_blocking_reason"),
    *("flow_id", "cancellation_policy", "failed_only"),
    *("budget_id", "force", "dimensions", "deltas", "quota_policy_id"),
    *("hard_limits", "soft_limits", "reset_interval_ms", "dedup_ttl_ms"),
    *("scope_type", "scope_id", "enforcement_mode", "on_hard_limit", "on_soft_limit"),
    *("window_seconds", "max_requests_per_window", "max_concurrent", "jitter_ms"),
)
"""Arguments that are logged; all others stay out of the record."""
_STRUCTS = ("budget", "change")
"""Arguments of which the fields are logged."""
_GOODBYE = {"reason": "shutdown", "revoke_leases": False}
"""The arguments with which a stopping worker deregisters itself (11 §3); operators use others."""
_RECLAIMS_PER_WARNING = 100
_caller: ContextVar[str] = ContextVar("flowfabric_caller", default="")


@contextmanager
def acting_as(identity: str) -> Generator[None]:
    """Log calls in this block under this name, for example that of an authenticated user.

    >>> with acting_as("ada@example.com"):
    ...     await backend.executions.cancel_execution(execution_id)  # doctest: +SKIP
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
        # A container may run under a user id without an account.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def audit(backend: Backend) -> None:
    """Log the operations of a backend. On the hot path this only checks the log level."""
    layers: dict[str, dict[str, Layer]] = {
        noun: {name: functools.partial(_logged, by_people=True) for name in names}
        for noun, names in _OPERATOR_CALLS.items()
    }
    watch = functools.partial(_reclaims_watched, reads=backend.reads)
    layers["executions"] |= dict.fromkeys(_ENDINGS, _logged) | {"complete_many": _batch_logged}
    layers["claims"] |= {
        "claim_many": watch,
        "complete_and_claim": lambda method: watch(_batch_logged(method)),
        "reclaim_execution": lambda method: _logged(watch(method)),
    }
    layers["suspensions"]["expire_suspension"] = _timer_logged
    layers["upkeep"] = {"expire_execution": _timer_logged}
    for noun, wraps in layers.items():
        concern = copy.copy(getattr(backend, noun))
        for name, wrap in wraps.items():
            setattr(concern, name, wrap(getattr(concern, name)))
        setattr(backend, noun, concern)


def _binder(method: Method) -> Callable[..., dict[str, Any]]:
    """A function that gives the arguments of a call by name, defaults included."""
    signature = inspect.signature(method)

    def bind(*args: Any, **options: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = bound.arguments
        return given | given.pop("options", {})

    return bind


def _logged(method: Method, *, by_people: bool = False) -> Method:
    """Log calls by operators, including refused ones, and every end of an execution.

    `by_people`: a call without a handle is an operator's. Otherwise, the source decides.
    """
    op, bind = method.__name__, _binder(method)

    @functools.wraps(method)
    async def call(*args: Any, **options: Any) -> Any:
        if not audit_log.isEnabledFor(logging.INFO):
            return await method(*args, **options)
        given = bind(*args, **options)
        override = given.get("source") == _OVERRIDE
        by_operator = _by_operator(op, given) if by_people else override
        try:
            outcome: object = await method(*args, **options)
        except EngineError as error:
            if by_operator:
                _log_operator(op, given, error.code)
            raise
        end = _OUTCOMES.get(type(outcome), "")
        if by_operator:
            details = {"outcome": end} if end else {}
            _log_operator(op, given, _code(outcome), **details, **_details(outcome))
        elif end:
            _log_end(op, end, **_subject(given), source=given.get("source", ""))
        return outcome

    return call


def _by_operator(op: str, given: Mapping[str, Any]) -> bool:
    if op == "mark_worker_dead":
        return not given.items() >= _GOODBYE.items()
    return given.get("handle") is None


def _batch_logged(method: Method) -> Method:
    op, bind = method.__name__, _binder(method)

    @functools.wraps(method)
    async def call(*args: Any, **options: Any) -> Any:
        outcome = await method(*args, **options)
        if ends.isEnabledFor(logging.INFO):
            items = bind(*args, **options)["items"]
            answers: list[object] = outcome if op == "complete_many" else outcome[0]
            for item, answer in zip(items, answers, strict=True):
                end = _BATCH_OUTCOMES.get(type(answer))
                if end is not None:
                    _log_end(*end, **_lease(item.handle), source="lease_holder")
        return outcome

    return call


def _timer_logged(method: Method) -> Method:
    bind = _binder(method)

    @functools.wraps(method)
    async def call(*args: Any, **options: Any) -> list[str]:
        given = bind(*args, **options)
        given["ids"] = check.stored_names(given["ids"], "ids")
        answers = await method(**given)
        if ends.isEnabledFor(logging.INFO):
            op = given["reason"].value if "reason" in given else "suspension_timeout"
            for execution_id, answer in zip(given["ids"], answers, strict=True):
                if answer in _TIMED_OUT:
                    _log_end(op, _TIMED_OUT[answer], execution_id=execution_id)
        return answers

    return call


def _reclaims_watched(method: Method, reads: Reads) -> Method:
    """Warn about executions that lose their worker repeatedly; they probably crash it."""

    @functools.wraps(method)
    async def call(*args: Any, **options: Any) -> Any:
        outcome = await method(*args, **options)
        claims: Sequence[Claim] = ()
        match outcome:
            case ClaimedMany(claims=claims) | (_, ClaimedMany(claims=claims)):
                pass
            case Claim():
                claims = (outcome,)
            case _:
                pass
        # Every reclaim adds an attempt, so early attempts cannot have reached the number.
        for claim in claims:
            handle = claim.handle
            if handle.kind == "reclaimed" and handle.attempt_index >= _RECLAIMS_PER_WARNING:
                await warn_of_reclaims(reads, handle)
        return outcome

    return call


async def warn_of_reclaims(reads: Reads, handle: Handle) -> None:
    """Warn at every hundredth reclaim. If the check fails, the claim is not affected."""
    field = "lease_reclaim_count"
    try:
        fields = await reads.read_exec_core_fields(handle.execution_id, [field])
        count = int(fields[field] or 0)
    except (EngineError, ValueError) as error:
        log.debug("cannot read the reclaim count of %s: %s", handle.execution_id, error)
        return
    if count and count % _RECLAIMS_PER_WARNING == 0:
        log.warning(
            "%s was reclaimed %d times",
            handle.execution_id,
            count,
            extra={"action": "reclaimed_often", "reclaim_count": count, **_lease(handle)},
        )


def _code(outcome: object) -> str:
    """The result code of a successful call; a rotation reports each partition separately."""
    incomplete = isinstance(outcome, RotationSummary) and outcome.failed
    return "rotation_incomplete" if incomplete else "ok"


def _details(outcome: object) -> dict[str, Any]:
    """The fields of an outcome for the record; never a token or a secret."""
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


def _log_operator(op: str, given: Mapping[str, Any], code: str, **details: Any) -> None:
    known = dict(given)
    for name in _STRUCTS:
        if isinstance(value := given.get(name), msgspec.Struct):
            known |= msgspec.structs.asdict(value)
    fields = {name: known[name] for name in _FIELDS if known.get(name) not in (None, "")}
    who = caller()
    extra = {"action": "operator_call", "op": op, "code": code, "caller": who}
    extra |= {**_subject(given), **fields, **details}
    audit_log.info("%s by %s: %s", op, who, code, extra=extra)


def _log_end(op: str, outcome: str, *, source: str = "", **subject: Any) -> None:
    extra = {"action": "execution_ended", "op": op, "outcome": outcome, **subject}
    if source:
        extra["source"] = source
    ends.info("execution ended: %s", outcome, extra=extra)


def _subject(given: Mapping[str, Any]) -> dict[str, Any]:
    """The execution, and if known the attempt and lease, that a call is about."""
    holder = given.get("fence") or given.get("handle")
    if isinstance(holder, Handle):
        return _lease(holder)
    named = given.get("execution_id") or getattr(given.get("grant"), "execution_id", None)
    if named is None:
        return {}
    with suppress(IdParseError):
        named = ExecutionId(named)
    return {"execution_id": str(named)}


def _lease(handle: Handle) -> dict[str, Any]:
    return {
        "execution_id": str(handle.execution_id),
        "attempt_id": handle.attempt_id,
        "attempt_index": handle.attempt_index,
        "lease_epoch": handle.lease_epoch,
        "lane": handle.lane_id,
        "worker_instance_id": handle.worker_instance_id,
    }
