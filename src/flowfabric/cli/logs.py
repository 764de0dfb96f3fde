"""Log records on standard error: readable lines, or one JSON object a line."""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from flowfabric.cli.words import clean
from flowfabric.core.errors import ConfigError

__all__ = ["LEVELS", "JsonFormatter", "TextFormatter", "set_up"]

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLOURS = {"DEBUG": "90", "INFO": "36", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}


def set_up(level: str | None, *, as_json: bool) -> bool:
    """Send everything at or above `level` to standard error; True when it is JSON.

    Without a level the environment decides: `FF_LOG_LEVEL` and `FF_LOG_FORMAT`.
    """
    level = level or _choice("FF_LOG_LEVEL", LEVELS, "info")
    as_json = as_json or _choice("FF_LOG_FORMAT", FORMATS, "text") == "json"
    handler = logging.StreamHandler(sys.stderr)
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter(colour=colour))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    return as_json


def _choice(variable: str, known: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, "").strip().lower() or default
    if value not in known:
        raise ConfigError(
            "environment",
            f"invalid value for {variable}: must be one of {', '.join(known)}, got {value!r}",
        )
    return value


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller added with `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`12:03:04.567 INFO  message  field=value …`."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """One line, and below it the traceback if there is one."""
        moment = datetime.fromtimestamp(record.created, UTC).astimezone()
        level = f"{record.levelname:<7}"
        fields = {name: value for name, value in _fields(record).items() if name != "action"}
        extra = "  ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
            extra = f"\x1b[90m{extra}\x1b[0m" if extra else ""
        stamp = moment.strftime("%H:%M:%S.") + f"{int(record.msecs):03d}"
        line = f"{stamp} {level} {clean(record.getMessage())}" + (f"  {extra}" if extra else "")
        if record.exc_info:
            line += "\n" + clean(self.formatException(record.exc_info))
        return line


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return clean(",".join(map(str, value)))  # pyright: ignore[reportUnknownArgumentType]
    return clean(str(value))


class JsonFormatter(logging.Formatter):
    """`{"time":…,"level":…,"target":…,"message":…,…}`."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        moment = datetime.fromtimestamp(record.created, UTC)
        content: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "target": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(content, enc_hook=str).decode()
