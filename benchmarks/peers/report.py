"""The table and the JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from benchmarks.peers.runner import OURS, Row


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Fastest lifecycle first, failures last."""
    return sorted(rows, key=lambda row: -(row.lifecycle_per_s or 0.0))


def fastest_peer(rows: Sequence[Row]) -> Row | None:
    """The peer that every ratio refers to; None when no peer could be measured."""
    measured = [row for row in rows if row.name != OURS and row.lifecycle_per_s]
    return max(measured, key=lambda row: row.lifecycle_per_s or 0.0, default=None)


def as_json(n: int, rows: Sequence[Row]) -> dict[str, object]:
    """The whole run as one object; `ratio` is ours over the fastest peer."""
    fastest = fastest_peer(rows)
    ours = next((row for row in rows if row.name == OURS), None)
    return {
        "n": n,
        "rows": [asdict(row) for row in ordered(rows)],
        "fastest_peer": fastest.name if fastest else None,
        "ratio": _ratio(ours, fastest) if ours else None,
    }


def as_table(n: int, rows: Sequence[Row]) -> Table:
    """The table people read; `notes` goes below it, so that 80 columns are enough."""
    fastest = fastest_peer(rows)
    table = Table(
        title=f"{n:,} no-op tasks, one worker process, a private Valkey each",
        caption="submit: no worker runs; process: first task to empty queue; lifecycle: both",
    )
    table.add_column("queue", no_wrap=True)
    table.add_column("version", no_wrap=True)
    times = "× of the fastest peer"
    for heading in ("n", "submit/s", "process/s", "lifecycle/s"):
        table.add_column(heading, justify="right", min_width=len(heading))
    table.add_column(times, justify="right", width=7)
    for row in ordered(rows):
        ratio = _ratio(row, fastest)
        table.add_row(
            row.name,
            row.version,
            f"{row.n:,}" if row.n else "-",
            *map(_rate, (row.submit_per_s, row.process_per_s, row.lifecycle_per_s)),
            f"{ratio:.2f}" if ratio else "-",
            style="bold" if row.name == OURS else None,
        )
    return table


def notes(rows: Sequence[Row]) -> list[str]:
    """How each queue was set, or why it failed."""
    return [f"{row.name}: {row.note}" for row in ordered(rows)]


def _ratio(row: Row, fastest: Row | None) -> float | None:
    if fastest is None or not row.lifecycle_per_s or not fastest.lifecycle_per_s:
        return None
    return row.lifecycle_per_s / fastest.lifecycle_per_s


def _rate(value: float | None) -> str:
    return f"{value:,.0f}" if value else "-"
