"""Options that several commands share, and how they combine with the ones before the command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import typer

from flowfabric.core.catalogue import meaning
from flowfabric.core.durations import to_ms
from flowfabric.core.errors import ConfigError, EngineError
from flowfabric.core.ids import validate_lane, validate_namespace

__all__ = [
    "JsonOption",
    "NamespaceOption",
    "Target",
    "UrlOption",
    "checked",
    "lane_name",
    "names",
    "pairs",
    "seconds",
    "within",
]

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The Valkey to use: valkey://host:port, unix://path, … Wins over FF_URL.",
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", metavar="NAME", help="Look at this namespace only."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Target(msgspec.Struct, frozen=True):
    """Which deployment, and which part of it, a command is about."""

    url: str | None = None
    namespace: str | None = None

    @classmethod
    def of(cls, context: typer.Context, url: str | None, namespace: str | None) -> Target:
        """What stands after the command wins over what stands before it."""
        before = context.obj if isinstance(context.obj, Target) else cls()
        target = cls(url or before.url, namespace or before.namespace)
        if target.url is not None:
            _check_url(target.url)
        if target.namespace is not None:
            checked(validate_namespace, target.namespace, "--namespace")
        return target


def _check_url(url: str) -> None:
    # Only commands that were given one need the addresses.
    from flowfabric.valkey.address import parse_url  # noqa: PLC0415

    try:
        parse_url(url)
    except ConfigError as error:
        problem = error.message.partition(": ")[2]
        raise typer.BadParameter(problem, param_hint="--url") from error


def checked(check: Callable[[str], object], value: str, option: str) -> str:
    """A value as it is, or the mistake of whoever typed the option."""
    try:
        check(value)
    except EngineError as error:
        problem = meaning(error.detail) or error.detail.partition(": ")[2] or error.detail
        raise typer.BadParameter(problem, param_hint=option) from error
    return value


def lane_name(text: str | None) -> str | None:
    """The lane of `--lane`, if there is one."""
    return None if text is None else checked(validate_lane, text, "--lane")


def within(low: str, high: str) -> Callable[[str], float]:
    """A reader of durations between two others."""

    def read(text: str) -> float:
        value = seconds(text)
        if not seconds(low) <= value <= seconds(high):
            raise typer.BadParameter(f"must be {low} to {high}, got {text}")
        return value

    return read


def seconds(text: str) -> float:
    """A duration such as `30s` or `1h30m`, for options."""
    try:
        return to_ms(text) / 1000
    except EngineError as error:
        raise typer.BadParameter(error.detail.removeprefix("duration: ")) from error


def names(text: str | None, option: str) -> list[str]:
    """A comma list without blanks; None is an empty one."""
    if text is None:
        return []
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise typer.BadParameter("expected names separated by commas", param_hint=option)
    return found


def pairs(texts: list[str] | None) -> dict[str, str]:
    """Repeated `key=value` options."""
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"expected key=value, got {text!r}", param_hint="--tag")
        found[key] = value
    return found
