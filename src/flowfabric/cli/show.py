"""`flowfabric show`: everything about one execution."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.options import JsonOption, NamespaceOption, Target, UrlOption

__all__ = ["show"]


def show(
    context: typer.Context,
    id_: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The id, its UUID, or the first characters of that.",
            show_default=False,
        ),
    ],
    *,
    full: Annotated[
        bool, typer.Option("--full", help="Print payload, result and policy in full.")
    ] = False,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything about one execution.

    State, attempts, history, tags, policy, payload and result; for one that is not running, what
    it waits for.
    """
    from flowfabric.cli import show_view  # noqa: PLC0415

    target = Target.of(context, url, namespace)
    show_view.show(target, id_, full=full, as_json=as_json)
