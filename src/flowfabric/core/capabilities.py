"""Capability tokens: one rule for what an execution requires and what a worker offers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, cast
from unicodedata import category

from flowfabric.core.errors import ValidationError

#: Most distinct tokens in one list.
MAX_TOKENS = 256
#: Longest sorted CSV, in bytes.
MAX_CSV_BYTES = 4096

Side = Literal["required", "worker"]
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping)
# Controls and lone surrogates; the latter have no UTF-8 form.
_FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cs"})


def normalise(tokens: object, side: Side = "required") -> tuple[str, ...]:
    """Check a list, or any other collection of tokens, and return it sorted, without duplicates.

    A text is not taken for the list of its letters, nor an object for that of its names.

    >>> normalise(["gpu", "cuda", "gpu"])
    ('cuda', 'gpu')
    """
    if isinstance(tokens, _NO_LISTS) or not isinstance(tokens, Iterable):
        raise _refuse(side, "not_array")
    distinct = {_check_token(token, side) for token in cast("Iterable[object]", tokens)}
    if len(distinct) > MAX_TOKENS:
        raise _refuse(side, "too_many_tokens")
    ordered = tuple(sorted(distinct))
    if len(to_csv(ordered).encode()) > MAX_CSV_BYTES:
        raise _refuse(side, "too_many_bytes")
    return ordered


def to_csv(tokens: Iterable[str]) -> str:
    """Join normalised tokens into the stored form."""
    return ",".join(tokens)


def from_csv(csv: str, side: Side = "required") -> tuple[str, ...]:
    """Read the stored form; empty items are skipped before counting."""
    return normalise([token for token in csv.split(",") if token], side)


def missing(required: Iterable[str], offered: Iterable[str]) -> tuple[str, ...]:
    """The required tokens that are not offered, sorted; empty means the worker fits.

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
