"""What `flowfabric ps` prints."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.text import Text

from flowfabric.cli.views.screen import Row, Screen, drop_columns, id_cell, print_json, state_cell
from flowfabric.cli.views.text import clean, short_length
from flowfabric.core.contracts.executions import ExecutionSummary
from flowfabric.core.text import age, plural
from flowfabric.engine.overview import ExecutionListing

_OPTIONAL_COLUMNS = ("ATTEMPTS", "AGE", "LANE", "WORKER")
"""Dropped in this order when the terminal is too narrow."""
_LINES_AROUND_TABLE = 4


def print_listing(listing: ExecutionListing, *, filtered: bool) -> None:
    """Print the table; on a terminal with totals below it."""
    screen = Screen()
    if not listing.rows:
        screen.line("No execution matches." if filtered else "No executions yet.")
    elif screen.terminal:
        screen.table(_fitted(listing, screen))
        screen.note(_footer(listing))
    else:
        screen.table(_rows(listing, None))


def _fitted(listing: ExecutionListing, screen: Screen) -> Sequence[Row]:
    length = short_length(row.execution_id.uuid for row in listing.rows)
    return drop_columns(_rows(listing, length), _OPTIONAL_COLUMNS, screen.console.width)


def _rows(listing: ExecutionListing, id_length: int | None) -> list[Row]:
    namespaces = any(row.namespace != "default" for row in listing.rows)
    return [_row(row, listing.now_ms, id_length, namespace=namespaces) for row in listing.rows]


def _row(row: ExecutionSummary, now_ms: int, id_length: int | None, *, namespace: bool) -> Row:
    progress = f" {row.progress_pct}%" if row.progress_pct and row.completed_at is None else ""
    cells: Row = {"ID": id_cell(row.execution_id, id_length)}
    if namespace:
        cells["NAMESPACE"] = row.namespace
    return cells | {
        "TASK": row.execution_kind,
        "LANE": row.lane_id,
        "STATE": state_cell(row.public_state.value, progress),
        "AGE": age(now_ms - int(row.created_at)),
        "ATTEMPTS": str(row.total_attempt_count or "-"),
        "WORKER": row.worker_instance_id or "-",
    }


def _footer(listing: ExecutionListing) -> str:
    states = ", ".join(f"{count:,} {state}" for state, count in listing.states.most_common())
    shown, found = len(listing.rows), listing.states.total()
    total = plural(found, "execution")
    if not listing.complete:
        return f"Showing the newest {shown} of the first {total}; --all shows all"
    text = f"{total}: {states}" if states else total
    return text if shown == found else f"{text}. Showing the newest {shown}; --all shows all"


@contextmanager
def live_table(screen: Screen) -> Generator[Callable[[ExecutionListing], None]]:
    """`ps --watch` on a terminal: each call replaces the table."""
    console = screen.console
    with Live(console=console, auto_refresh=False, screen=True) as live:

        def show(listing: ExecutionListing) -> None:
            room = max(1, console.height - _LINES_AROUND_TABLE)
            table = screen.render_table(_fitted(listing, screen)[:room])
            footer = Text(f"{_footer(listing)} · Ctrl-C to stop", "bright_black")
            live.update(Group(table, Text(), footer), refresh=True)

        yield show


def change_printer(*, as_json: bool) -> Callable[[ExecutionListing], None]:
    """`ps --watch` in a pipe: each call prints the executions that changed, oldest first."""
    before: dict[str, ExecutionSummary] = {}

    def show(listing: ExecutionListing) -> None:
        for row in reversed(listing.rows):
            if before.get(row.execution_id) == row:
                continue
            if as_json:
                print_json(row)
                continue
            cells = _row(row, listing.now_ms, None, namespace=False).values()
            texts = (cell if isinstance(cell, str) else cell[0] for cell in cells)
            sys.stdout.write(clean("  ".join(texts)) + "\n")
        before.clear()
        before.update((row.execution_id, row) for row in listing.rows)
        sys.stdout.flush()

    return show
