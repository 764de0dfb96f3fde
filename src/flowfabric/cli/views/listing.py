"""What `flowfabric ps` prints."""

from __future__ import annotations

import sys
from typing import Self

from rich.live import Live
from rich.text import Text

from flowfabric.cli.session import NoDataYet
from flowfabric.cli.views.screen import Cell, Screen, drop_columns, print_json, state_style
from flowfabric.cli.views.text import age, clean, short_length
from flowfabric.core.contracts.executions import ExecutionSummary
from flowfabric.core.text import plural
from flowfabric.engine.overview import ExecutionListing

_OPTIONAL_COLUMNS = ("ATTEMPTS", "AGE", "LANE", "WORKER")
"""Left out in this order when the terminal is too narrow."""
_LINES_AROUND_TABLE = 4


def print_listing(listing: ExecutionListing, *, filtered: bool) -> None:
    """Print the table; on a terminal with totals below it."""
    screen = Screen()
    if not listing.rows:
        screen.line("No execution matches." if filtered else "No executions yet.")
        return
    headers, rows = _table(listing, full_ids=not screen.terminal)
    if screen.terminal:
        headers, rows = drop_columns(headers, rows, _OPTIONAL_COLUMNS, screen.console.width)
    screen.table(headers, rows)
    if screen.terminal:
        screen.line()
        screen.line((_footer(listing), "bright_black"))


def print_no_data(nothing: NoDataYet) -> None:
    """Say that there is nothing to list, and how to start."""
    screen = Screen()
    screen.line("No executions: ", nothing.message, ".")
    screen.line(("hint: ", "cyan"), nothing.hint)


def _table(listing: ExecutionListing, *, full_ids: bool) -> tuple[list[str], list[list[Cell]]]:
    rows = listing.rows
    namespaces = any(row.namespace != "default" for row in rows)
    length = None if full_ids else short_length(row.execution_id.uuid for row in rows)
    headers = ["ID", "KIND", "LANE", "STATE", "AGE", "ATTEMPTS", "WORKER"]
    if namespaces:
        headers.insert(1, "NAMESPACE")
    return headers, [_cells(row, listing.now_ms, length, namespaces=namespaces) for row in rows]


def _cells(
    row: ExecutionSummary, now_ms: int, length: int | None, *, namespaces: bool
) -> list[Cell]:
    shown = str(row.execution_id) if length is None else row.execution_id.uuid[:length]
    progress = f" {row.progress_pct}%" if row.progress_pct and row.completed_at is None else ""
    state = row.public_state.value
    cells: list[Cell] = [
        (shown, "bold"),
        row.execution_kind,
        row.lane_id,
        (state + progress, state_style(state)),
        age(now_ms - int(row.created_at)),
        str(row.total_attempt_count) if row.total_attempt_count else "-",
        row.worker_instance_id or "-",
    ]
    if namespaces:
        cells.insert(1, row.namespace)
    return cells


def _footer(listing: ExecutionListing) -> str:
    states = ", ".join(f"{count:,} {state}" for state, count in listing.states.most_common())
    shown, found = len(listing.rows), listing.states.total()
    total = plural(found, "execution")
    if not listing.complete:
        return f"the newest {shown} of the first {total}; --all reads all of them"
    text = f"{total}: {states}"
    return text if shown == found else f"{text}. Showing the newest {shown}; --all for all"


class LiveTable:
    """`ps --watch` on a terminal."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._live = Live(console=screen.console, auto_refresh=False, screen=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, listing: ExecutionListing) -> None:
        """Show this instead of what was shown before."""
        console = self._screen.console
        room = max(1, console.height - _LINES_AROUND_TABLE)
        headers, rows = _table(listing, full_ids=False)
        headers, rows = drop_columns(headers, rows, _OPTIONAL_COLUMNS, console.width)
        table = self._screen.render_table(headers, rows[:room])
        footer = Text(f"{_footer(listing)} · Ctrl-C to stop", "bright_black")
        self._live.update(self._screen.stack(table, Text(), footer), refresh=True)


class ChangePrinter:
    """`ps --watch` in a pipe: one line per execution that changed."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._before: dict[str, ExecutionSummary] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, listing: ExecutionListing) -> None:
        """Print what differs from the last call, oldest first."""
        changed = [row for row in listing.rows if self._before.get(row.execution_id) != row]
        self._before = {row.execution_id: row for row in listing.rows}
        for row in reversed(changed):
            if self._as_json:
                print_json(row)
                continue
            cells = _cells(row, listing.now_ms, None, namespaces=False)
            texts = (cell if isinstance(cell, str) else cell[0] for cell in cells)
            sys.stdout.write(clean("  ".join(texts)) + "\n")
        sys.stdout.flush()
