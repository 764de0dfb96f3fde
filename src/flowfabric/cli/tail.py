"""`flowfabric tail`: the output of an execution as it comes."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.options import JsonOption, NamespaceOption, Target, UrlOption, checked
from flowfabric.core.cursors import StreamCursor

__all__ = ["tail"]


def tail(
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
    attempt: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Begin with this attempt instead of the newest."),
    ] = None,
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="CURSOR",
            help="Begin behind this frame: an id from --json, milliseconds, start or end.",
        ),
    ] = "start",
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Wait for more, or print what there is.")
    ] = True,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the output of an execution live, until it ends.

    Retries are followed from attempt to attempt. Output goes to standard output; what happens to
    the execution is told on the error stream. With --json everything is one JSON object a line, and
    bytes that are no text are base64.
    """
    target = Target.of(context, url, namespace)
    checked(StreamCursor.parse, from_, "--from")
    from flowfabric.cli import tail_run  # noqa: PLC0415

    wanted = tail_run.Wanted(attempt=attempt, from_=from_, follow=follow)
    tail_run.tail(target, id_, wanted, as_json=as_json)
