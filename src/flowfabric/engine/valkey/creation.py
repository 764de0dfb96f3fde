"""The arguments of the functions that create executions."""

from typing import Any

import msgspec

from flowfabric.core import graph as graphs
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.engine.api import check
from flowfabric.engine.api import executions as api

_pack = msgspec.msgpack.Encoder().encode


def packed_options(item: NewExecution) -> bytes:
    """The options of an item of `ff_create`, packed."""
    options = creation_options(item)
    if item.flow_id is not None:
        options |= _membership(item.flow_id, item)
    return _pack(options) if options else b""


def creation_options(item: NewExecution) -> dict[str, Any]:
    """The options that differ from their defaults."""
    options: dict[str, Any] = {}
    if item.namespace != "default":
        options["ns"] = item.namespace
    if item.lane_id != "default":
        options["lane"] = item.lane_id
    if item.priority is not None:
        options["prio"] = max(0, min(9000, item.priority))
    if item.policy is not None:
        options["policy"] = api.policy_json(item.policy)
    if item.idempotency_key:
        options |= _key_options(item)
    if item.tags:
        options["tags"] = [part for pair in item.tags.items() for part in pair]
    if item.delay_until is not None:
        options["delay"] = check.clamped(item.delay_until)
    if item.delay_ms is not None:
        options["delay_in"] = check.clamped(item.delay_ms)
    if item.execution_deadline_at is not None:
        options["deadline"] = check.clamped(item.execution_deadline_at)
    if item.creator_identity:
        options["creator"] = item.creator_identity
    return options


def _key_options(item: NewExecution) -> dict[str, str]:
    options = {"idem": item.idempotency_key}
    if item.idempotency_digest:
        options["digest"] = item.idempotency_digest.hex()
    if item.shards:
        options["view"] = str(item.shards)
    return options


def _membership(flow_id: str, item: NewExecution) -> dict[str, Any]:
    options: dict[str, Any] = {"flow": flow_id}
    if item.depends_on:
        options["deps"] = [
            [
                *(graphs.dependency_id(flow_id, item.execution_id, each), each.upstream.uuid),
                *(graphs.KINDS[each.kind], each.input_name, each.data_passing_ref),
            ]
            for each in item.depends_on
        ]
        if any(each.input_name for each in item.depends_on):
            options["named"] = True
    return options
