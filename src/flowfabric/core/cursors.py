"""Positions in the output of an attempt."""

from __future__ import annotations

import re

import msgspec

from flowfabric.core.errors import ValidationError

READ_HARD_CAP = 10_000
"""How many frames one read or tail returns at most."""

MAX_TAIL_BLOCK_MS = 30_000
"""How long one tail waits at most."""

_ID = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_FORMS = "pass start, end, <ms> or <ms>-<seq>"
_MAX_PART = 2**64 - 1
_MAX_DIGITS = len(str(_MAX_PART))
_LAST_POSSIBLE = f"{_MAX_PART}-{_MAX_PART}"


class StreamCursor(msgspec.Struct, frozen=True):
    """`start`, `end`, `<ms>` or `<ms>-<seq>`.

    >>> StreamCursor.parse("1713100800150-0").is_concrete
    True
    """

    text: str

    @classmethod
    def parse(cls, text: str) -> StreamCursor:
        """The cursor, or `invalid_input`."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _refuse(f"Malformed: {type(text).__name__}: {_FORMS}")
        if text == "":
            raise _refuse(f"Empty: {_FORMS}")
        if text in {"-", "+"}:
            raise _refuse(f"BareMarkerRejected: {text!r}: use start or end")
        if text in {"start", "end"}:
            return cls(text)
        match = _ID.fullmatch(text)
        if match is None or not all(_fits(part) for part in match.groups("0")):
            raise _refuse(f"Malformed: {text!r}: {_FORMS}")
        return cls(text)

    @property
    def is_concrete(self) -> bool:
        """Whether it names an entry, not an end of the stream."""
        return self.text not in {"start", "end"}

    def first(self) -> str:
        """The lower bound of a range."""
        if self.text == "start":
            return "-"
        return "+" if self.text == "end" else _entry_id(self.text)

    def last(self) -> str:
        """The upper bound of a range; `<ms>` includes the whole millisecond."""
        return self.first() if "-" in self.text else self.first().removesuffix("-0")

    def after(self) -> str:
        """The position that a tail starts after."""
        if not self.is_concrete:
            raise _refuse(f"{self.text!r} is not an entry; pass 0-0 to follow from the beginning")
        return _entry_id(self.text)

    def __str__(self) -> str:
        return self.text


START = StreamCursor("0-0")
"""Before every entry."""


def behind(entry: str) -> str:
    """The lower bound of everything after an entry; nothing follows the last possible id."""
    return entry if entry == _LAST_POSSIBLE else f"({entry}"


def check_count(count_limit: int) -> int:
    """A page size within its limits."""
    if type(count_limit) is not int or count_limit < 1:
        raise ValidationError("invalid_input", "count_limit must be >= 1")
    if count_limit > READ_HARD_CAP:
        raise ValidationError("invalid_input", "count_limit_exceeds_hard_cap")
    return count_limit


def _fits(part: str) -> bool:
    # Check the length first: Python refuses to parse numbers of thousands of digits.
    digits = part.lstrip("0") or "0"
    return len(digits) <= _MAX_DIGITS and int(digits) <= _MAX_PART


def _entry_id(text: str) -> str:
    ms, _, seq = text.partition("-")
    return f"{ms.lstrip('0') or '0'}-{seq.lstrip('0') or '0'}"


def _refuse(problem: str) -> ValidationError:
    return ValidationError("invalid_input", f"cursor: {problem}")
