"""Shows the rows: a live table on a terminal, otherwise one line per change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.demo.watch import Row
from examples.demo.worker import WorkerProcess

_STYLES = {
    "waiting": "dim",
    "delayed": "yellow",
    "active": "cyan",
    "completed": "green",
    "failed": "bold red",
}


class Screen:
    """Shows the rows of the demo."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self.console = Console(highlight=False)
        self._workers = workers
        self._began = time.monotonic()
        self._before: dict[str, tuple[str, str, str]] = {}
        self._live = (
            Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        )

    def show(self, rows: Sequence[Row]) -> None:
        """Show the current rows."""
        if self._live is not None:
            self._live.update(self._table(rows), refresh=True)
            return
        for row in rows:
            now = (row.state.value, row.worker, row.tries)
            if self._before.get(row.label) != now:
                self._before[row.label] = now
                tries = f"attempt {row.tries}" if row.tries else ""
                line = f"{row.label:<20} {row.state.value:<10} {row.worker:<6} {tries:<19}"
                self.say(f"{line} {row.result or row.failure}".rstrip())

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        self.note(f"{time.monotonic() - self._began:5.1f} s  {text}")

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def _table(self, rows: Sequence[Row]) -> Table:
        done = sum(row.ended for row in rows)
        table = Table(
            title=f"month-end statements: {done} of {len(rows)} done",
            caption="   ".join(_presence(worker) for worker in self._workers),
            min_width=78,
        )
        for name in ("execution", "state", "worker", "attempt", "result"):
            table.add_column(name)
        for row in rows:
            state = row.state.value
            if state == "active" and row.progress is not None:
                state = f"active {row.progress} %"
            table.add_row(
                row.label,
                Text(state, _STYLES.get(row.state.value, "")),
                row.worker,
                Text(row.tries, "magenta" if len(row.attempts) > 1 else ""),
                row.result or row.failure,
            )
        return table

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _presence(worker: WorkerProcess) -> str:
    what = "[bold red]killed with SIGKILL[/]" if worker.killed else "[green]serving[/]"
    return f"{worker.name} (pid {worker.process.pid}) {what}"
