"""Errors as HTTP answers: the envelope, its statuses, and the texts that clients know (10 §5)."""

import math
from collections.abc import Mapping
from typing import Any

from flowfabric.core.catalogue import CATALOGUE, ErrorClass
from flowfabric.core.errors import EngineError, LimitError, TransportError, UnavailableError

CLASS_WORDS = {
    ErrorClass.TERMINAL: "terminal",
    ErrorClass.RETRYABLE: "retryable",
    ErrorClass.INFORMATIONAL: "informational",
    ErrorClass.COOPERATIVE: "cooperative",
    ErrorClass.EMPTY: "expected",
    ErrorClass.SOFT: "soft",
    ErrorClass.BUG: "bug",
}
_OTHER_TYPE = 415
_PHRASES = {400: "Bad Request", _OTHER_TYPE: "Unsupported Media Type", 422: "Unprocessable Entity"}
_REPEAT_LATER = (429, 503)
_RETRY_AFTER_MS = 1000


class Problem(Exception):
    """A request that is answered with an error.

    >>> Problem("lane_not_found", "fast").status
    404
    """

    is_fault = True
    """Whether a status of 500 or higher belongs in the log."""
    rejects_body = False
    """Whether the body of the request cannot be read."""

    def __init__(
        self,
        code: str,
        detail: str = "",
        *,
        status: int | None = None,
        error: str = "",
        kind: str = "",
        retryable: bool | None = None,
        fields: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(code, detail)
        entry = CATALOGUE[code]
        self.code = code
        self.detail = detail
        self.status = entry.http_status if status is None else status
        self.error = error or (f"{code}: {detail}" if detail else code)
        self.kind = kind or code
        self.error_class = entry.error_class
        self.group = entry.group
        self.retryable = (
            self.error_class is ErrorClass.RETRYABLE if retryable is None else retryable
        )
        self.fields = dict(fields or {})
        self.headers = dict(headers or {})
        if self.status in _REPEAT_LATER:
            wait_ms: int = self.fields.get("retry_after_ms", _RETRY_AFTER_MS)
            self.headers.setdefault("Retry-After", str(max(1, math.ceil(wait_ms / 1000))))

    def body(self, request_id: str = "") -> dict[str, Any]:
        """The envelope."""
        envelope: dict[str, Any] = {
            "error": self.error,
            "kind": self.kind,
            "retryable": self.retryable,
            "code": self.code,
            "class": CLASS_WORDS[self.error_class],
            "group": self.group,
        }
        if self.detail:
            envelope["detail"] = self.detail
        if request_id:
            envelope["request_id"] = request_id
        return envelope | self.fields


def problem_of(error: EngineError, subject: str = "") -> Problem:
    """The answer to an error of the engine. `subject` is the id that the request is about.

    The request was decoded before it reached the engine, so what the engine rejects is never 422.
    """
    detail = error.detail or (subject if error.code.endswith("_not_found") else "")
    options: dict[str, Any] = {"retryable": error.retryable, "status": error.http_status}
    if len(error.details) > 1:
        # Not `detail`, which joins them with commas that they may also contain.
        options["fields"] = {"details": error.details}
    if error.group == "validation" and error.http_status == 422:
        options["status"] = 400
    if isinstance(error, TransportError):
        options["kind"], detail = error.kind, error.message
        options["fields"] = {"ambiguous": error.ambiguous}
        problem = Problem("transport", detail, **options)
        problem.error_class = error.error_class
        return problem
    if isinstance(error, LimitError) and error.code == "resource_exhausted":
        return exhausted(*_pool(error))
    if isinstance(error, UnavailableError) and error.code == "unavailable":
        text = f"backend op unavailable: {error.op or error.detail}"
        problem = Problem("unavailable", error.op or detail, error=text, **options)
        problem.is_fault = not error.shutting_down
        return problem
    if isinstance(error, LimitError) and error.retry_after_ms is not None:
        options["fields"] = options.get("fields", {}) | {"retry_after_ms": error.retry_after_ms}
    return Problem(error.code if error.code in CATALOGUE else "transport", detail, **options)


def _pool(error: LimitError) -> tuple[str, int, int]:
    pool, ceiling = error.details[0], error.details[1].removeprefix("max=")
    return pool, int(ceiling), error.retry_after_ms or _RETRY_AFTER_MS


def exhausted(pool: str, ceiling: int, retry_after_ms: int = _RETRY_AFTER_MS) -> Problem:
    """Every permit of a pool is in use."""
    text = f"too many concurrent {pool} calls (server max: {ceiling}); retry with backoff"
    return Problem(
        "resource_exhausted",
        f"{pool}, max={ceiling}",
        error=text,
        fields={"details": (pool, f"max={ceiling}"), "retry_after_ms": retry_after_ms},
    )


def made_room() -> Problem:
    """Every permit of requests is in use, and this one's body did not arrive."""
    return Problem(
        "resource_exhausted",
        "the body arrived too slowly for a busy server",
        fields={"retry_after_ms": _RETRY_AFTER_MS},
    )


def too_fast(token_id: str, rate_per_s: float, wait_s: float) -> Problem:
    """A token sends more requests than it may."""
    wait_ms = math.ceil(wait_s * 1000)
    return Problem(
        "resource_exhausted",
        f"token {token_id!r} may send at most {rate_per_s:g} requests per second",
        fields={"retry_after_ms": wait_ms},
    )


def closing(op: str) -> Problem:
    """The process is shutting down; another replica can serve the call."""
    text = f"backend op unavailable: {op}"
    refusal = Problem("unavailable", op, error=text, retryable=True)
    refusal.is_fault = False
    return refusal


def invalid(field: str, problem: str) -> Problem:
    """A value that a rule refuses: 400."""
    return Problem("invalid_input", f"{field}: {problem}")


def not_json(status: int, detail: str = "", code: str = "invalid_input") -> Problem:
    """A body that cannot be read: 415, 400 or 422."""
    if status == _OTHER_TYPE:
        detail = "content-type: must be application/json"
    problem = Problem(code, detail, status=status, error=f"invalid JSON: {_PHRASES[status]}")
    problem.rejects_body = True
    return problem


def bad_path_id(name: str, problem: str) -> Problem:
    """A malformed id in the path."""
    prefix = f"{name}: " if name == "waitpoint_id" else f"invalid {name}: "
    return Problem("invalid_input", f"{name}: {problem}", error=prefix + problem)


def too_large(limit: int, route: str) -> Problem:
    """The body is longer than its route allows."""
    return Problem(
        "payload_too_large",
        status=413,
        error="payload_too_large",
        fields={"limit_bytes": limit, "route": route},
    )
