"""What `flowfabric doctor` prints."""

from __future__ import annotations

from collections import Counter

from flowfabric import __version__
from flowfabric.cli.views.screen import Screen
from flowfabric.core.text import plural
from flowfabric.engine.api.meta import Finding, Grade

_MARKS = {Grade.OK: ("✓", "green"), Grade.WARNING: ("⚠", "yellow"), Grade.BROKEN: ("✗", "bold red")}


def print_findings(where: str, findings: list[Finding]) -> None:
    """Print a line per check, with advice below it, and a verdict."""
    screen = Screen()
    screen.line(("FlowFabric ", "bold"), (__version__, "bold"), "  ", (where, "bright_black"))
    screen.line()
    width = max(len(each.name) for each in findings)
    for each in findings:
        mark, style = _MARKS[each.grade]
        screen.line("  ", (mark, style), f" {each.name:<{width}}  ", each.detail)
        if each.advice:
            screen.line(" " * (width + 6), ("→ ", "cyan"), each.advice)
    screen.line()
    screen.line(_verdict(Counter(each.grade for each in findings)))


def _verdict(grades: Counter[Grade]) -> tuple[str, str]:
    warnings, broken = grades[Grade.WARNING], grades[Grade.BROKEN]
    if broken:
        more = f", {plural(warnings, 'warning')}" if warnings else ""
        return f"{plural(broken, 'check')} failed{more}.", "bold red"
    if warnings:
        return f"No check failed, {plural(warnings, 'warning')}.", "yellow"
    return "All checks passed.", "green"
