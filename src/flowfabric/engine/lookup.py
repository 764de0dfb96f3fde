"""Finding an execution from user input: an id in either spelling, a UUID, or its start."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from flowfabric.core.errors import NotFoundError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend

_MIN_LENGTH = 4
_UUID_LENGTH = 36
_LISTED = 10
_SEARCHED = 100
# A UUID has no hyphen among its first eight characters, a compact id has one.
_start = re.compile(r"(?:([0-9]{1,5})-)?([0-9a-f-]{0,36})").fullmatch


class IdStart(NamedTuple):
    """A UUID, or the first characters of a UUID or of a compact id."""

    text: str
    partition: int | None
    uuid: str


class AmbiguousId(ValidationError):
    """Several ids start with the text; `candidates` are the first ten."""

    def __init__(self, text: str, found: Sequence[ExecutionId]) -> None:
        self.text = text
        self.candidates = tuple(found[:_LISTED])
        self.more = len(found) > _LISTED
        listed = ", ".join(each.compact for each in self.candidates)
        problem = f"more than one id starts with {text!r}: {listed}{', …' if self.more else ''}"
        super().__init__("invalid_input", f"execution_id: {problem}. Give more of the id.")
        self.args = (text, found)


def parse_name(text: Any) -> ExecutionId | IdStart:
    """Parse a text as an id or the start of one; anything else is `invalid_input`."""
    if not isinstance(text, str) or text.startswith("{"):
        return ExecutionId.parse(text)
    # Tables and log lines end a short id with an ellipsis.
    given = text.strip().removesuffix("…").lower()
    found = _start(given)
    if found is None:
        problem = f"{text!r} is neither an execution id nor a UUID, nor the start of one"
        raise invalid_input("execution_id", problem)
    partition, uuid = found.groups()
    if partition and len(uuid) == _UUID_LENGTH:
        return ExecutionId.parse(given)
    if len(given) < _MIN_LENGTH:
        problem = f"{text!r} is too short: give at least {_MIN_LENGTH} characters"
        raise invalid_input("execution_id", problem)
    return IdStart(given, int(partition) if partition else None, uuid)


async def find_execution(
    backend: Backend, name: ExecutionId | IdStart, namespace: str | None = None
) -> ExecutionId:
    """The execution with this name, in one namespace or in all of them.

    Raises `execution_not_found` or `AmbiguousId`. Looks at 100 candidates at most.
    """
    if isinstance(name, ExecutionId):
        found = [name.check_partition(backend.counts)]
        text, how = name.compact, "has the id"
    else:
        listings = backend.listings
        found = await listings.find_executions(name.uuid, _SEARCHED, partition=name.partition)
        whole = len(name.uuid) == _UUID_LENGTH
        text, how = name.text, "has the id" if whole else "has an id that starts with"
    known = await asyncio.gather(*map(backend.reads.get_execution_namespace, found))
    fitting = [
        each
        for each, its in zip(found, known, strict=True)
        if its is not None and namespace in (None, its)
    ]
    if len(fitting) > 1 or len(found) == _SEARCHED:
        raise AmbiguousId(text, fitting or found)
    if not fitting:
        where = "" if namespace is None else f" in namespace {namespace}"
        raise NotFoundError("execution_not_found", f"no execution{where} {how} {text!r}")
    return fitting[0]
