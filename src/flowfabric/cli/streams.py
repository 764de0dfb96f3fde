"""Standard output and error: usable even when closed, full, or limited in their encoding."""

import os
import sys
from typing import Any, Literal


def prepare_streams() -> None:
    """Open the streams that are closed, and let both print any text."""
    # Read-only, so that writing to a closed output still fails. A closed error stream discards
    # everything: there is nowhere to report its errors.
    sys.stdout = sys.stdout or _opened(1, os.O_RDONLY)
    sys.stderr = sys.stderr or _opened(2, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show must not end the command.
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def discard_output() -> None:
    """Drop buffered output: the interpreter would try to write it again at exit."""
    _redirect_to_null(sys.stdout.fileno(), os.O_WRONLY)


def _opened(number: Literal[1, 2], mode: int) -> Any:
    """A stream on its usual descriptor, so that no socket gets that number."""
    _redirect_to_null(number, mode)
    return open(number, "w", encoding="utf-8", closefd=False)


def _redirect_to_null(number: int, mode: int) -> None:
    null = os.open(os.devnull, mode)
    if null != number:
        os.dup2(null, number)
        os.close(null)
