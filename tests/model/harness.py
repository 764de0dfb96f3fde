"""Drives the real engine from synchronous rules: one loop, one connection, a frozen clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from flowfabric.core.contracts.executions import RetryScheduled
from flowfabric.core.contracts.leases import AlreadySatisfied, Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.policy import ExecutionPolicy, parse_policy
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.testing import EngineClock
from flowfabric.valkey.address import parse_url
from tests.model.parts import Lease, Policy

T0 = 1_800_000_000_000


class Harness:
    """Serves every example of a run."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.backend: ValkeyBackend = self.run(
            ValkeyBackend.connect(parse_url(url), prepare_with=PartitionCounts())
        )

    def run(self, work: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await work

        return self.loop.run_until_complete(wait())

    def answer(self, work: Awaitable[Any]) -> Any:
        """The result, or the code of the refusal."""
        try:
            return self.run(work)
        except EngineError as error:
            return error.code

    def freeze(self, now: int) -> None:
        self.run(EngineClock(self.backend).freeze(now))

    def reset(self) -> None:
        self.run(self.backend.transport.call("FLUSHALL"))
        self.freeze(T0)

    def close(self) -> None:
        self.run(EngineClock(self.backend).reset())
        self.run(self.backend.aclose())
        self.loop.close()


def lease_of(handle: Handle) -> Lease:
    """A handle as the model knows it."""
    return Lease(
        handle.execution_id,
        handle.lease_id,
        handle.lease_epoch,
        handle.attempt_id,
        handle.attempt_index,
        handle.lease_ttl_ms,
    )


def word(outcome: Any) -> str:
    """An outcome as the model words it."""
    if isinstance(outcome, str):
        return outcome
    if isinstance(outcome, RetryScheduled):
        return f"retry_scheduled {outcome.delay_until} {outcome.next_attempt_index}"
    if isinstance(outcome, AlreadySatisfied):
        return outcome.reason
    if outcome is None:
        return "updated"
    if outcome.kind in ("delayed", "replayed"):
        return outcome.public_state.value
    return outcome.kind


def stored(policy: Policy) -> ExecutionPolicy | None:
    """The policy as a submitter would write it."""
    document: dict[str, Any] = {}
    if policy.max_retries is not None:
        document["retry_policy"] = {
            "max_retries": policy.max_retries,
            "backoff": {"type": "fixed", "delay_ms": policy.backoff_ms},
            "retry_on_timeout": policy.retry_on_timeout,
        }
    timeouts = {
        "attempt_timeout_ms": policy.attempt_timeout_ms,
        "execution_deadline_ms": policy.lifetime_ms,
    }
    if any(timeouts.values()):
        document["timeout_policy"] = {name: value for name, value in timeouts.items() if value}
    if policy.max_reclaims is not None:
        document["max_reclaim_count"] = policy.max_reclaims
    if policy.max_replays is not None:
        document["max_replay_count"] = policy.max_replays
    if policy.needs_gpu:
        document["routing_requirements"] = {"required_capabilities": ["gpu"]}
    return parse_policy(document) if document else None
