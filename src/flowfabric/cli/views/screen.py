"""Tables and lists: coloured and fitted to a terminal, plain and complete in a pipe."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flowfabric.cli.views.text import clean, json_line
from flowfabric.core.ids import ExecutionId, enc_hook
from flowfabric.core.text import iso

Cell = str | tuple[str, str]
"""Text, or text with a style."""
Row = dict[str, Cell]
"""The cells of a table row by their headers. All rows of a table have the same headers."""

_SPACE = 2
"""The space between columns."""
_READABLE, _READABLE_LAST, _LEAST = 24, 18, 14
"""How narrow columns become: before optional ones are dropped, the last one, and after that."""

_STATE_STYLES = {
    "waiting": "yellow",
    "delayed": "blue",
    "rate_limited": "yellow",
    "waiting_children": "yellow",
    "active": "bold cyan",
    "suspended": "magenta",
    "resumable": "magenta",
    "completed": "green",
    "failed": "bold red",
    "cancelled": "bright_black",
    "expired": "red",
    "skipped": "bright_black",
}


def state_cell(state: str, suffix: str = "") -> Cell:
    """A public state in its colour."""
    return state + suffix, _STATE_STYLES.get(state, "")


def id_cell(execution_id: ExecutionId, length: int | None) -> Cell:
    """The compact id, with this many characters of its UUID or, for None, with all of them."""
    compact = execution_id.compact
    hidden = 0 if length is None else len(execution_id.uuid[length:])
    return compact[: len(compact) - hidden], "bold"


_OPTION_NAMES = {"execution_kind": "task", "lane_id": "lane", "public_state": "state"}
_USER_DATA = frozenset(
    {"tags", "details", "document", "result", "usage", "reserved", "hard_limits", "soft_limits"}
)
_is_time = re.compile(
    r"(.+_)?(at|until|since)(_ms)?|ts|now_ms|last_heartbeat_ms|first_applied_ms|last_updated_ms"
).fullmatch


def published(value: Any) -> Any:
    """What `--json` prints of a value: fields are named like options, and times are ISO 8601 too.

    >>> published({"execution_kind": "resize", "attempt_index": 0, "created_at": "0"})
    {'task': 'resize', 'attempt': 1, 'created_at': 0, 'created_at_iso': '1970-01-01T00:00:00.000Z'}
    """
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value, enc_hook=enc_hook)
    if isinstance(value, (list, tuple)):
        return [published(each) for each in cast("Sequence[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    fields: dict[str, Any] = {}
    for name, part in cast("Mapping[str, Any]", value).items():
        if name in _USER_DATA and not isinstance(part, msgspec.Struct):
            fields[name] = part
        elif name.endswith("attempt_index") and isinstance(part, int):
            fields[name.removesuffix("_index")] = part + 1
        elif _is_time(name) and (number := str(part)).isdecimal():
            fields[name] = int(number)
            fields[f"{name.removesuffix('_ms')}_iso"] = iso(int(number))
        else:
            fields[_OPTION_NAMES.get(name, name)] = published(part)
    return fields


def print_json(*values: object) -> None:
    """Print JSON values, each on its own line."""
    for value in values:
        sys.stdout.write(json_line(published(value), enc_hook) + "\n")


def print_result(fields: Mapping[str, object], *cells: Cell, as_json: bool) -> None:
    """Print the result of a change: one JSON object, or one line of styled pieces."""
    if as_json:
        print_json(fields)
    else:
        Screen().line(*cells)


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

    def table(self, rows: Sequence[Row], optional: Sequence[str] = ()) -> None:
        """Print a table. A narrow terminal gets no optional columns; a pipe gets all text."""
        if self.terminal:
            fitted = drop_columns(rows, optional, self.console.width)
            self.console.print(self.render_table(fitted, wrap=True), crop=False)
            return
        widths = _widths(rows)
        for cells in (widths, *(map(_plain, row.values()) for row in rows)):
            padded = map(_padded, cells, widths.values())
            sys.stdout.write(f"{(' ' * _SPACE).join(padded).rstrip()}\n")

    def render_table(self, rows: Sequence[Row], *, wrap: bool = False) -> Table:
        """A table for a terminal. The cells of columns that are too wide are wrapped or cut."""
        widths = _fitted_widths(rows, self.console.width) if rows else []
        # Rich would leave columns out if the table is still too wide. The terminal wraps it.
        width = sum(widths) + _SPACE * max(0, len(widths) - 1)
        padding = (0, _SPACE, 0, 0)
        table = Table(
            box=None, pad_edge=False, header_style="bright_black", padding=padding, width=width
        )
        for header, each in zip(rows[0] if rows else (), widths, strict=True):
            overflow = "fold" if wrap else "ellipsis"
            table.add_column(header, width=each, no_wrap=not wrap, overflow=overflow)
        for row in rows:
            table.add_row(*map(_text, row.values()))
        return table

    def prose(self, cell: Cell) -> None:
        """Print prose; a terminal wraps it between words."""
        self.console.print(_text(cell), soft_wrap=not self.terminal)

    def note(self, text: str) -> None:
        """Print a remark below a table, with an empty line above it."""
        self.line()
        self.prose((text, "bright_black"))

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


def drop_columns(rows: Sequence[Row], optional: Sequence[str], width: int) -> Sequence[Row]:
    """Drop optional columns, in the order given, until the table fits the width."""
    for dropped in optional:
        if _least_width(rows) <= width:
            break
        rows = [{name: cell for name, cell in row.items() if name != dropped} for row in rows]
    return rows


def _least_width(rows: Sequence[Row]) -> int:
    """The width of a table with columns that are as narrow as one reads well."""
    *others, last = _widths(rows).values() or [0]
    least = (*(min(width, _READABLE) for width in others), min(last, _READABLE_LAST))
    return sum(least) + _SPACE * len(others)


def _fitted_widths(rows: Sequence[Row], width: int) -> list[int]:
    """The widths of the columns: the widest give way first; the last one gives way further."""
    fitted = list(_widths(rows).values())
    room = width - _SPACE * (len(fitted) - 1)
    fitted = _limited(fitted, room, _READABLE)
    fitted[-1] = max(min(fitted[-1], _READABLE_LAST), min(fitted[-1], room - sum(fitted[:-1])))
    return _limited(fitted, room, _LEAST)


def _limited(widths: list[int], room: int, least: int) -> list[int]:
    limit = max(widths)
    while sum(widths) > room and limit > least:
        limit -= 1
        widths = [min(each, limit) for each in widths]
    return widths


def _widths(rows: Sequence[Row]) -> dict[str, int]:
    headers = rows[0] if rows else ()
    return {
        name: max(cell_len(name), *(cell_len(_plain(row[name])) for row in rows))
        for name in headers
    }


def _padded(text: str, width: int) -> str:
    # A Chinese character is as wide as two letters.
    return text + " " * (width - cell_len(text))
