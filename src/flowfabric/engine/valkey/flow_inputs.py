"""The inputs of a member: part of its claim, or read in pages if they are too large."""

from collections.abc import Sequence
from typing import Any

from flowfabric.core.contracts import flows
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, text

UNREAD = flows.FlowInputs()
"""Means that the inputs are too many, or too large, for a claim."""


def inputs_of(parts: Sequence[Any] | bytes) -> flows.FlowInputs:
    """Decode the inputs of a claim."""
    if isinstance(parts, bytes):
        return UNREAD
    passed, fired_by = parts
    inputs = {
        text(name): flows.FlowInput(
            *(ExecutionId.trusted(text(upstream)), text(outcome), result),
            encoding="" if encoding is None else text(encoding),
        )
        for name, upstream, outcome, result, encoding, *_ in passed
    }
    return flows.FlowInputs(inputs, ExecutionId.trusted(text(fired_by)) if fired_by else None)


async def read_inputs(calls: FunctionCalls, execution_id: ExecutionId) -> flows.FlowInputs:
    """All inputs of a member, page by page."""
    passed: list[Any] = []
    fired_by: bytes | None = None
    cursor = "0"
    while True:
        page, fired, cursor = await calls.ask_about(
            *(execution_id, "ff_get_inputs", (cursor,)),
            lambda reply: (_rows(reply[2]), reply[3], text(reply[4])),
        )
        fired_by = fired or fired_by
        for row in page:
            # Large results come one by one.
            if row[5]:
                upstream = ExecutionId.trusted(text(row[1]))
                place, key = f"{upstream}: result", keys.result(upstream.tag, upstream)
                row[3] = await calls.read(place, "GET", key)
        passed += page
        if cursor == "0":
            return inputs_of((passed, fired_by))


def _rows(found: Any) -> list[list[Any]]:
    return [[name, up, outcome, *rest] for name, up, outcome, *rest in found]
