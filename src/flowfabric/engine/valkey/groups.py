"""Splitting work on many partitions into calls that the server answers quickly."""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, TypeVar

from flowfabric.core.errors import EngineError
from flowfabric.engine.valkey.calls import at_once

T = TypeVar("T", bound=tuple[Any, ...])
R = TypeVar("R")

# Calls in flight at a time, so that other work gets in between.
_IN_FLIGHT = 16


def split(items: Iterable[T], size: int, *, apart: bool) -> list[list[T]]:
    """Groups of at most `size` items; with `apart`, as in clusters, of one partition's tag each."""
    groups: list[list[T]] = []
    for item in sorted(items, key=itemgetter(0)) if apart else items:
        if not groups or len(groups[-1]) >= size or (apart and groups[-1][0][0] != item[0]):
            groups.append([])
        groups[-1].append(item)
    return groups


async def call_each(
    groups: list[list[T]], call: Callable[[list[T]], Awaitable[R]]
) -> list[tuple[list[T], R | EngineError]]:
    """Each group with the answer to its call, or with the error that the call raised."""

    async def outcome(group: list[T]) -> tuple[list[T], R | EngineError]:
        try:
            return group, await call(group)
        except EngineError as error:
            return group, error

    return await at_once(_IN_FLIGHT, outcome, groups)


def raised(outcomes: Iterable[tuple[object, R | EngineError]]) -> Iterator[R]:
    """The answers of calls; raises the first error."""
    for _, answer in outcomes:
        if isinstance(answer, EngineError):
            raise answer
        yield answer


def places_of(pairs: Iterable[tuple[str, str]]) -> list[str | int]:
    """Arguments that name things of partitions: per tag the number of names, then the names."""
    names: dict[str, list[str]] = {}
    for tag, name in pairs:
        names.setdefault(tag, []).append(name)
    return [arg for tag, own in names.items() for arg in (tag, len(own), *own)]
