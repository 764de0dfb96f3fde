"""Positions in event feeds, and their encoding as a subscriber's cursor (12 §11.3)."""

import base64
import hashlib
import struct
from collections.abc import Mapping
from typing import Self

import msgspec

from flowfabric.core.errors import ValidationError

Position = tuple[int, int]
"""Milliseconds and sequence number of an entry. Reading continues strictly after it."""
BEGINNING: Position = (0, 0)
LAST_SEQ = 2**64 - 1
_ONE_FEED = 0x01
_MANY_FEEDS = 0x11
_FAMILIES = ("fp", "b", "q", "w")
"""Flow, budget and quota partitions, and worker registries, by their number in a cursor."""
_WORKERS = "worker:"
_SINGLE = struct.Struct(">BQQ")
_HEAD = struct.Struct(">BQH")
_ENTRY = struct.Struct(">BHQQ")


def position_of(entry_id: str) -> Position:
    """The position of an entry id, `<ms>-<seq>`."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq)


def entry_id(position: Position) -> str:
    return f"{position[0]}-{position[1]}"


def before(position: Position) -> Position:
    """The position just before an entry."""
    ms, seq = position
    return (ms, seq - 1) if seq else (ms - 1, LAST_SEQ)


class FeedCursor(msgspec.Struct, frozen=True):
    """A position in each feed; feeds that are not listed are at the base time.

    Feeds have names such as `fp:7`. With `only`, the cursor covers just that feed.
    """

    base: int = 0
    positions: Mapping[str, Position] = {}
    only: str | None = None

    def position(self, feed: str) -> Position:
        return self.positions.get(feed, (self.base, 0))

    def encode(self) -> bytes:
        """The cursor as bytes."""
        if self.only is not None:
            return _SINGLE.pack(_ONE_FEED, *self.position(self.only))
        # Registries whose numbers collide share the earlier position: events may repeat, none is
        # lost.
        found: dict[tuple[int, int], Position] = {}
        for feed, at in self.positions.items():
            numbers = _numbers(feed)
            found[numbers] = min(at, found.get(numbers, at))
        listed = sorted((*numbers, *at) for numbers, at in found.items())
        head = _HEAD.pack(_MANY_FEEDS, self.base, len(listed))
        return head + b"".join(_ENTRY.pack(*each) for each in listed)

    @classmethod
    def decode(cls, cursor: bytes | str, only: str | None = None) -> Self:
        """Decode these bytes or their text; anything else is `invalid_cursor`."""
        try:
            raw = cursor if isinstance(cursor, bytes) else _from_text(cursor)
            if only is not None:
                kind, ms, seq = _SINGLE.unpack(raw)
                if kind == _ONE_FEED:
                    return cls(0, {only: (ms, seq)}, only)
            else:
                kind, base, count = _HEAD.unpack_from(raw)
                listed = list(_ENTRY.iter_unpack(raw[_HEAD.size :]))
                if kind == _MANY_FEEDS and len(listed) == count:
                    return cls(base, {f"{_FAMILIES[f]}:{n}": (ms, seq) for f, n, ms, seq in listed})
        except (struct.error, IndexError, ValueError):
            pass
        raise ValidationError(
            "invalid_cursor", "cursor: must be that of an event of this subscription"
        )


def numbered(feed: str) -> str:
    """The feed's name in cursors; the feed of a worker registry has a 16-bit number."""
    if not feed.startswith(_WORKERS):
        return feed
    digest = hashlib.sha256(feed.encode()).digest()
    return f"w:{int.from_bytes(digest[:2])}"


def _numbers(feed: str) -> tuple[int, int]:
    family, _, number = numbered(feed).partition(":")
    return _FAMILIES.index(family), int(number)


def _from_text(cursor: str) -> bytes:
    return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)


def cursor_text(raw: bytes) -> str:
    """The bytes of a cursor as text for a URL or a header."""
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
