"""Query strings: each route declares a struct, and its fields are read from text (10 §1)."""

import re
from collections.abc import Callable
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import unquote_to_bytes

import msgspec

from flowfabric.server.problems import Problem, invalid

MAX_WAIT_MS = 30_000
MAX_PAGE = 1000
Q = TypeVar("Q", bound=msgspec.Struct)
_is_whole = re.compile(r"-?[0-9]{1,1000}").fullmatch
_Reader = Callable[[str, list[str]], Any]


class NoQuery(msgspec.Struct, frozen=True):
    """A route without parameters."""


def between(low: int, high: int) -> Any:
    """Marks a whole number within limits."""
    return msgspec.Meta(ge=low, le=high)


WaitMs = Annotated[int, between(0, MAX_WAIT_MS)]
Partition = Annotated[int, between(0, 65535)]
AnyLimit = Annotated[int, between(0, 2**63 - 1)]


class PageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a listing."""

    cursor: str = ""
    limit: AnyLimit = 100

    @property
    def size(self) -> int:
        """How many entries to return at most: a larger number is lowered."""
        return min(self.limit, MAX_PAGE)


class WaitQuery(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for the end."""

    wait_ms: WaitMs = 0


def split(raw: bytes) -> list[tuple[str, str]]:
    """The pairs of a query string; text that is not UTF-8 is refused."""
    pairs: list[tuple[str, str]] = []
    for part in raw.split(b"&"):
        if part:
            name, _, value = part.partition(b"=")
            pairs.append((_text(name), _text(value)))
    return pairs


def _text(raw: bytes) -> str:
    try:
        return unquote_to_bytes(raw.replace(b"+", b" ")).decode()
    except UnicodeDecodeError:
        raise Problem("invalid_input", "query: is not UTF-8") from None


def _flag(_: str, values: list[str]) -> bool:
    return values[-1] in ("true", "1")


def _last(_: str, values: list[str]) -> str:
    return values[-1]


def _list(_: str, values: list[str]) -> tuple[str, ...]:
    return tuple(values)


def whole(name: str, text: str) -> int:
    """A whole number, without any other form of writing it."""
    if _is_whole(text) is None:
        raise invalid(name, f"must be a whole number, got {text[:40]!r}")
    return int(text)


def _whole(low: int, high: int, name: str, values: list[str]) -> int:
    number = whole(name, values[-1])
    if not low <= number <= high:
        raise invalid(name, f"must be from {low} to {high}, got {values[-1][:40]}")
    return number


def _reader(hint: Any) -> _Reader:
    if get_origin(hint) in (Union, UnionType):
        return _reader(get_args(hint)[0])
    if get_origin(hint) is Annotated:
        _, meta = get_args(hint)
        return partial(_whole, meta.ge, meta.le)
    if get_origin(hint) is tuple:
        return _list
    return _flag if hint is bool else _last


@cache
def _readers(kind: type[msgspec.Struct]) -> dict[str, tuple[str, _Reader]]:
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    return {each.encode_name: (each.name, _reader(hints[each.name])) for each in fields}


@cache
def _defaults(kind: type[Q]) -> Q:
    return kind()


def read(raw: bytes, kind: type[Q]) -> Q:
    """The parameters of a query string. Unknown ones are ignored."""
    readers = _readers(kind)
    if not raw or not readers:
        return _defaults(kind)
    given: dict[str, list[str]] = {}
    for name, value in split(raw):
        if name in readers:
            given.setdefault(name, []).append(value)
    return kind(**{readers[name][0]: readers[name][1](name, each) for name, each in given.items()})
