"""What a person, or a program, reads when a command cannot do what was asked."""

from __future__ import annotations

import contextlib
import os
import re
import sys

import msgspec
import typer

from flowfabric.core.errors import ConfigError, EngineError, FlowFabricError, TransportError

__all__ = ["CliError", "Report", "UsageError", "describe", "exit_code", "print_error", "report"]


class CliError(FlowFabricError):
    """A problem that only the command line knows."""

    def __init__(self, code: str, message: str, hint: str = "", *details: str) -> None:
        super().__init__(code, message, hint, *details)
        self.code = code
        self.message = message
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class UsageError(CliError):
    """The command was typed wrongly, as only a look at its values tells."""


class Report(msgspec.Struct, frozen=True):
    """An error in the parts that both forms of output are made of."""

    code: str
    message: str
    details: tuple[str, ...] = ()
    hint: str = ""


def describe(error: FlowFabricError) -> Report:
    """The parts of any error of ours."""
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


def print_error(what: Report, *, as_json: bool) -> None:
    """One line on the error stream, and below it what to do; or one JSON object."""
    if as_json:
        line = msgspec.json.encode({"error": what}).decode()
    else:
        head = _coloured("error:", typer.colors.RED, bold=True)
        body = f"{what.code}: {what.message}" if what.message else what.code
        hint = f"\n{_coloured('hint:', typer.colors.CYAN)} {what.hint}" if what.hint else ""
        line = f"{head} {body}{hint}"
    # A full disk behind the error stream must not hide the exit code behind a traceback.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def exit_code(error: FlowFabricError) -> int:
    """2 when the command was typed wrongly, 1 when it failed."""
    return 2 if isinstance(error, UsageError) else 1


def report(error: FlowFabricError, *, as_json: bool) -> None:
    """Print an error of ours."""
    print_error(describe(error), as_json=as_json)


def _coloured(text: str, colour: str, *, bold: bool = False) -> str:
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        return text
    return typer.style(text, fg=colour, bold=bold)
