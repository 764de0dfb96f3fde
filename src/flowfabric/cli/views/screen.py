"""Tables and lists: coloured and fitted to a terminal, plain and complete in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flowfabric.cli.views.text import clean, json_line
from flowfabric.core.ids import enc_hook
from flowfabric.core.state import PublicState

Cell = str | tuple[str, str]
"""Text, or text with a style."""

_WIDEST = 40
"""Only the last column may need more than this."""

_STYLES = {
    PublicState.WAITING: "yellow",
    PublicState.DELAYED: "blue",
    PublicState.RATE_LIMITED: "yellow",
    PublicState.WAITING_CHILDREN: "yellow",
    PublicState.ACTIVE: "bold cyan",
    PublicState.SUSPENDED: "magenta",
    PublicState.RESUMABLE: "magenta",
    PublicState.COMPLETED: "green",
    PublicState.FAILED: "bold red",
    PublicState.CANCELLED: "bright_black",
    PublicState.EXPIRED: "red",
    PublicState.SKIPPED: "bright_black",
}


def state_style(state: str) -> str:
    """The style of a public state; empty for an unknown one."""
    try:
        return _STYLES[PublicState(state)]
    except ValueError:
        return ""


def print_json(value: object) -> None:
    """Print one JSON value on its own line."""
    sys.stdout.write(json_line(value, enc_hook) + "\n")


def _text(cell: Cell) -> Text:
    # Not markup: stored text may contain brackets.
    return Text(_plain(cell), "" if isinstance(cell, str) else cell[1])


def _plain(cell: Cell) -> str:
    return clean(cell if isinstance(cell, str) else cell[0])


class Screen:
    """Standard output: a terminal or a pipe. Everything printed is cleaned."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, emoji=False, markup=False)
        self.terminal = self.console.is_terminal

    def line(self, *cells: Cell) -> None:
        """Print one line of styled pieces, without wrapping it."""
        self.console.print(Text.assemble(*(_text(cell) for cell in cells)), soft_wrap=True)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table. A pipe gets no colours and nothing is cut."""
        if self.terminal:
            self.console.print(self.render_table(headers, rows, wrap=True))
            return
        for row in _aligned([headers, *[[_plain(cell) for cell in row] for row in rows]]):
            sys.stdout.write(f"{row}\n")

    def render_table(
        self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], *, wrap: bool = False
    ) -> Table:
        """A table for a terminal. If it is too wide, the last column is wrapped or cut."""
        table = Table(box=None, pad_edge=False, header_style="bright_black", padding=(0, 2, 0, 0))
        for column, header in enumerate(headers):
            last = column == len(headers) - 1
            widest = max([len(header), *(len(_plain(row[column])) for row in rows)])
            needed = None if last else min(widest, _WIDEST)
            folds = wrap and last
            overflow = "fold" if folds else "ellipsis"
            table.add_column(header, no_wrap=not folds, overflow=overflow, min_width=needed)
        for row in rows:
            table.add_row(*(_text(cell) for cell in row))
        return table

    def section(self, title: str) -> None:
        """Print a heading with an empty line above it."""
        self.line()
        self.line((title, "bold"))

    def facts(self, facts: Sequence[tuple[str, Cell]]) -> None:
        """Print names and values; a long value wraps beside its name."""
        if not self.terminal:
            width = max((len(name) for name, _ in facts), default=0)
            for name, cell in facts:
                sys.stdout.write(f"  {name:<{width}}  {_plain(cell)}\n")
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bright_black", no_wrap=True)
        table.add_column(overflow="fold")
        for name, cell in facts:
            table.add_row(name, _text(cell))
        self.console.print(Padding(table, (0, 0, 0, 2)))

    def block(self, text: str) -> None:
        """Print text of several lines, indented."""
        for line in map(clean, text.splitlines() or [""]):
            if self.terminal:
                self.console.print(Padding(Text(line), (0, 0, 0, 2)))
            else:
                sys.stdout.write(f"  {line}\n")

    def stack(self, *parts: RenderableType) -> Group:
        """Several renderables below each other, for a live display."""
        return Group(*parts)


def drop_columns(
    headers: list[str], rows: list[list[Cell]], optional: Sequence[str], width: int
) -> tuple[list[str], list[list[Cell]]]:
    """Drop optional columns, in the order given, until the table fits the width."""
    for name in optional:
        if _min_width(headers, rows) <= width:
            break
        column = headers.index(name)
        headers = headers[:column] + headers[column + 1 :]
        rows = [row[:column] + row[column + 1 :] for row in rows]
    return headers, rows


def _min_width(headers: list[str], rows: list[list[Cell]]) -> int:
    # The last column can be folded down to the width of its header.
    widths = [
        min(_WIDEST, max([len(header), *(len(_plain(row[column])) for row in rows)]))
        for column, header in enumerate(headers[:-1])
    ]
    return sum(widths) + 2 * len(widths) + len(headers[-1])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
