"""A new execution as the creating function takes it, and what that function answers."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from flowfabric.core.contracts.executions import Created, CreateOutcome, Duplicate, NewExecution
from flowfabric.core.errors import EngineError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy, parse_policy
from flowfabric.core.state import PublicState
from flowfabric.engine.api.arguments import clamped
from flowfabric.engine.valkey.calls import refused, text, unreadable

PUBLIC: dict[bytes, PublicState] = {state.value.encode(): state for state in PublicState}
"""Public states as replies spell them."""

_pack = msgspec.msgpack.Encoder().encode


def creation_options(item: NewExecution) -> bytes:
    """Only what differs from the defaults travels."""
    options: dict[str, Any] = {}
    if item.namespace != "default":
        options["ns"] = item.namespace
    if item.lane_id != "default":
        options["lane"] = item.lane_id
    if item.priority is not None:
        options["prio"] = max(0, min(9000, item.priority))
    if item.policy is not None:
        options["policy"] = policy_json(item.policy)
    if item.idempotency_key:
        options["idem"] = item.idempotency_key
    if item.tags:
        options["tags"] = [part for pair in item.tags.items() for part in pair]
    if item.delay_until is not None:
        options["delay"] = clamped(item.delay_until)
    if item.delay_ms is not None:
        options["delay_in"] = clamped(item.delay_ms)
    if item.execution_deadline_at is not None:
        options["deadline"] = clamped(item.execution_deadline_at)
    if item.creator_identity:
        options["creator"] = item.creator_identity
    return _pack(options) if options else b""


_policies: dict[int, tuple[ExecutionPolicy, str]] = {}
_POLICY_CACHE = 256


def policy_json(policy: ExecutionPolicy) -> str:
    """A task's policy is one object for all its submissions: check and encode it once."""
    known = _policies.get(id(policy))
    if known is not None and known[0] is policy:
        return known[1]
    if not isinstance(policy, ExecutionPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid_input(
            "policy", f"must be an ExecutionPolicy, got {type(policy).__name__}", undecodable=True
        )
    if len(_policies) >= _POLICY_CACHE:
        _policies.clear()
    # A policy built by hand may hold anything; what breaks a rule is refused here.
    checked = parse_policy(policy) or policy
    encoded = checked.to_json().decode()
    _policies[id(policy)] = (policy, encoded)
    return encoded


def creation_outcome(execution_id: ExecutionId, answer: Any) -> CreateOutcome | EngineError:
    """What became of one item of a creating call."""
    if isinstance(answer, bytes):
        public = PUBLIC.get(answer)
        if public is not None:
            return Created(execution_id, public)
    elif type(answer) is list:
        parts = cast("list[Any]", answer)
        if len(parts) >= 3 and parts[:2] == [1, b"DUPLICATE"]:
            return Duplicate(ExecutionId.trusted(text(parts[2])))
        return refused(parts, "create_execution", function="ff_create", execution_id=execution_id)
    return unreadable(answer, "ff_create", "create_execution", execution_id)
