"""Answers: how results become JSON (10 §1)."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from flowfabric.core.contracts import NamedOutcome

JSON = "application/json"


def _plain(value: Any) -> Any:
    # Ids are a subclass of text, which the encoder does not know.
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"cannot encode {type(value).__name__}")


encode = msgspec.json.Encoder(enc_hook=_plain).encode


class Reply(msgspec.Struct, frozen=True):
    """A complete answer."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


def answer(value: Any, status: int = 200, **headers: str) -> Reply:
    """A JSON answer; `cache_control="no-store"` adds that header."""
    added = tuple((name.replace("_", "-").title(), text) for name, text in headers.items())
    return Reply(status, encode(value), JSON, added)


@cache
def variant_name(kind: str) -> str:
    """The name of a result on the wire.

    >>> variant_name("already_satisfied")
    'AlreadySatisfied'
    """
    return "".join(part.title() for part in kind.split("_"))


def variant(outcome: NamedOutcome[Any], *omit: str, **changed: Any) -> Any:
    """A result as an object with one key, its name; without fields it is a bare string."""
    fields: Mapping[str, Any] = msgspec.structs.asdict(outcome) | changed
    named = {name: value for name, value in fields.items() if name not in omit}
    return tagged(outcome.kind, named)


def tagged(kind: str, fields: Mapping[str, Any]) -> Any:
    """Named fields, as `variant` writes them."""
    return {variant_name(kind): fields} if fields else variant_name(kind)


def struct(value: msgspec.Struct, *optional: str) -> dict[str, Any]:
    """Every field of a struct; those named are left out while they are unset."""
    fields = msgspec.structs.asdict(value)
    for name in optional:
        if fields[name] is None:
            del fields[name]
    return fields
