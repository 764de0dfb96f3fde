"""Capabilities: what an execution requires and a worker offers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, cast
from unicodedata import category

from flowfabric.core.errors import ValidationError

_MAX_TOKENS = 256
_MAX_CSV_BYTES = 4096

Side = Literal["required", "worker"]
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping)
# Control characters, and surrogates, which UTF-8 cannot encode.
_FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cs"})


def normalise(tokens: object, side: Side = "required") -> tuple[str, ...]:
    """Check a collection of tokens and return it sorted, without duplicates.

    >>> normalise(["gpu", "cuda", "gpu"])
    ('cuda', 'gpu')
    """
    if isinstance(tokens, _NO_LISTS) or not isinstance(tokens, Iterable):
        raise _refuse(side, "not_array")
    distinct = {_check_token(token, side) for token in cast("Iterable[object]", tokens)}
    if len(distinct) > _MAX_TOKENS:
        raise _refuse(side, "too_many_tokens")
    ordered = tuple(sorted(distinct))
    if len(to_csv(ordered).encode()) > _MAX_CSV_BYTES:
        raise _refuse(side, "too_many_bytes")
    return ordered


def to_csv(tokens: Iterable[str]) -> str:
    """The stored form of normalised tokens."""
    return ",".join(tokens)


def from_csv(csv: str, side: Side = "required") -> tuple[str, ...]:
    """Read the stored form; empty items are skipped."""
    return normalise([token for token in csv.split(",") if token], side)


def missing(required: Iterable[str], offered: Iterable[str]) -> tuple[str, ...]:
    """The required tokens that are not offered, sorted.

    >>> missing(("cuda", "gpu"), ("gpu",))
    ('cuda',)
    """
    return tuple(sorted(set(required).difference(offered)))


def _check_token(token: object, side: Side) -> str:
    if not isinstance(token, str):
        raise _refuse(side, "non_string_token")
    if not token:
        raise _refuse(side, "empty_token")
    if "," in token:
        raise _refuse(side, "comma_in_token")
    if any(char.isspace() or category(char) in _FORBIDDEN_CATEGORIES for char in token):
        raise _refuse(side, "control_or_whitespace")
    return token


def _refuse(side: Side, problem: str) -> ValidationError:
    return ValidationError("invalid_capabilities", f"{side}:{problem}")
