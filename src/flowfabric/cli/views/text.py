"""Text for people: previews, short ids, and text that is safe to print."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

_MIN_SHORT = 8
_HEX_BYTES = 64


def clean(text: str, keep: str = "") -> str:
    r"""Escape what could forge a line or control a terminal: line breaks, C0, C1, bidi marks.

    >>> clean("a\nb\x9b")
    'a\\nb\\x9b'
    """
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in keep
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def json_line(value: object, enc_hook: Callable[[Any], Any] | None = None) -> str:
    """One JSON value in one line, with the characters escaped that `clean` escapes."""
    try:
        text = msgspec.json.encode(value, enc_hook=enc_hook).decode()
    except UnicodeEncodeError:
        # A lone surrogate, as in the name of a file that is not UTF-8.
        return json.dumps(msgspec.to_builtins(value, enc_hook=enc_hook), separators=(",", ":"))
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)


def short_length(uuids: Iterable[str]) -> int:
    """How many characters of each UUID make it unique among these; at least 8."""
    known = set(uuids)
    length = _MIN_SHORT
    while length < 36 and len({uuid[:length] for uuid in known}) < len(known):
        length += 1
    return length


def preview(data: bytes, limit: int | None) -> tuple[str, str, bool]:
    """Bytes as text or, if they are not UTF-8, as hex; `text` or `hex`; whether it was cut."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        size = len(data) if limit is None else min(_HEX_BYTES, limit)
        return data[:size].hex(" ", -2), "hex", len(data) > size
    shown = text if limit is None else text[:limit]
    return shown, "text", len(shown) < len(text)
