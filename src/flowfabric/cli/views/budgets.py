"""What `flowfabric budgets` and `flowfabric budget show` print."""

from collections.abc import Sequence

from flowfabric.cli.views.screen import Cell, Row, Screen
from flowfabric.core.contracts.budgets import BudgetStatus
from flowfabric.core.ids import ExecutionId
from flowfabric.core.text import clock, plural

COUNTED = 1000
"""How many waiting executions are counted."""
_MAX_SHOWN = 3


def _dimensions(status: BudgetStatus) -> list[str]:
    known = status.hard_limits.keys() | status.usage.keys() | status.reserved.keys()
    return sorted(known)


def _style(status: BudgetStatus, name: str) -> str:
    used, hard = status.usage.get(name, 0), status.hard_limits.get(name, 0)
    soft = status.soft_limits.get(name, 0)
    if hard and used >= hard:
        return "bold red"
    return "yellow" if soft and used > soft else ""


def _time(ms: str | None) -> str:
    return "-" if ms is None else clock(int(ms))


def _limit(number: int) -> str:
    return f"{number:,}" if number else "-"


def print_budgets(found: Sequence[BudgetStatus]) -> None:
    """Print a table with one row per dimension."""
    if not found:
        Screen().line("No budgets. Create one with: flowfabric budget create NAME DIMENSION=LIMIT")
        return
    # Every namespace has names of its own.
    repeated = len({status.label for status in found}) < len(found)
    rows = [row for each in found for row in _rows(each, with_id=repeated)]
    Screen().table(rows, ("BREACHES", "HELD", "NEXT RESET"))


def _rows(status: BudgetStatus, *, with_id: bool) -> list[Row]:
    identity: Row = {"ID": status.budget_id} if with_id else {}
    return [
        {
            "BUDGET": (status.label, "bold"),
            **identity,
            "DIMENSION": name or "-",
            "USED": (f"{status.usage.get(name, 0):,}", _style(status, name)),
            "HELD": f"{status.reserved.get(name, 0):,}",
            "LIMIT": _limit(status.hard_limits.get(name, 0)),
            "BREACHES": f"{status.breach_count:,}",
            "NEXT RESET": _time(status.next_reset_at),
        }
        for name in _dimensions(status) or [""]
    ]


def print_budget(status: BudgetStatus, waiting: Sequence[ExecutionId]) -> None:
    """Print everything about one budget."""
    screen = Screen()
    screen.line((status.label, "bold"))
    mode = "refuses" if status.enforcement_mode != "warn" else "only warns"
    facts: list[tuple[str, Cell]] = [
        ("id", status.budget_id),
        ("scope", f"{status.scope_type} {status.scope_id}"),
        ("hard limits", f"{mode}; on a breach: {status.on_hard_limit}"),
        ("breaches", f"{status.breach_count:,} hard, {status.soft_breach_count:,} soft"),
    ]
    if status.last_breach_at is not None:
        last = f"{status.last_breach_dim} at {_time(status.last_breach_at)}"
        facts.append(("last breach", last))
    if status.breached_at is not None:
        facts.append(("above its limit", (f"since {_time(status.breached_at)}", "bold red")))
    if status.next_reset_at is not None:
        facts.append(("next reset", _time(status.next_reset_at)))
    if status.last_reset_at is not None:
        facts.append(("last reset", _time(status.last_reset_at)))
    if waiting:
        names = ", ".join(each.compact for each in waiting[:_MAX_SHOWN])
        more = ", …" if len(waiting) > _MAX_SHOWN else ""
        many = plural(min(len(waiting), COUNTED), "execution")
        if len(waiting) > COUNTED:
            many = f"more than {many}"
        facts.append(("waiting", f"{many}: {names}{more}"))
    screen.facts(facts)
    if not _dimensions(status):
        return
    screen.section("dimensions")
    screen.table(
        [
            {
                "DIMENSION": name,
                "USED": (f"{status.usage.get(name, 0):,}", _style(status, name)),
                "HELD": f"{status.reserved.get(name, 0):,}",
                "SOFT LIMIT": _limit(status.soft_limits.get(name, 0)),
                "HARD LIMIT": _limit(status.hard_limits.get(name, 0)),
            }
            for name in _dimensions(status)
        ]
    )
