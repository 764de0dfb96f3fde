"""`flowfabric signal`: answer with a waitpoint's token."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.options import JsonOption, NamespaceOption, Target, UrlOption

__all__ = ["signal"]


def signal(
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
        str,
        typer.Argument(metavar="WAITPOINT", help="The waitpoint's key or id.", show_default=False),
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The signal's name.", show_default=False)
    ],
    *,
    token: Annotated[
        str,
        typer.Option(
            metavar="TOKEN",
            envvar="FF_WAITPOINT_TOKEN",
            show_default=False,
            help="The waitpoint's token. Others on this machine can see options: prefer the "
            "variable.",
        ),
    ] = "",
    payload: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="What to send along: JSON, @file, or - for stdin."),
    ] = None,
    source: Annotated[
        str, typer.Option(metavar="IDENTITY", help="Who sends it; kept with the signal.")
    ] = "",
    idempotency_key: Annotated[
        str, typer.Option(metavar="KEY", help="A repeat with the same key does nothing.")
    ] = "",
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a wait with the token of its waitpoint.

    For services and people outside; an operator needs no token: see `flowfabric approve`.
    """
    from flowfabric.cli import signal_run  # noqa: PLC0415

    wanted = signal_run.Signal(
        waitpoint=waitpoint,
        name=name,
        token=token,
        payload=payload,
        source=source,
        idempotency_key=idempotency_key,
    )
    signal_run.send(Target.of(context, url, namespace), id_, wanted, as_json=as_json)
