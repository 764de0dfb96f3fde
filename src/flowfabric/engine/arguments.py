"""Checks of a caller's arguments: what has the wrong type or form is `invalid_input`."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.leases import Fence
from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.core.ids import new_uuid
from flowfabric.core.text import REASON_LIMIT, truncate_utf8

__all__ = [
    "MAX_EXACT",
    "checked_bytes",
    "checked_source",
    "checked_text",
    "clamped",
    "count",
    "fence_text",
    "positive_ms",
    "reason_text",
    "timestamp",
    "whole",
]

MAX_EXACT = 2**53 - 1
"""The largest whole number the engine computes with exactly."""

_I64_MAX = 2**63 - 1
_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1
_OVERRIDE = "operator_override"


def _wrong_type(field: str, wanted: str, value: object) -> ValidationError:
    return invalid_input(field, f"must be {wanted}, got {type(value).__name__}", undecodable=True)


def checked_text(value: Any, field: str) -> str:
    """Text that UTF-8 can carry."""
    if not isinstance(value, str):
        raise _wrong_type(field, "text", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid_input(field, "is not valid Unicode", undecodable=True) from None
    return value


def reason_text(value: Any, field: str, limit: int = REASON_LIMIT) -> str:
    """Text for people: cut to its limit, never refused for what it says."""
    if not isinstance(value, str):
        raise _wrong_type(field, "text", value)
    return truncate_utf8(value, limit)


def checked_bytes(value: Any, field: str) -> bytes:
    """Opaque bytes."""
    if not isinstance(value, bytes):
        raise _wrong_type(field, "bytes", value)
    return value


def checked_source(value: Any) -> str:
    """Who acts on a lease. An override gets an id of its own, so that a repeat is recognised."""
    source = checked_text(value, "source")
    if source == _OVERRIDE:
        return f"{_OVERRIDE} {new_uuid()}"
    if " " in source:
        raise invalid_input("source", "must not contain spaces")
    return source


def whole(value: Any, field: str) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_input(field, "must be a whole number")
    return value


def count(value: Any, field: str) -> int | str:
    """A whole number of 32 bits from 0; empty text for None."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _U32_MAX:
        raise invalid_input(field, "must be a whole number from 0 to 2^32 - 1")
    return value


def clamped(value: int) -> int:
    """The nearest number that the engine computes with exactly."""
    return max(-MAX_EXACT, min(MAX_EXACT, value))


def timestamp(value: Any, field: str, *, low: int = -_I64_MAX) -> int:
    """A time in ms; one beyond what is exact is as good as never."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_input(field, "must be a whole number of milliseconds since 1970")
    if not low <= value <= _I64_MAX:
        raise invalid_input(field, f"must be between {low} and {_I64_MAX}")
    return clamped(value)


def positive_ms(value: Any, field: str) -> int:
    """A duration that is a whole, positive number of milliseconds."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_EXACT:
        raise invalid_input(field, "must be a positive whole number of milliseconds")
    return value


def fence_text(fence: Any) -> str:
    """A fence as the functions compare it; each part is checked, for `/` separates them."""
    if not isinstance(fence, Fence):
        raise _wrong_type("fence", "a Handle or a Fence", fence)
    for field in ("lease_id", "attempt_id"):
        if "/" in checked_text(getattr(fence, field), field):
            raise invalid_input(field, "must not contain '/'")
    for field in ("lease_epoch", "attempt_index"):
        value: Any = getattr(fence, field)
        if value is not None and not 0 <= whole(value, field) <= _U64_MAX:
            raise invalid_input(field, "must be a whole number from 0 to 2^64 - 1")
    return fence.wire
