"""Log records on standard error: readable lines, or one JSON object per line."""

import contextlib
import logging
import os
import queue
import re
import sys
import threading
from datetime import UTC, datetime
from textwrap import indent
from typing import Any, Literal, TextIO, get_args

from flowfabric.cli.early import take_early_records
from flowfabric.cli.views.text import clean, json_line
from flowfabric.core.errors import ConfigError
from flowfabric.core.forks import forget_on_fork
from flowfabric.core.ids import ExecutionId
from flowfabric.core.text import clock, compact_ids
from flowfabric.engine.layers.audit import audit_log, ends
from flowfabric.server.error_reports import start_error_reports

Level = Literal["debug", "info", "warning", "error"]

_MAX_WAITING = 10_000
_FLUSH_S = 2.0
_IDS = frozenset({"execution_id", "attempt_index", "kind", "lane", "worker_caps_hash"})
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COMPLETE = ("flowfabric.sdk.", "flowfabric.app.", "flowfabric.engine.outage", "flowfabric.cli.")
"""Loggers whose messages are complete for people; their fields are only for machines."""
_TASK = "flowfabric.task."
_TARGETS = {audit_log.name: "audit"}
"""Loggers with a different name in JSON records (10 §8)."""
_COLOURS = {"DEBUG": "90", "INFO": "36", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}


def set_up_logs(level: Level | None, *, as_json: bool, process: int | None = None) -> bool:
    """Log to standard error; FF_LOG_LEVEL and FF_LOG_FORMAT set the defaults.

    `process` labels every line of one of several processes. Errors also go to Sentry if
    FF_SENTRY_DSN is set. Returns whether it logs JSON.
    """
    default_level, default_format = log_settings()
    minimum = level or default_level
    as_json = as_json or default_format == "json"
    start_error_reports(os.environ)
    handler = BackgroundHandler(sys.stderr)
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    text = TextFormatter(colour=colour, process=process)
    handler.setFormatter(JsonFormatter(process) if as_json else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    if not as_json:
        # In text, the summary of each second would repeat the lines about tasks.
        ends.setLevel(logging.CRITICAL)
    root.setLevel(minimum.upper())
    for record in take_early_records():
        if record.levelno >= root.level:
            handler.handle(record)
    return as_json


def log_settings() -> tuple[str, str]:
    """The level and the format that the environment sets; a bad one is a `ConfigError`."""
    level = _choice("FF_LOG_LEVEL", get_args(Level), "info")
    return level, _choice("FF_LOG_FORMAT", ("text", "json"), "text")


def flush_logs() -> None:
    """Wait until everything logged so far is written."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _choice(variable: str, known: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, "").strip().lower() or default
    if value not in known:
        problem = f"invalid value for {variable}: must be one of {', '.join(known)}, got {value!r}"
        raise ConfigError("environment", problem)
    return value


class BackgroundHandler(logging.Handler):
    """Writes lines from its own thread, so that a full pipe does not block the worker.

    When its queue is full, it drops lines and later logs how many.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._dropped = 0
        self.forget()
        forget_on_fork(self)

    def forget(self) -> None:
        """In a forked child: start over, because the parent writes the queued lines."""
        self._lines: queue.Queue[str] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line, without waiting."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - logging must not raise
            line = f"cannot format a log record of {record.name}: {type(error).__name__}"
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="ff-log", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait a short time until everything is written."""
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, _FLUSH_S)

    def _write_all(self) -> None:
        while True:
            self._write(self._lines.get())
            if self._dropped and self._lines.empty():
                dropped, self._dropped = self._dropped, 0
                text = f"dropped {dropped} log lines: standard error was blocked"
                about = {"name": __name__, "levelname": "WARNING", "msg": text}
                self._write(self.format(logging.makeLogRecord(about)))
            self._lines.task_done()

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="backslashreplace")
        # The pipe may be broken or the stream closed.
        with contextlib.suppress(OSError, ValueError):
            # Not through the stream object: a blocked write would hold its lock until exit.
            descriptor = self._stream.fileno()
            while data:
                data = data[os.write(descriptor, data) :]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields passed with `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`12:03:04.567 INFO  message  field=value …`."""

    def __init__(self, *, colour: bool, process: int | None = None) -> None:
        super().__init__()
        self._colour = colour
        self._label = "" if process is None else f"[{process}] "

    def format(self, record: logging.LogRecord) -> str:
        """One line with the fields that the message does not mention, then the traceback."""
        level = f"{record.levelname:<7}"
        message = said = clean(compact_ids(record.getMessage()))
        extra = ""
        of_us, fields = record.name.startswith(_COMPLETE), _fields(record)
        if record.name.startswith(_TASK) and fields.keys() >= _IDS:
            short = ExecutionId.trusted(fields["execution_id"]).short
            message = f"{fields['kind']} {short}: {message} (attempt {fields['attempt_index'] + 1})"
            fields = {name: value for name, value in fields.items() if name not in _IDS}
        if not of_us:
            shown = {name: _shown(value) for name, value in fields.items() if name != "action"}
            extra = "  ".join(f"{n}={v}" for n, v in shown.items() if not _mentions(said, v))
        if self._colour:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
            extra = extra and f"\x1b[90m{extra}\x1b[0m"
        _, time = clock(int(record.created * 1000)).split()
        lines = [f"{time} {level} {self._label}{message}" + (f"  {extra}" if extra else "")]
        if record.exc_info:
            lines.append(_below(self.formatException(record.exc_info)))
        if record.stack_info:
            lines.append(_below(record.stack_info))
        return "\n".join(lines)


def _below(text: str) -> str:
    return indent(clean(text, keep="\n"), "  ")


def _mentions(message: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", message) is not None


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return clean(",".join(map(str, value)))  # pyright: ignore[reportUnknownArgumentType]
    return clean(compact_ids(str(value)))


class JsonFormatter(logging.Formatter):
    """`{"time":…,"level":…,"target":…,"message":…,…}`."""

    def __init__(self, process: int | None = None) -> None:
        super().__init__()
        self._label = {} if process is None else {"worker_process": process}

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        content = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "target": _TARGETS.get(record.name, record.name),
            "message": record.getMessage(),
            **self._label,
            **_fields(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            content["stack"] = record.stack_info
        return json_line(content, enc_hook=str)
