"""How `flowfabric ps` looks."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from flowfabric.cli.listing import Listed, Row, collect
from flowfabric.cli.screen import Cell, Screen, narrowed, print_json, state_style
from flowfabric.cli.session import NoDataYet, opened
from flowfabric.cli.words import age, clean, plural, short_length
from flowfabric.engine.listing import Filter

__all__ = ["follow", "once"]

_REFRESH_S = 1.0
_LEAST_FIRST = ("ATTEMPTS", "AGE", "LANE", "WORKER")
"""What a terminal that is too narrow goes without, in this order."""
_FRAME_LINES = 4
"""What a live display needs besides its rows."""


def once(url: str | None, where: Filter, limit: int | None, *, as_json: bool) -> None:
    """Print the list."""
    try:
        listed = asyncio.run(_list(url, where, limit))
    except NoDataYet as nothing:
        if not as_json:
            _show_nothing(nothing)
        return
    if as_json:
        for row in listed.rows:
            print_json(row)
        return
    screen = Screen()
    if not listed.rows:
        screen.line(_nothing_found(where))
        return
    headers, rows = _table(listed, full_ids=not screen.terminal)
    if screen.terminal:
        headers, rows = narrowed(headers, rows, _LEAST_FIRST, screen.console.width)
    screen.table(headers, rows)
    if screen.terminal:
        screen.line()
        screen.line((_footer(listed), "bright_black"))


async def _list(url: str | None, where: Filter, limit: int | None) -> Listed:
    async with opened(url) as backend:
        return await collect(backend, where, limit)


def _show_nothing(nothing: NoDataYet) -> None:
    screen = Screen()
    screen.line("No executions: ", nothing.message, ".")
    screen.line(("hint: ", "cyan"), nothing.hint)


def _nothing_found(where: Filter) -> str:
    filtered = where != Filter()
    return "No execution matches." if filtered else "No executions yet."


def _table(listed: Listed, *, full_ids: bool) -> tuple[list[str], list[list[Cell]]]:
    rows = listed.rows
    tenants = any(row.namespace != "default" for row in rows)
    length = None if full_ids else short_length(row.execution_id.uuid for row in rows)
    headers = ["ID", "KIND", "LANE", "STATE", "AGE", "ATTEMPTS", "WORKER"]
    if tenants:
        headers.insert(1, "NAMESPACE")
    return headers, [_cells(row, listed.now_ms, length, tenants=tenants) for row in rows]


def _cells(row: Row, now_ms: int, length: int | None, *, tenants: bool) -> list[Cell]:
    shown = str(row.execution_id) if length is None else row.execution_id.uuid[:length]
    progress = f" {row.progress_pct}%" if row.progress_pct and row.completed_at is None else ""
    style = state_style(row.public_state)
    cells: list[Cell] = [
        (shown, "bold"),
        clean(row.execution_kind),
        clean(row.lane_id),
        (row.public_state + progress, style),
        age(now_ms - int(row.created_at)),
        str(row.total_attempt_count) if row.total_attempt_count else "-",
        clean(row.worker_instance_id or "-"),
    ]
    if tenants:
        cells.insert(1, clean(row.namespace))
    return cells


def _footer(listed: Listed) -> str:
    states = ", ".join(f"{count:,} {state}" for state, count in listed.states.most_common())
    total = plural(listed.total, "execution")
    shown = len(listed.rows)
    text = f"{total}: {states}"
    if not listed.complete:
        return f"the newest {shown} of the first {total} looked at; --all looks at all of them"
    return text if shown == listed.total else f"{text}. The newest {shown} are shown, --all for all"


def follow(url: str | None, where: Filter, limit: int | None, *, as_json: bool) -> None:
    """Keep showing the list until Ctrl-C, which is how it is meant to end."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_follow(url, where, limit, as_json=as_json))


async def _follow(url: str | None, where: Filter, limit: int | None, *, as_json: bool) -> None:
    screen = Screen()
    async with opened(url) as backend:
        if screen.terminal and not as_json:
            with Live(console=screen.console, auto_refresh=False, screen=True) as live:
                while True:
                    listed = await collect(backend, where, limit)
                    live.update(_frame(screen, listed), refresh=True)
                    await asyncio.sleep(_REFRESH_S)
        before: dict[str, Row] = {}
        while True:
            listed = await collect(backend, where, limit)
            changed = [row for row in listed.rows if before.get(row.execution_id) != row]
            before = {row.execution_id: row for row in listed.rows}
            _print_changes(changed, listed.now_ms, as_json=as_json)
            await asyncio.sleep(_REFRESH_S)


def _frame(screen: Screen, listed: Listed) -> RenderableType:
    room = max(1, screen.console.height - _FRAME_LINES)
    headers, rows = _table(listed, full_ids=False)
    headers, rows = narrowed(headers, rows, _LEAST_FIRST, screen.console.width)
    table = screen.render_table(headers, rows[:room])
    return screen.stack(table, Text(), Text(_footer(listed) + " · Ctrl-C ends", "bright_black"))


def _print_changes(changed: Sequence[Row], now_ms: int, *, as_json: bool) -> None:
    for row in reversed(changed):
        if as_json:
            print_json(row)
            continue
        cells = _cells(row, now_ms, None, tenants=False)
        sys.stdout.write(
            "  ".join(cell if isinstance(cell, str) else cell[0] for cell in cells) + "\n"
        )
    sys.stdout.flush()
