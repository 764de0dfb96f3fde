"""Opaque cursors of listings: where a page ended, as text for a url."""

from __future__ import annotations

import base64
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from flowfabric.core.errors import EngineError, ValidationError
from flowfabric.engine.api.arguments import checked_text


def given_cursor(value: Any) -> str:
    """The text of a cursor; empty for the first page."""
    with reading_cursor():
        return checked_text(value, "cursor")


def sealed(*parts: str | float) -> str:
    """A position as a cursor; only its last part may contain `|`."""
    return base64.urlsafe_b64encode("|".join(map(str, parts)).encode()).decode().rstrip("=")


def opened(cursor: str, count: int) -> list[str]:
    """The parts of a position, as many as it was made of."""
    content = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    parts = content.split("|", count - 1)
    if len(parts) != count:
        raise ValueError(cursor)
    return parts


@contextmanager
def reading_cursor() -> Generator[None]:
    """While a cursor is taken apart: whatever does not fit is `invalid_cursor`."""
    try:
        yield
    except (ValueError, EngineError) as error:
        raise ValidationError("invalid_cursor", "is not a cursor of this listing") from error
