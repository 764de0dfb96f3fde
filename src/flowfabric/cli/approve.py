"""`flowfabric approve`: an operator answers."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.options import JsonOption, NamespaceOption, Target, UrlOption

__all__ = ["approve"]


def approve(
    context: typer.Context,
    id_: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The id, its UUID, or the first characters of that.",
            show_default=False,
        ),
    ],
    waitpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="WAITPOINT",
            help="The waitpoint's key or id; not needed when only one is open.",
        ),
    ] = None,
    *,
    by: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", help="Who decides; your user name unless you say otherwise."
        ),
    ] = None,
    reject: Annotated[
        bool, typer.Option("--reject", help="Send `rejected` instead of `approved`.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="SIGNAL", help="Send a signal of this name instead.")
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="What to send along: JSON, @file, or - for stdin."),
    ] = None,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a wait as an operator, without a token.

    Your access to the server is the proof. Each person decides once for each signal name: a repeat
    changes nothing.
    """
    if reject and name is not None:
        raise typer.BadParameter("say either --reject or --name", param_hint="--reject")
    from flowfabric.cli import approve_run  # noqa: PLC0415

    decision = approve_run.Decision(
        waitpoint=waitpoint,
        by=by,
        name=name or ("rejected" if reject else "approved"),
        named=name is not None,
        payload=payload,
    )
    approve_run.decide(Target.of(context, url, namespace), id_, decision, as_json=as_json)
