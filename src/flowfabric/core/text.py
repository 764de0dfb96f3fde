"""Truncating and counting text, and decoding text that may be malformed."""

FAILURE_REASON_LIMIT = 8 * 1024
REASON_LIMIT = 4 * 1024


def truncate_utf8(text: str, limit: int) -> str:
    """The text cut to at most `limit` UTF-8 bytes. Surrogates become question marks.

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
    """Stored bytes as text, valid UTF-8 or not; `raw` returns the same bytes.

    >>> raw(lossless(b"\xff"))
    b'\xff'
    """
    return stored.decode(errors="surrogateescape")


def raw(text: str) -> bytes:
    """The bytes of a text that `lossless` returned."""
    return text.encode(errors="surrogateescape")


def shown(text: str) -> str:
    """A text that `lossless` returned, without surrogates, for people and logs.

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
