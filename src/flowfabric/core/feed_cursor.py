"""Where a subscriber stands in the event feeds, as bytes it can keep (12 §11.3)."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping

import msgspec

from flowfabric.core.errors import ValidationError

Position = tuple[int, int]
"""Milliseconds and sequence number of a feed entry; reading goes on strictly behind it."""

BEGINNING: Position = (0, 0)

_ONE_FEED = 0x01
_MANY_FEEDS = 0x11
_FLOW = 0
_FEEDS = (0, 1, 2)
_SINGLE = struct.Struct(">BQQ")
_HEAD = struct.Struct(">BQH")
_ENTRY = struct.Struct(">BHQQ")


def position_of(entry: str) -> Position:
    """The position of an entry id, `<ms>-<seq>`."""
    ms, _, seq = entry.partition("-")
    return int(ms), int(seq)


def entry_id(position: Position) -> str:
    """The entry id of a position."""
    return f"{position[0]}-{position[1]}"


class FeedCursor(msgspec.Struct, frozen=True):
    """A position in many feeds: those not listed stand at the base time."""

    base: int
    positions: Mapping[int, Position] = {}
    """By flow partition."""

    def encode(self) -> bytes:
        """The bytes to keep."""
        parts = [_HEAD.pack(_MANY_FEEDS, self.base, len(self.positions))]
        parts += (
            _ENTRY.pack(_FLOW, partition, ms, seq)
            for partition, (ms, seq) in sorted(self.positions.items())
        )
        return b"".join(parts)

    @classmethod
    def decode(cls, raw: bytes) -> FeedCursor:
        """The cursor these bytes stand for; anything else is `invalid_cursor`."""
        try:
            kind, base, count = _HEAD.unpack_from(raw)
            entries = list(_ENTRY.iter_unpack(raw[_HEAD.size :]))
        except struct.error:
            raise _refuse("is not a cursor of this subscription") from None
        if kind != _MANY_FEEDS or len(entries) != count:
            raise _refuse("is not a cursor of this subscription")
        if any(feed not in _FEEDS for feed, *_ in entries):
            raise _refuse("names an unknown feed")
        found = {part: (ms, seq) for feed, part, ms, seq in entries if feed == _FLOW}
        return cls(base, found)


def encode_single(position: Position) -> bytes:
    """A position in one feed as bytes."""
    return _SINGLE.pack(_ONE_FEED, *position)


def decode_single(raw: bytes) -> Position:
    """The position in one feed these bytes stand for, or `invalid_cursor`."""
    try:
        kind, ms, seq = _SINGLE.unpack(raw)
    except struct.error:
        raise _refuse("is not a cursor of this subscription") from None
    if kind != _ONE_FEED:
        raise _refuse("is not a cursor of this subscription")
    return ms, seq


def decode_cursor(cursor: bytes | str) -> bytes:
    """The bytes of a cursor given as bytes or as URL-safe base64 text."""
    if isinstance(cursor, bytes):
        return cursor
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise _refuse("is neither a cursor's bytes nor their text") from None


def cursor_text(raw: bytes) -> str:
    """A cursor's bytes as text for a url or a header."""
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _refuse(problem: str) -> ValidationError:
    return ValidationError("invalid_cursor", problem)
