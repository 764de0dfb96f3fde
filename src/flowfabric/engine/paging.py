"""Reading a listing to its end."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

Entry_co = TypeVar("Entry_co", covariant=True)
T = TypeVar("T")


class _Page(Protocol[Entry_co]):
    @property
    def entries(self) -> Sequence[Entry_co]: ...
    @property
    def next_cursor(self) -> str | None: ...


async def read_every(read: Callable[[str], Awaitable[_Page[T]]]) -> list[T]:
    """The entries of all pages; `read` gets the cursor of each page."""
    found: list[T] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await read(cursor)
        found += page.entries
        cursor = page.next_cursor
    return found
