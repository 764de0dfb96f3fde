"""`flowfabric doctor`."""

from collections import Counter
from contextlib import closing
from typing import Annotated

import typer

from flowfabric import __version__
from flowfabric.cli.options import Target, flag
from flowfabric.cli.session import CONNECT_S, describe_location
from flowfabric.cli.views.screen import Cell, Screen, print_json
from flowfabric.core.text import plural
from flowfabric.engine.api.meta import Finding, Grade
from flowfabric.engine.valkey.connect import ServerLocation

_MARKS = {Grade.OK: ("✓", "green"), Grade.WARNING: ("⚠", "yellow"), Grade.BROKEN: ("✗", "bold red")}
_PREPARE = flag("--prepare", "Set up the Valkey first: partition counts and function library.")


async def doctor(target: Target, *, prepare: Annotated[bool, _PREPARE] = False) -> None:
    """Check the deployment and suggest fixes.

    Exits with status 1 if a check fails; warnings do not count.
    """
    with closing(ServerLocation(target.url)) as location:
        checks = await location.diagnose(
            target.namespace, prepare=prepare, connect_timeout=CONNECT_S
        )
        where = describe_location(location)
    sound = all(check.grade is not Grade.BROKEN for check in checks)
    if target.as_json:
        print_json({"ok": sound, "version": __version__, "address": where, "checks": checks})
    else:
        _print_findings(where, checks)
    if not sound:
        raise typer.Exit(1)


def _print_findings(where: str, findings: list[Finding]) -> None:
    screen = Screen()
    screen.line((f"FlowFabric {__version__}", "bold"), "  ", (where, "bright_black"))
    screen.line()
    width = max(len(each.name) for each in findings)
    for each in findings:
        screen.line("  ", _MARKS[each.grade], f" {each.name:<{width}}  ", each.detail)
        if each.advice:
            screen.line(" " * (width + 6), ("→ ", "cyan"), each.advice)
    screen.line()
    screen.line(_verdict(Counter(each.grade for each in findings)))


def _verdict(grades: Counter[Grade]) -> Cell:
    warnings, broken = grades[Grade.WARNING], grades[Grade.BROKEN]
    if broken:
        more = f", {plural(warnings, 'warning')}" if warnings else ""
        return f"{plural(broken, 'check')} failed{more}.", "bold red"
    if warnings:
        return f"No check failed, {plural(warnings, 'warning')}.", "yellow"
    return "All checks passed.", "green"
