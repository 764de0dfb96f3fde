"""`flowfabric doctor`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from flowfabric import __version__
from flowfabric.cli.options import Target
from flowfabric.cli.session import CONNECT_S
from flowfabric.cli.views.doctor import print_findings
from flowfabric.cli.views.screen import print_json
from flowfabric.core.text import shown
from flowfabric.engine.api.meta import Finding, Grade
from flowfabric.engine.valkey.connect import ServerLocation, data_folder


def doctor(
    target: Target,
    *,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare", help="Set up the Valkey first: partition counts and function library."
        ),
    ] = False,
) -> None:
    """Check the deployment and suggest fixes.

    Exits with status 1 if a check fails; warnings do not count.
    """
    location = ServerLocation(target.url)
    embedded = f"embedded Valkey in {shown(str(data_folder()))}"
    where = embedded if location.embedded else location.peer
    checks = asyncio.run(_run_checks(location, target.namespace, prepare=prepare))
    sound = all(check.grade is not Grade.BROKEN for check in checks)
    if target.as_json:
        print_json({"ok": sound, "version": __version__, "address": where, "checks": checks})
    else:
        print_findings(where, checks)
    if not sound:
        raise typer.Exit(1)


async def _run_checks(
    location: ServerLocation, namespace: str | None, *, prepare: bool
) -> list[Finding]:
    try:
        return await location.diagnose(namespace, prepare=prepare, connect_timeout=CONNECT_S)
    finally:
        location.close()
