"""Strict decoding of stored data. Errors read `corruption: <context>: <field>: <problem>`."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

import msgspec

from flowfabric.core.errors import CorruptionError, ValidationError
from flowfabric.core.text import lossless

T = TypeVar("T")
_UNSET = (None, b"")
_is_number = re.compile(rb"-?[0-9]{1,19}").fullmatch
_is_pair = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/([0-9]{1,19})").fullmatch


def corrupt(context: str, field: str, problem: str) -> CorruptionError:
    """The error for a field. It must not quote a token or a payload."""
    return CorruptionError("corruption", f"{context}: {field}: {problem}")


def stored_text(value: object, context: str, field: str) -> str:
    """One stored value as text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise corrupt(context, field, "is not UTF-8") from None
    if isinstance(value, str | int):
        return str(value)
    raise corrupt(context, field, "is missing" if value is None else "is not text")


class Stored:
    """The fields of a stored record, decoded on access. An empty field counts as unset.

    >>> Stored("worker w-1", {"ttl_ms": b"soon"}).number("ttl_ms")
    Traceback (most recent call last):
    flowfabric.core.errors.CorruptionError: corruption: worker w-1: ttl_ms: is not a whole number …
    """

    __slots__ = ("context", "fields")

    def __init__(self, context: str, fields: Mapping[str, Any]) -> None:
        self.context = context
        self.fields = fields

    @classmethod
    def from_hash(cls, context: str, raw: Any) -> Self:
        """From the reply to HGETALL, or from a flat list of names and values."""
        if isinstance(raw, list):
            flat = cast("list[bytes]", raw)
            if len(flat) % 2:
                raise corrupt(context, "fields", "a name has no value")
            raw = dict(zip(flat[::2], flat[1::2], strict=True))
        return cls(context, {lossless(name): value for name, value in raw.items()})

    @classmethod
    def from_row(cls, context: str, names: Sequence[str], row: Sequence[Any]) -> Self:
        """From a row of a reply; a newer library may add values."""
        return cls(context, {name: row[position] for position, name in enumerate(names)})

    def corrupt(self, name: str, problem: str) -> CorruptionError:
        """The error for one field."""
        return corrupt(self.context, name, problem)

    def is_set(self, name: str) -> bool:
        """Whether the field has a value."""
        return self.fields.get(name) not in _UNSET

    def text(self, name: str, default: str | None = None) -> str:
        """A text field; without a default it must be set."""
        value = self.fields.get(name)
        if value not in _UNSET:
            return stored_text(value, self.context, name)
        if default is None:
            raise self.corrupt(name, "is missing")
        return default

    def maybe_text(self, name: str) -> str | None:
        """A text field, or None."""
        return self.text(name) if self.is_set(name) else None

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; without a default it must be set."""
        value = self.fields.get(name)
        if type(value) is int or (isinstance(value, bytes) and _is_number(value)):
            return int(value)
        if default is None or value not in _UNSET:
            raise self.corrupt(name, "is missing" if value in _UNSET else "is not a whole number")
        return default

    def maybe_number(self, name: str) -> int | None:
        """A whole number, or None."""
        return self.number(name) if self.is_set(name) else None

    def parsed(self, name: str, parse: Callable[[str], T]) -> T:
        """The result of `parse`; a value that it refuses is `corruption`."""
        try:
            return parse(self.text(name, ""))
        except ValidationError as error:
            raise self.corrupt(name, error.detail) from None
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise self.corrupt(name, "cannot be decoded") from None

    def pair(self, name: str) -> tuple[str, int] | None:
        """`<uuid>/<number>`, as leases and attempts are stored; None if unset."""
        if not self.is_set(name):
            return None
        parts = _is_pair(self.text(name))
        if parts is None:
            raise self.corrupt(name, "is not <id>/<number>")
        return parts[1], int(parts[2])
