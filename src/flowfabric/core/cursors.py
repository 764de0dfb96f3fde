"""Positions in an attempt's stream, as users write them."""

from __future__ import annotations

import re

import msgspec

from flowfabric.core.errors import ValidationError

READ_HARD_CAP = 10_000
"""The most frames one read or tail returns."""

MAX_TAIL_BLOCK_MS = 30_000
"""The longest one tail waits."""

_ID = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_FORMS = "give start, end, <ms> or <ms>-<seq>"
_MAX_PART = 2**64 - 1
_MAX_DIGITS = len(str(_MAX_PART))
_LAST_POSSIBLE = f"{_MAX_PART}-{_MAX_PART}"


class StreamCursor(msgspec.Struct, frozen=True):
    """`start`, `end`, `<ms>` or `<ms>-<seq>`; prints back exactly as it was parsed.

    >>> StreamCursor.parse("1713100800150-0").is_concrete
    True
    """

    text: str

    @classmethod
    def parse(cls, text: str) -> StreamCursor:
        """The cursor, or `invalid_input` that names what is wrong with it."""
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
        """Whether it names an entry rather than an end of the stream."""
        return self.text not in {"start", "end"}

    def first(self) -> str:
        """As the lower bound of a range."""
        if self.text == "start":
            return "-"
        return "+" if self.text == "end" else _entry_id(self.text)

    def last(self) -> str:
        """As the upper bound of a range: bare milliseconds take in the whole millisecond."""
        if self.text == "end":
            return "+"
        if self.text == "start":
            return "-"
        entry = _entry_id(self.text)
        return entry if "-" in self.text else entry.removesuffix("-0")

    def after(self) -> str:
        """As the position behind which a tail begins."""
        if not self.is_concrete:
            raise _refuse(f"{self.text!r} names no entry: pass 0-0 to follow from the beginning")
        return _entry_id(self.text)

    def __str__(self) -> str:
        return self.text


START = StreamCursor("0-0")
"""Before every entry."""


def behind(entry: str) -> str:
    """The lower bound of everything after an entry id; behind the last possible id is nothing."""
    return entry if entry == _LAST_POSSIBLE else f"({entry}"


def check_count(count_limit: int) -> int:
    """A page size in range; never clamped."""
    if type(count_limit) is not int or count_limit < 1:
        raise ValidationError("invalid_input", "count_limit must be >= 1")
    if count_limit > READ_HARD_CAP:
        raise ValidationError("invalid_input", "count_limit_exceeds_hard_cap")
    return count_limit


def _fits(part: str) -> bool:
    # Length first: Python refuses to read numbers of thousands of digits.
    digits = part.lstrip("0") or "0"
    return len(digits) <= _MAX_DIGITS and int(digits) <= _MAX_PART


def _entry_id(text: str) -> str:
    ms, _, seq = text.partition("-")
    return f"{ms.lstrip('0') or '0'}-{seq.lstrip('0') or '0'}"


def _refuse(problem: str) -> ValidationError:
    return ValidationError("invalid_input", f"cursor: {problem}")
