"""Pages of listings: opaque cursors, and entries that cannot be read."""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from flowfabric.core.errors import CorruptionError, EngineError, ValidationError
from flowfabric.core.ids import ExecutionId, stored_id, validate_uuid
from flowfabric.core.text import lossless
from flowfabric.engine.api import check

log = logging.getLogger(__name__)
K = TypeVar("K")
T = TypeVar("T")
_CHUNK = 500


class Damage:
    """Collects unreadable records of a listing, which must not hide the others."""

    def __init__(self, op: str) -> None:
        self._op = op
        self.found: list[str] = []

    def keep(self, make: Callable[[], T]) -> T | None:
        """The result of `make`; None for a damaged record."""
        try:
            return make()
        except CorruptionError as error:
            self.note(error)
        return None

    async def keep_all(self, reads: Iterable[Awaitable[T]]) -> list[T | None]:
        """The results of the reads in order; None for each damaged record."""
        return [self._kept(each) for each in await asyncio.gather(*reads, return_exceptions=True)]

    def _kept(self, read: T | BaseException) -> T | None:
        if isinstance(read, CorruptionError):
            self.note(read)
            return None
        if isinstance(read, BaseException):
            raise read
        return read

    async def first(
        self, limit: int, keys: Sequence[K], read: Callable[[K], Awaitable[T | None]]
    ) -> tuple[list[T], bool]:
        """The first `limit` entries that `read` finds, and whether there are more."""
        found: list[T] = []
        start, size = 0, min(limit + 1, _CHUNK)
        while start < len(keys):
            entries = await self.keep_all(map(read, keys[start : start + size]))
            found += (entry for entry in entries if entry is not None)
            if len(found) > limit:
                return found[:limit], True
            # If few match, larger steps save round trips.
            start, size = start + size, min(2 * size, _CHUNK)
        return found, False

    def ids(self, members: Iterable[bytes]) -> list[ExecutionId]:
        """The execution ids among the members of an index."""
        found = (self.keep(lambda m=member: stored_id(lossless(m), self._op)) for member in members)
        return [each for each in found if each is not None]

    def note(self, error: CorruptionError) -> None:
        self.found.append(error.detail)
        log.warning(
            *("%s left out a damaged record: %s", self._op, error.detail),
            extra={"action": "record_unreadable", "op": self._op},
        )


def chunks(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def given_cursor(value: Any) -> str:
    """The text of a cursor; empty for the first page."""
    with reading_cursor():
        return check.text(value, "cursor")


def sealed(*parts: str | float) -> str:
    """A position as a cursor; only its last part may contain `|`."""
    return base64.urlsafe_b64encode("|".join(map(str, parts)).encode()).decode().rstrip("=")


def opened(cursor: str, count: int) -> list[str]:
    """The parts of a position; there must be `count` of them."""
    content = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    parts = content.split("|", count - 1)
    if len(parts) != count:
        raise ValueError(cursor)
    return parts


def opened_id(noun: str, cursor: str) -> str:
    """The UUID that was sealed after this noun; empty for the first page."""
    if not given_cursor(cursor):
        return ""
    with reading_cursor():
        found, last = opened(cursor, 2)
        if found != noun:
            raise ValueError(cursor)
        return validate_uuid(last, "cursor")


@contextmanager
def reading_cursor() -> Generator[None]:
    """Turn errors from a malformed cursor into `invalid_cursor`."""
    try:
        yield
    except (ValueError, EngineError) as error:
        raise ValidationError(
            "invalid_cursor", "cursor: must be one that this listing returned"
        ) from error
