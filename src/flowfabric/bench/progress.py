"""A progress bar on stderr, so that stdout holds the result alone."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressBar:
    """One bar for the phase that runs now; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=None)

    def begin(self, what: str, total: int) -> None:
        """Show a new phase."""
        self._bar.reset(self._task, total=total, description=what)

    def advance(self, steps: int = 1) -> None:
        """Move on within the phase."""
        self._bar.advance(self._task, steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
