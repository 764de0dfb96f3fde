"""`flowfabric doctor`: is this deployment well?"""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.options import JsonOption, NamespaceOption, Target, UrlOption

__all__ = ["doctor"]


def doctor(
    context: typer.Context,
    *,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare", help="Set the Valkey up first: partition counts, function library."
        ),
    ] = False,
    namespace: NamespaceOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the deployment, and say what to do about each finding.

    Ends with 1 when something is broken; warnings alone are no failure.
    """
    from flowfabric.cli import doctor_view  # noqa: PLC0415

    target = Target.of(context, url, namespace)
    if not doctor_view.examine(target, prepare=prepare, as_json=as_json):
        raise typer.Exit(1)
