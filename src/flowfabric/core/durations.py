"""Durations: seconds, `timedelta`, or text such as `"1h30m"`."""

import math
import re
from datetime import timedelta
from decimal import ROUND_CEILING, Decimal

from flowfabric.core.errors import invalid_input

Duration = int | float | timedelta | str

_MAX_MS = 2**53 - 1
_UNITS_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
# Largest unit first, each at most once: "30m1h" is probably a mistake.
_match_text = re.compile("".join(rf"(?:({_NUMBER}) ?{unit} ?)?" for unit in _UNITS_MS)).fullmatch
_match_seconds = re.compile(_NUMBER).fullmatch


def to_ms(value: Duration, field: str = "duration") -> int:
    """A duration in milliseconds, rounded up. A number without a unit is seconds.

    >>> to_ms("1h30m"), to_ms(2.5), to_ms("250ms")
    (5400000, 2500, 250)
    """
    if isinstance(value, str):
        ms = _text_ms(value.strip().lower(), field)
    elif isinstance(value, timedelta):
        ms = -(-(value // timedelta(microseconds=1)) // 1000)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid_input(
            field,
            f"must be seconds, a timedelta or text such as '5m', got {type(value).__name__}",
        )
    elif isinstance(value, int):
        ms = value * 1000
    elif math.isfinite(value):
        # Convert the shortest decimal text, so that 0.001 is exactly one millisecond.
        ms = _ceil(Decimal(repr(value)) * 1000)
    else:
        raise invalid_input(field, f"must be finite, got {value}")
    if ms < 0:
        raise invalid_input(field, "must not be negative")
    if ms > _MAX_MS:
        raise invalid_input(field, f"must be at most {_MAX_MS} ms")
    return ms


def _text_ms(text: str, field: str) -> int:
    if _match_seconds(text):
        return _ceil(Decimal(text) * 1000)
    match = _match_text(text)
    if match is None or not any(match.groups()):
        raise invalid_input(
            field, f"expected text such as '250ms', '5m' or '1h30m', got {text[:40]!r}"
        )
    parts = zip(match.groups(), _UNITS_MS.values(), strict=True)
    return _ceil(sum((Decimal(number) * unit for number, unit in parts if number), Decimal(0)))


def _ceil(value: Decimal) -> int:
    return int(value.to_integral_value(ROUND_CEILING))
