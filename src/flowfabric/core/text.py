"""Text limits that truncate instead of refusing."""

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
