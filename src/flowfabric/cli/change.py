"""`flowfabric cancel` and `flowfabric replay`."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.options import JsonOption, NamespaceOption, Target, UrlOption

__all__ = ["cancel", "replay"]

_ID_HELP = "The id, its UUID, or the first characters of that."


def cancel(
    context: typer.Context,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help=_ID_HELP, show_default=False)],
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; kept with the execution.")] = "",
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End executions that have not ended yet.

    Whatever they do or wait for: a handler that is running learns of it with its next lease
    renewal. One that has ended is refused; the others are cancelled all the same.
    """
    from flowfabric.cli import change_run  # noqa: PLC0415

    target = Target.of(context, url, namespace)
    raise typer.Exit(change_run.cancel(target, ids, reason, as_json=as_json))


def replay(
    context: typer.Context,
    id_: Annotated[str, typer.Argument(metavar="ID", help=_ID_HELP, show_default=False)],
    *,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Why; kept with the new attempt.")
    ] = "",
    expected_replay_count: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Only if it was replayed N times before: a repeat is harmless."
        ),
    ] = None,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an execution that has ended once more, under the same id."""
    from flowfabric.cli import change_run  # noqa: PLC0415

    target = Target.of(context, url, namespace)
    change_run.replay(target, id_, reason, expected_replay_count, as_json=as_json)
