"""Inputs and results of the engine's operations, one file per concern."""

from functools import cache
from typing import Any, Generic, TypeVar, get_args

import msgspec

K = TypeVar("K", bound=str)
E = TypeVar("E")


@cache
def kind_of(outcome: Any) -> Any:
    """The kind of all outcomes of this type."""
    (base,) = outcome.__orig_bases__
    return get_args(get_args(base)[0])[0]


class NamedOutcome(msgspec.Struct, Generic[K], frozen=True):
    """The result of an operation. A `NamedOutcome[Literal["created"]]` has the kind "created"."""

    @property
    def kind(self) -> K:
        """The name of the result; type checkers tell results apart by it."""
        return kind_of(type(self))


class ListingPage(msgspec.Struct, Generic[E], frozen=True):
    """One page of a listing, and the cursor of the next if there is one."""

    entries: tuple[E, ...]
    next_cursor: str | None = None
    damaged: tuple[str, ...] = ()
    """The entries that cannot be read, each as `<context>: <field>: <problem>`."""
