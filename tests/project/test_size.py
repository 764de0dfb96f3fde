"""Files stay small, and parts grow only on purpose."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

from tests.project.checkout import ROOT, SOURCE, code, name_of

LIMIT = 500
SLACK = 0.35
"""How far a budget may lie above the code: less, and every change would touch it."""
BUDGET = Path(__file__).with_name("budget.toml")


def lines(path: Path) -> int:
    """All lines of a file, blank ones and comments too."""
    return len(path.read_text().splitlines())


def part_of(path: Path) -> str:
    """What a file counts for: a package of the source, or a folder of the checkout."""
    if path.is_relative_to(SOURCE):
        inside = path.relative_to(SOURCE).parts
        return f"flowfabric.{inside[0]}" if len(inside) > 1 else "flowfabric"
    return path.relative_to(ROOT).parts[0]


def totals() -> dict[str, int]:
    """Lines by part. Tests have no budget: there are rarely too many."""
    count: Counter[str] = Counter()
    for path in code():
        count[part_of(path)] += lines(path)
    return {part: total for part, total in sorted(count.items()) if part != "tests"}


def test_no_file_is_too_long() -> None:
    long = [f"{name_of(path)}: {lines(path)} lines" for path in code() if lines(path) > LIMIT]
    assert long == [], f"split what is longer than {LIMIT} lines"


def test_no_part_outgrows_its_budget() -> None:
    budget: dict[str, int] = tomllib.loads(BUDGET.read_text())["lines"]
    found = totals()
    grown = [
        f"{part}: {total} lines, the budget is {budget.get(part, 0)}"
        for part, total in found.items()
        if total > budget.get(part, 0)
    ]
    assert grown == [], f"delete something, or raise the number in {name_of(BUDGET)} on purpose"


def test_no_budget_is_left_behind() -> None:
    budget: dict[str, int] = tomllib.loads(BUDGET.read_text())["lines"]
    found = totals()
    loose = [
        f"{part}: {found.get(part, 0)} lines, the budget is {allowed}"
        for part, allowed in budget.items()
        if allowed > found.get(part, 0) * (1 + SLACK) + 100
    ]
    assert loose == [], f"the code shrank: lower the number in {name_of(BUDGET)}"
