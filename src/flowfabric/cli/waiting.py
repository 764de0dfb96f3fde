"""`flowfabric waiting`: who waits for an answer."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.options import JsonOption, NamespaceOption, Target, UrlOption, lane_name

__all__ = ["waiting"]


def waiting(
    context: typer.Context,
    id_: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="Only this execution: its id, UUID, or a beginning of that."
        ),
    ] = None,
    *,
    lane: Annotated[str | None, typer.Option(metavar="NAME", help="Only this lane.")] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Show so many at most.")] = 50,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List executions that wait for an answer.

    Those that time out soonest come first. Shows what each waits for, since when and until when.
    A token is told by its signing key and fingerprint; the token itself is never shown. With --json
    each line is one JSON object.
    """
    from flowfabric.cli import waiting_view  # noqa: PLC0415

    target = Target.of(context, url, namespace)
    if id_ is None:
        waiting_view.all_of_them(target, lane_name(lane), limit, as_json=as_json)
    else:
        waiting_view.one(target, id_, as_json=as_json)
