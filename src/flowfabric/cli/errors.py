"""How commands report errors, and how they cope with closed or limited standard streams."""

import os
import re
import sys
from typing import Any, Literal, TextIO

import typer

from flowfabric.cli.views.text import clean, json_line
from flowfabric.core.errors import (
    BackendNotBuilt,
    ConfigError,
    EngineError,
    FlowFabricError,
    TransportError,
)
from flowfabric.core.text import compact_ids


class CliError(FlowFabricError):
    """An error of the command line itself."""

    def __init__(self, code: str, message: str, hint: str = "", *details: str) -> None:
        super().__init__(code, message, hint, *details)
        self.code = code
        self.message = message
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.message else self.code


class UsageError(CliError):
    """A wrong argument that only the command itself can detect."""


def report(error: FlowFabricError, *, as_json: bool) -> int:
    """Print an error and its hint to standard error. Returns the exit status."""
    shown = _described(error)
    if as_json:
        names = ("code", "message", "details", "hint")
        line = json_line({"error": {name: getattr(shown, name) for name in names}})
    else:
        # Some messages list what to choose from, one per line.
        text = clean(compact_ids(str(shown)), keep="\n")
        line = f"{_coloured('error:', typer.colors.RED, bold=True)} {text}"
        if shown.hint:
            line += f"\n{_coloured('hint:', typer.colors.CYAN)} {clean(shown.hint)}"
    try:
        sys.stderr.write(f"{line}\n")
    except OSError:
        # If standard error cannot be written, the exit status must still be right.
        discard_output(sys.stderr)
    return 2 if isinstance(error, (UsageError, BackendNotBuilt)) else 1


def _described(error: FlowFabricError) -> CliError:
    match error:
        case CliError():
            return error
        case TransportError():
            return CliError(error.code, error.message or error.kind, error.hint, error.kind)
        case EngineError():
            return CliError(error.code, error.explanation, error.hint, *error.details)
        case ConfigError():
            field = f"{error.context}.{error.field}: " if error.field else ""
            return CliError("config", f"{field}{error.message}", "", error.context)
        case _:
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
            return CliError(getattr(error, "code", "") or name, str(error))


def _coloured(text: str, colour: str, *, bold: bool = False) -> str:
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        return text
    return typer.style(text, fg=colour, bold=bold)


def prepare_streams() -> None:
    """Open closed standard streams, and make both able to print any text."""
    # Read-only, so that writing to a closed output still fails. A closed error stream discards
    # everything: there is nowhere to report its errors.
    sys.stdout = sys.stdout or _opened(1, os.O_RDONLY)
    sys.stderr = sys.stderr or _opened(2, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        # Replace characters that the encoding lacks; they must not stop the command.
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def discard_output(stream: TextIO) -> None:
    """Drop buffered output; otherwise the interpreter tries to write it again at exit."""
    _redirect_to_null(stream.fileno(), os.O_WRONLY)


def _opened(number: Literal[1, 2], mode: int) -> Any:
    """Open a stream on its usual descriptor, so that no socket gets that number."""
    _redirect_to_null(number, mode)
    return open(number, "w", encoding="utf-8", closefd=False)


def _redirect_to_null(number: int, mode: int) -> None:
    null = os.open(os.devnull, mode)
    if null != number:
        os.dup2(null, number)
        os.close(null)
