"""`flowfabric ps`: the executions there are."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.options import JsonOption, NamespaceOption, Target, UrlOption, lane_name, pairs
from flowfabric.core.state import PublicState

__all__ = ["ps"]


def ps(
    context: typer.Context,
    *,
    lane: Annotated[str | None, typer.Option(metavar="NAME", help="Only this lane.")] = None,
    state: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this state, such as active, waiting or failed."),
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="NAME", help="Only this task.")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="KEY=VALUE", help="Only with this tag; repeat for more."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Show so many at most.")] = 50,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all of them, however many there are.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing changes.")] = False,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List executions, newest first.

    With --json each line is one JSON object. With --watch and no terminal, an execution is printed
    again whenever it changes.
    """
    target = Target.of(context, url, namespace)
    wanted_state = None if state is None else _state(state)
    wanted_tags, lane = pairs(tag), lane_name(lane)
    # Engine and tables are loaded for a run only: `flowfabric --help` stays quick.
    from flowfabric.cli import ps_view  # noqa: PLC0415
    from flowfabric.engine.listing import Filter  # noqa: PLC0415

    where = Filter(
        namespace=target.namespace,
        lane=lane,
        kind=kind,
        state=wanted_state,
        tags=wanted_tags,
    )
    most = None if everything else limit
    if watch:
        ps_view.follow(target.url, where, most, as_json=as_json)
    else:
        ps_view.once(target.url, where, most, as_json=as_json)


def _state(text: str) -> str:
    known = [state.value for state in PublicState if state is not PublicState.RESUMABLE]
    if text not in known:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(known)}", param_hint="--state")
    return text
