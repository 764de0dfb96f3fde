"""Arguments and options that several commands share, and how their values are read."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from flowfabric.cli.errors import UsageError
from flowfabric.core.catalogue import meaning
from flowfabric.core.durations import to_ms
from flowfabric.core.errors import ConfigError, EngineError
from flowfabric.core.ids import validate_lane, validate_namespace

ID_HELP = "The execution id, its UUID, or the first characters of the UUID."
IdArgument = Annotated[str, typer.Argument(metavar="ID", help=ID_HELP, show_default=False)]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The Valkey to use: valkey://host:port, unix://path, … Overrides FF_URL.",
    ),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="Use only this namespace.")
]
LaneOption = Annotated[str | None, typer.Option("--lane", metavar="NAME", help="Only this lane.")]
LimitOption = Annotated[
    int, typer.Option("--limit", min=1, metavar="N", help="Show at most N executions.")
]
PayloadOption = Annotated[
    str | None,
    typer.Option("--payload", metavar="JSON", help="The payload: JSON, @file, or - for stdin."),
]
ByOption = Annotated[
    str | None,
    typer.Option("--as", metavar="NAME", help="Who decides. Default: your user name."),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Target(msgspec.Struct, frozen=True):
    """The options that most commands share: where to look, and how to print."""

    url: str | None = None
    namespace: str | None = None
    as_json: bool = False

    @classmethod
    def of(
        cls,
        context: typer.Context,
        url: str | None,
        namespace: str | None = None,
        *,
        as_json: bool = False,
    ) -> Target:
        """Combine the options: those after the command override those before it."""
        before = context.obj if isinstance(context.obj, Target) else cls()
        target = cls(url or before.url, namespace or before.namespace, as_json)
        if target.url is not None:
            _check_url(target.url)
        if target.namespace is not None:
            check_option(validate_namespace, target.namespace, "--namespace")
        return target


def with_shared_options(run: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes a `target` the options that make one."""
    own = inspect.signature(run, eval_str=True).parameters
    if "target" not in own:
        return run

    def start(
        context: typer.Context,
        *,
        namespace: NamespaceOption = None,
        url: UrlOption = None,
        as_json: JsonOption = False,
        **given: Any,
    ) -> None:
        run(target=Target.of(context, url, namespace, as_json=as_json), **given)

    context, *shared, _ = inspect.signature(start, eval_str=True).parameters.values()
    parameters = [context, *(each for name, each in own.items() if name != "target"), *shared]
    start.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    start.__doc__ = run.__doc__
    return start


def _check_url(url: str) -> None:
    # Imported here because few commands are given a url.
    from flowfabric.engine.valkey.connect import check_url  # noqa: PLC0415

    try:
        check_url(url)
    except ConfigError as error:
        problem = error.message.partition(": ")[2]
        raise typer.BadParameter(problem, param_hint="--url") from error


def check_option(check: Callable[[str], object], value: str, option: str) -> str:
    """Return the value, or report it as a usage error of the option."""
    try:
        check(value)
    except EngineError as error:
        problem = meaning(error.detail) or error.detail.partition(": ")[2] or error.detail
        raise typer.BadParameter(problem, param_hint=option) from error
    return value


def confirm(question: str, *, yes: bool) -> None:
    """Ask before a change that cannot be undone. Without a terminal, `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "not_confirmed", "this cannot be undone", "pass --yes to run it without a terminal"
        )
    typer.confirm(question, abort=True, err=True)


def parse_lane(text: str | None) -> str | None:
    """The value of `--lane`."""
    return None if text is None else check_option(validate_lane, text, "--lane")


def seconds_between(low: str, high: str) -> Callable[[str], float]:
    """A parser for durations from `low` to `high`."""

    def parse(text: str) -> float:
        value = parse_seconds(text)
        if not parse_seconds(low) <= value <= parse_seconds(high):
            raise typer.BadParameter(f"must be {low} to {high}, got {text}")
        return value

    return parse


def parse_seconds(text: str) -> float:
    """A duration such as `30s` or `1h30m`, in seconds."""
    try:
        return to_ms(text) / 1000
    except EngineError as error:
        raise typer.BadParameter(error.detail.removeprefix("duration: ")) from error


def parse_names(text: str | None, option: str) -> list[str]:
    """A comma-separated list of names; empty for None."""
    if text is None:
        return []
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise typer.BadParameter("expected names separated by commas", param_hint=option)
    return found


def parse_tags(texts: list[str] | None) -> dict[str, str]:
    """The values of a repeated `--tag key=value`."""
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"expected key=value, got {text!r}", param_hint="--tag")
        found[key] = value
    return found
