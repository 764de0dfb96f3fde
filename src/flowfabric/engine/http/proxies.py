"""Concerns whose operations are requests, made from the Protocols and the table of operations."""

import functools
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from flowfabric.core.ids import new_uuid
from flowfabric.engine.http import codec
from flowfabric.engine.http.link import HttpLink
from flowfabric.engine.http.operations import Operation, operations, protocols
from flowfabric.engine.layers import tracing

_PART_BYTES: Final = 4 << 20
_PART_ITEMS: Final = 1000
_WAITS: Final = {"block_ms": 1000, "wait_timeout_ms": 1000, "wait_s": 1}
"""The arguments for how long the server may wait, with their units per second."""


async def call(link: HttpLink, operation: Operation, given: Mapping[str, Any]) -> Any:
    """Send one operation."""
    if (minted := operation.minted) and given.get(minted) is None:
        given = {**given, minted: new_uuid()}
    body = codec.encode_arguments(given, operation.name)
    waits = (given[name] / unit for name, unit in _WAITS.items() if name in given)
    headers = {"Idempotency-Key": new_uuid()} if "keyed" in operation.marks else {}
    if (spans := tracing.active()) is not None and (parent := spans.current) is not None:
        headers["traceparent"] = parent
    return await link.call(
        "POST",
        operation.path,
        body,
        answer=operation.result,
        headers=headers,
        op=operation.name,
        wait_s=sum(waits) if "waits" in operation.marks else 0.0,
        repeatable=operation.repeatable(given),
        reads=operation.scope == "read",
    )


async def _call_in_parts(link: HttpLink, operation: Operation, given: dict[str, Any]) -> list[Any]:
    """Send a long list in several requests; the results are in order."""
    name, items = next(iter(given.items()))
    results: list[Any] = []
    part: list[msgspec.Raw] = []
    size = 0
    for each in [codec.encode_arguments(each, operation.name) for each in items]:
        if part and (size + len(each) > _PART_BYTES or len(part) == _PART_ITEMS):
            results += await call(link, operation, given | {name: part})
            part, size = [], 0
        part.append(msgspec.Raw(each))
        size += len(each)
    if part:
        results += await call(link, operation, given | {name: part})
    return results


def _proxy(operation: Operation) -> Any:
    send = _call_in_parts if "many" in operation.marks else call

    @functools.wraps(operation.method)
    async def proxy(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await send(self._link, operation, operation.arguments(args, kwargs))

    return proxy


def _begin(self: Any, link: HttpLink) -> None:
    self._link = link


@functools.cache
def proxied(noun: str) -> Any:
    """A class for one noun: operations in the table are requests, others are `unavailable`."""
    known = operations().get(noun, {})
    members: dict[str, Any] = {name: _proxy(operation) for name, operation in known.items()}
    members["__init__"] = _begin
    return type(f"Http{noun.title()}", (protocols()[noun],), members)
