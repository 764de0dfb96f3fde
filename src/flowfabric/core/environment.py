"""Settings in environment variables. An empty variable counts as not set."""

import re
from collections.abc import Mapping

from flowfabric.core.errors import ConfigError

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off", ""})
_digits = re.compile(r"[0-9]{1,20}").fullmatch


def invalid(name: str, problem: str) -> ConfigError:
    """The error for a variable with an invalid value."""
    return ConfigError("environment", f"invalid value for {name}: {problem}")


def flag(environ: Mapping[str, str], name: str) -> bool:
    """Whether a setting is on.

    >>> flag({"FF_TLS": "yes"}, "FF_TLS"), flag({}, "FF_TLS")
    (True, False)
    """
    text = environ.get(name, "").strip().lower()
    if text in _YES:
        return True
    if text in _NO:
        return False
    # A misspelled `true` must not mean `false`.
    raise invalid(name, f"write 1 or 0 (true, yes, on; false, no, off), not {text!r}")


def whole_number(
    environ: Mapping[str, str], name: str, default: int, low: int, high: int | None = None
) -> int:
    """A whole number within limits.

    >>> whole_number({"FF_PORT": "7000"}, "FF_PORT", 6379, 1, 65535)
    7000
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    wanted = f"a whole number of at least {low}" if high is None else f"{low} to {high}"
    if not _digits(text) or int(text) < low or (high is not None and int(text) > high):
        raise invalid(name, f"must be {wanted}, not {text!r}")
    return int(text)
