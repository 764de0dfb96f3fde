"""The process's standard streams, which may be closed, full, or unable to show a character."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

__all__ = ["discard_output", "ready_streams"]


def ready_streams() -> None:
    """Give output and error stream a file each, and let them show any text."""
    # Read-only: writing to an output that is closed fails as it would have. Errors about errors
    # help nobody, so a closed error stream takes everything.
    sys.stdout = sys.stdout or _opened(1, os.O_RDONLY)
    sys.stderr = sys.stderr or _opened(2, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        # What the terminal cannot show must not end the command.
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def discard_output() -> None:
    """Let what is still buffered go nowhere: the interpreter would try once more at its end."""
    _take_place(sys.stdout.fileno(), os.O_WRONLY)


def _opened(number: Literal[1, 2], mode: int) -> Any:
    """A stream on its usual number, so that no socket gets it."""
    _take_place(number, mode)
    return open(number, "w", encoding="utf-8", closefd=False)


def _take_place(number: int, mode: int) -> None:
    null = os.open(os.devnull, mode)
    if null != number:
        os.dup2(null, number)
        os.close(null)
