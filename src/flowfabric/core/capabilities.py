"""Capabilities: what an execution requires and a worker offers."""

from collections.abc import Iterable
from typing import Literal

from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import has_space_or_control, is_list

_MAX_TOKENS = 256
_MAX_CSV_BYTES = 4096

Side = Literal["required", "worker"]


def normalise(tokens: object, side: Side = "required") -> tuple[str, ...]:
    """Check a collection of tokens and return it sorted, without duplicates.

    >>> normalise(["gpu", "cuda", "gpu"])
    ('cuda', 'gpu')
    """
    if not is_list(tokens):
        raise _refuse(side, "not_array")
    distinct = {_check_token(token, side) for token in tokens}
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
    if has_space_or_control(token):
        raise _refuse(side, "control_or_whitespace")
    return token


def _refuse(side: Side, problem: str) -> ValidationError:
    return ValidationError("invalid_capabilities", f"{side}:{problem}")
