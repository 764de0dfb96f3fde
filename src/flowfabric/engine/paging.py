"""Reading a listing to its end."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

Entry_co = TypeVar("Entry_co", covariant=True)
T = TypeVar("T")


class _Page(Protocol):
    @property
    def next_cursor(self) -> str | None: ...


class _PageOf(_Page, Protocol[Entry_co]):
    @property
    def entries(self) -> Sequence[Entry_co]: ...


Page = TypeVar("Page", bound=_Page)


async def read_pages(read: Callable[[str], Awaitable[Page]]) -> AsyncGenerator[Page]:
    """All pages; `read` gets the cursor of each page."""
    cursor: str | None = ""
    while cursor is not None:
        page = await read(cursor)
        yield page
        cursor = page.next_cursor


async def read_every(read: Callable[[str], Awaitable[_PageOf[T]]]) -> list[T]:
    """The entries of all pages."""
    return [entry async for page in read_pages(read) for entry in page.entries]
