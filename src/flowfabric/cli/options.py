"""Options that several commands share, and how they combine with the ones before the command."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from flowfabric.core.durations import to_ms
from flowfabric.core.errors import EngineError

__all__ = [
    "JsonOption",
    "NamespaceOption",
    "Target",
    "UrlOption",
    "names",
    "pairs",
    "seconds",
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
        return cls(url or before.url, namespace or before.namespace)


def seconds(text: str) -> float:
    """A duration such as `30s` or `1h30m`, for options."""
    try:
        return to_ms(text) / 1000
    except EngineError as error:
        raise typer.BadParameter(error.detail.removeprefix("duration: ")) from error


def names(text: str | None) -> list[str]:
    """A comma list without blanks; None is an empty one."""
    if text is None:
        return []
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise typer.BadParameter("expected names separated by commas")
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
