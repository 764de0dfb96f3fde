"""Listings over damaged data: what cannot be read is left out, noted and logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from flowfabric.core.errors import CorruptionError
from flowfabric.core.ids import ExecutionId, stored_id
from flowfabric.core.text import lossless

log = logging.getLogger(__name__)
T = TypeVar("T")


class Damage:
    """What a listing leaves out: one unreadable record must not hide the others."""

    def __init__(self, op: str) -> None:
        self._op = op
        self.found: list[str] = []

    def keep(self, make: Callable[[], T]) -> T | None:
        """What `make` returns, or None if it met damage."""
        try:
            return make()
        except CorruptionError as error:
            self.note(error)
        return None

    async def keep_all(self, reads: Iterable[Awaitable[T]]) -> list[T | None]:
        """What the reads return, in order; None for each that met damage."""

        async def read(one: Awaitable[T]) -> T | None:
            try:
                return await one
            except CorruptionError as error:
                self.note(error)
            return None

        return await asyncio.gather(*(read(one) for one in reads))

    def ids(self, members: Iterable[bytes]) -> list[ExecutionId]:
        """The execution ids among the members of an index."""
        found = (self.keep(lambda m=member: stored_id(lossless(m), self._op)) for member in members)
        return [each for each in found if each is not None]

    def note(self, error: CorruptionError) -> None:
        self.found.append(error.detail)
        log.warning(
            "%s left out a damaged record: %s",
            self._op,
            error.detail,
            extra={"action": "record_unreadable", "op": self._op},
        )
