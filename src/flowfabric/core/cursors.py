"""Positions in an attempt's stream, as users write them."""

from __future__ import annotations

import re

import msgspec

from flowfabric.core.errors import ValidationError

__all__ = ["START", "StreamCursor", "check_count"]

READ_HARD_CAP = 10_000
MAX_TAIL_BLOCK_MS = 30_000

_ID = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_MAX_PART = 2**64 - 1


class StreamCursor(msgspec.Struct, frozen=True):
    """`start`, `end`, `<ms>` or `<ms>-<seq>`; prints back exactly as it was parsed."""

    text: str

    @classmethod
    def parse(cls, text: str) -> StreamCursor:
        """The cursor, or `invalid_input` that names what is wrong with it."""
        if text == "":
            raise _refuse("Empty: give start, end, <ms> or <ms>-<seq>")
        if text in {"-", "+"}:
            raise _refuse(f"BareMarkerRejected: {text!r}: use start or end")
        if text in {"start", "end"}:
            return cls(text)
        match = _ID.fullmatch(text)
        if match is None or any(int(part) > _MAX_PART for part in match.groups() if part):
            raise _refuse(f"Malformed: {text!r}: give start, end, <ms> or <ms>-<seq>")
        return cls(text)

    @property
    def is_concrete(self) -> bool:
        """Whether it names an entry rather than an end of the stream."""
        return self.text not in {"start", "end"}

    def first(self) -> str:
        """As the lower bound of a range."""
        if self.text == "start":
            return "-"
        return "+" if self.text == "end" else _with_sequence(self.text)

    def last(self) -> str:
        """As the upper bound of a range: bare milliseconds take in the whole millisecond."""
        if self.text == "end":
            return "+"
        return "-" if self.text == "start" else self.text

    def after(self) -> str:
        """As the position behind which a tail begins."""
        if not self.is_concrete:
            raise _refuse(f"{self.text!r} names no entry: pass 0-0 to follow from the beginning")
        return _with_sequence(self.text)

    def __str__(self) -> str:
        return self.text


START = StreamCursor("0-0")


def _with_sequence(text: str) -> str:
    return text if "-" in text else f"{text}-0"


def _refuse(problem: str) -> ValidationError:
    return ValidationError("invalid_input", f"cursor: {problem}")


def check_count(count_limit: int) -> int:
    """A page size in range; never clamped."""
    if count_limit < 1:
        raise ValidationError("invalid_input", "count_limit must be >= 1")
    if count_limit > READ_HARD_CAP:
        raise ValidationError("invalid_input", "count_limit_exceeds_hard_cap")
    return count_limit
