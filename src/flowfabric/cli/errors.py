"""How commands report errors, to people and as JSON."""

from __future__ import annotations

import contextlib
import os
import re
import sys

import msgspec
import typer

from flowfabric.cli.views.text import clean, json_line
from flowfabric.core.errors import ConfigError, EngineError, FlowFabricError, TransportError


class CliError(FlowFabricError):
    """An error of the command line itself."""

    def __init__(self, code: str, message: str, hint: str = "", *details: str) -> None:
        super().__init__(code, message, hint, *details)
        self.code = code
        self.message = message
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class UsageError(CliError):
    """A wrong argument that only the command itself can detect."""


class Report(msgspec.Struct, frozen=True):
    """The parts of an error message."""

    code: str
    message: str
    details: tuple[str, ...] = ()
    hint: str = ""


def describe(error: FlowFabricError) -> Report:
    """The parts of any FlowFabric error."""
    match error:
        case CliError():
            return Report(error.code, error.message, error.details, error.hint)
        case TransportError():
            return Report(error.code, error.message or error.kind, (error.kind,), error.hint)
        case EngineError():
            return Report(error.code, error.explanation, error.details, error.hint)
        case ConfigError():
            field = f"{error.context}.{error.field}: " if error.field else ""
            return Report("config", f"{field}{error.message}", (error.context,))
        case _:
            code = getattr(error, "code", "") or _snake(type(error).__name__)
            return Report(code, str(error))


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def print_error(error: Report, *, as_json: bool) -> None:
    """Print the error and its hint to standard error, as text or as one JSON object."""
    if as_json:
        line = json_line({"error": error})
    else:
        # Some messages list what to choose from, one per line.
        body = clean(f"{error.code}: {error.message}" if error.message else error.code, keep="\n")
        line = f"{_coloured('error:', typer.colors.RED, bold=True)} {body}"
        if error.hint:
            line += f"\n{_coloured('hint:', typer.colors.CYAN)} {clean(error.hint)}"
    # If standard error cannot be written, the exit code must still be right.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def exit_code(error: FlowFabricError) -> int:
    """2 for a usage error, otherwise 1."""
    return 2 if isinstance(error, UsageError) else 1


def report(error: FlowFabricError, *, as_json: bool) -> None:
    """Print a FlowFabric error."""
    print_error(describe(error), as_json=as_json)


def _coloured(text: str, colour: str, *, bold: bool = False) -> str:
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        return text
    return typer.style(text, fg=colour, bold=bold)
