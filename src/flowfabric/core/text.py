"""Text limits that truncate instead of refusing, text that was stored malformed, and counts."""

from __future__ import annotations

#: Longest stored `failure_reason`, in bytes.
FAILURE_REASON_LIMIT = 8 * 1024
#: Longest stored cancel reason and progress message, in bytes.
REASON_LIMIT = 4 * 1024


def truncate_utf8(text: str, limit: int) -> str:
    """Cut `text` to at most `limit` UTF-8 bytes without splitting a character.

    Lone surrogates, which UTF-8 cannot carry, become question marks: a reason is never refused.

    >>> truncate_utf8("naïve", 3)
    'na'
    """
    if text.isascii():
        return text[:limit]
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    return data[:limit].decode(errors="ignore")


def lossless(stored: bytes) -> str:
    """Stored bytes as text that `raw` turns into the very same bytes, well-formed or not.

    >>> raw(lossless(b"\xff"))
    b'\xff'
    """
    return stored.decode(errors="surrogateescape")


def raw(text: str) -> bytes:
    """The bytes that `lossless` was given: whoever names a stored thing must name that one."""
    return text.encode(errors="surrogateescape")


def shown(text: str) -> str:
    """What `lossless` gave, for people and logs, which take no lone surrogates.

    >>> shown(lossless(b"a\xff"))
    'a\\xff'
    """
    return raw(text).decode(errors="backslashreplace")


def plural(count: int, noun: str) -> str:
    """A number and its noun.

    >>> plural(1, "task"), plural(1200, "task")
    ('1 task', '1,200 tasks')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
