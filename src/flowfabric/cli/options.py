"""Arguments and options that several commands share, and how their values are read."""

import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import typer

from flowfabric.cli.errors import UsageError
from flowfabric.core.catalogue import meaning
from flowfabric.core.durations import to_ms
from flowfabric.core.errors import ConfigError, EngineError
from flowfabric.core.ids import validate_lane, validate_namespace


def argument(metavar: str, text: str, **more: Any) -> Any:
    """A positional argument and its help."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, **more)


def value(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """An option that takes a value, and its help."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def flag(names: str, text: str, **more: Any) -> Any:
    """An option without a value, and its help."""
    return typer.Option(*names.split(), help=text, **more)


def duration(text: str, low: str = "", high: str = "") -> Any:
    """An option that takes a duration, within limits if given, and returns seconds."""

    def parse(given: str) -> float:
        try:
            ms = to_ms(given)
        except EngineError as error:
            raise typer.BadParameter(error.detail.removeprefix("duration: ")) from error
        if low and not to_ms(low) <= ms <= to_ms(high):
            raise typer.BadParameter(f"must be {low} to {high}, got {given}")
        return ms / 1000

    return value("DURATION", text, parser=parse)


def checked(check: Callable[[str], object], text: str) -> str:
    """The text, if it passes the check."""
    try:
        check(text)
    except EngineError as error:
        problem = meaning(error.detail) or error.detail.partition(": ")[2] or error.detail
        raise typer.BadParameter(problem) from error
    except ConfigError as error:
        raise typer.BadParameter(error.message.partition(": ")[2]) from error
    return text


def checked_names(check: Callable[[str], object], text: str) -> list[str]:
    """Names separated by commas, if each passes the check."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise typer.BadParameter("expected names separated by commas")
    return [checked(check, name) for name in found]


def _check_url(url: str) -> None:
    # Few commands get a url, and this loads the engine.
    from flowfabric.engine.connect import check_url  # noqa: PLC0415

    check_url(url)


_QUOTING = """quote it for the shell: --payload '{"ok": true}' or, for a string, '"text"'"""


def read_payload(text: str) -> bytes:
    """JSON from the argument itself, a file, or standard input."""
    if text == "-":
        raw = sys.stdin.buffer.read()
    elif text.startswith("@"):
        try:
            raw = Path(text[1:]).expanduser().read_bytes()
        except OSError as error:
            raise UsageError("invalid_input", f"--payload: {error.strerror}: {text[1:]}") from error
    else:
        raw = text.encode(errors="surrogateescape")
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError("invalid_input", f"--payload: not JSON: {error}", _QUOTING) from error
    return raw


def parse_tag(text: str) -> str:
    """The text, if it has the form key=value."""
    if text.find("=") < 1:
        raise typer.BadParameter(f"expected key=value, got {text!r}")
    return text


def pairs(tags: Sequence[str] | None) -> dict[str, str]:
    """The values of `--tag` by their keys."""
    return dict(text.split("=", 1) for text in tags or ())


_ID = "The execution id, its UUID, or the first characters of either."
Id = Annotated[str, argument("ID", _ID)]
OptionalId = Annotated[str | None, argument("ID", _ID)]
OptionalIds = Annotated[list[str] | None, argument("ID", _ID)]
FlowId = Annotated[str, argument("ID", "The flow id, or its first characters.")]
_URL = (
    "The address of Valkey or of a FlowFabric server, such as valkey://host:port, unix://path or "
    "http://host:9090. Overrides FF_URL."
)
_VALKEY_URL = "The address of Valkey, such as valkey://host:port or unix://path. Overrides FF_URL."
Url = Annotated[str | None, value("URL", _URL, "--url", parser=partial(checked, _check_url))]
ValkeyUrl = Annotated[
    str | None, value("URL", _VALKEY_URL, "--url", parser=partial(checked, _check_url))
]
parse_namespace = partial(checked, validate_namespace)
_namespace = partial(value, "NAME", parser=parse_namespace)
Namespace = Annotated[
    str | None, _namespace("The namespace to use. The default depends on the command.")
]
AnyNamespace = Annotated[str | None, _namespace("Use only this namespace. Default: all.")]
OneNamespace = Annotated[
    str | None, _namespace("The namespace to use. Default: the application's, or `default`.")
]
parse_lane = partial(checked, validate_lane)
Lane = Annotated[str | None, value("NAME", "Only this lane.", parser=parse_lane)]
Tags = Annotated[
    list[str] | None,
    value("KEY=VALUE", "Only executions with this tag. Repeatable.", parser=parse_tag),
]
Limit = Annotated[int, value("N", "Show at most N executions.", min=1)]
Payload = Annotated[
    bytes | None, value("JSON", "The payload: JSON, @file, or - for stdin.", parser=read_payload)
]
_BY = "Your name, to store with the change. Default: your user name."
By = Annotated[str | None, value("NAME", _BY, "--as")]
Yes = Annotated[bool, flag("--yes -y", "Do not ask for confirmation.")]
DryRun = Annotated[bool, flag("--dry-run", "Count the executions, but change nothing.")]
Json = Annotated[bool, flag("--json", "Print JSON.")]
JsonLogs = Annotated[bool, flag("--json", "Log one JSON object per line; print no other text.")]


class Target(msgspec.Struct, frozen=True):
    """The deployment and the namespace that a command uses, and how it prints."""

    url: str | None = None
    namespace: str | None = None
    as_json: bool = False

    @classmethod
    def of(
        cls, context: typer.Context, url: str | None, namespace: str | None, *, as_json: bool
    ) -> Self:
        """Combine the options; those after the command override those before it."""
        before: Target = context.obj or Target()
        return cls(url or before.url, namespace or before.namespace, as_json)


class Namespaced(Target, frozen=True):
    """The target of a command that uses exactly one namespace."""


class Deployment(Target, frozen=True):
    """The target of a command that is not about one namespace."""


def confirm(question: str, *, yes: bool, problem: str = "this cannot be undone") -> None:
    """Ask before a change that cannot be undone. Without a terminal, `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("not_confirmed", problem, "pass --yes to run it without a terminal")
    # asyncio's own handler for Ctrl-C would only cancel the task that waits here.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    typer.confirm(question, abort=True, err=True)
    signal.signal(signal.SIGINT, before)
