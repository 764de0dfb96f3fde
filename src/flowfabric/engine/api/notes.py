"""Small values that server processes share for a limited time."""

from collections.abc import Mapping
from typing import Protocol

from flowfabric.engine.api.concern import Concern


class Notes(Concern, Protocol):
    """Small values that server processes share for a limited time."""

    def names_by_node(self, name: str) -> Mapping[str, str]:
        """For each node a name of a note that is kept there; first this name."""
        ...

    async def claim_note(self, name: str, value: bytes, ttl_ms: int) -> bytes | None:
        """Store a note unless one exists; returns the existing one, or None."""
        ...

    async def put_note(self, name: str, value: bytes, ttl_ms: int) -> None:
        """Store a note, replacing one of the same name."""

    async def get_note(self, name: str) -> bytes | None:
        """The note, if it has not expired."""
        ...

    async def extend_note(self, name: str, ttl_ms: int) -> None:
        """Keep a note for longer."""

    async def drop_note(self, name: str) -> None:
        """Delete a note; an absent one is no error."""
