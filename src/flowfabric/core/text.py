"""Text helpers: truncation, plurals, lossless decoding; ages, durations and times for people."""

import re
from datetime import UTC, datetime

_id_in_text = re.compile(
    r"(?<![:\w])\{fp:([0-9]{1,5})\}:([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?!\w)"
)
FAILURE_REASON_LIMIT = 8 * 1024
REASON_LIMIT = 4 * 1024
_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"))


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


def host_port(host: str, port: int) -> str:
    """An address as it is written in a URL.

    >>> host_port("::1", 9090)
    '[::1]:9090'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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


def compact_ids(text: str) -> str:
    """A text for people: execution ids in it get their compact spelling. Keys stay as they are.

    >>> compact_ids("{fp:42}:11111111-2222-4333-8444-555555555555 is waiting")
    '42-11111111-2222-4333-8444-555555555555 is waiting'
    """
    return _id_in_text.sub(r"\1-\2", text)


def plural(count: int, noun: str) -> str:
    """A number and its noun.

    >>> plural(1, "task"), plural(1200, "task")
    ('1 task', '1,200 tasks')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def age(ms: int) -> str:
    """A duration, rounded down to one unit.

    >>> age(200), age(61_000), age(7_200_000)
    ('0s', '1m', '2h')
    """
    for size, unit in _UNITS:
        if ms >= size:
            return f"{ms // size}{unit}"
    return "0s"


def duration(ms: int) -> str:
    """A duration in at most two units.

    >>> duration(12), duration(2345), duration(30_000), duration(125_000)
    ('12 ms', '2.3 s', '30 s', '2m 5s')
    """
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f}".removesuffix(".0") + " s"
    parts: list[str] = []
    for size, unit in _UNITS:
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def clock(ms: int) -> str:
    """A time in this machine's time zone."""
    try:
        moment = datetime.fromtimestamp(ms / 1000, UTC).astimezone()
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{ms % 1000:03d}"


def iso(ms: int) -> str | None:
    """A time in ISO 8601, in UTC; None if the calendar has no such time.

    >>> iso(1_700_000_000_123)
    '2023-11-14T22:13:20.123Z'
    """
    try:
        moment = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
