"""The settings of a worker process."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.catalogue import meaning
from flowfabric.core.errors import ConfigError, EngineError
from flowfabric.core.ids import (
    new_uuid,
    validate_lanes,
    validate_namespace,
    validate_namespaces,
    validate_worker_id,
)

_MAX_BATCH = 256
_MAX_WEIGHT = 1000
_LEASES_BLOCKED = 3
_LEAST = {"lease_ttl_ms": 1_000, "claim_poll_interval_ms": 1, "block_limit_ms": 1_000}


def default_worker_id() -> str:
    """The pool of a worker without a configured one: its host name."""
    return "".join(socket.gethostname().split()) or "worker"


def _default_instance_id() -> str:
    return f"{default_worker_id()}-{os.getpid()}-{new_uuid()[:8]}"


_CHECKS: dict[str, Callable[[Any], object]] = {
    "worker_id": validate_worker_id,
    "worker_instance_id": validate_worker_id,
    "namespace": validate_namespace,
    "namespaces": validate_namespaces,
    "lanes": validate_lanes,
    "capabilities": lambda given: caps.normalise(given, "worker"),
}


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one worker process. Everything has a default.

    >>> WorkerConfig(lanes=["emails"], max_concurrent_tasks=32).lease_ttl_ms
    30000
    """

    worker_id: str = msgspec.field(default_factory=default_worker_id)
    """The pool: shared by its processes and stable across restarts; grants are bound to it."""
    worker_instance_id: str = msgspec.field(default_factory=_default_instance_id)
    """This process: leases are bound to it."""
    namespace: str = "default"
    """The namespace that it is registered in."""
    namespaces: Sequence[str] = ()
    """The namespaces whose executions it runs, in fair turns. Empty means its own; `["*"]` means
    all."""
    lanes: Sequence[str] = ("default",)
    lane_weights: Mapping[str, int] = {}
    """How many turns a lane gets where the others get one, for example `{"urgent": 3}`. A worker
    behind a server serves its lanes in equal turns."""
    capabilities: Sequence[str] = ()
    lease_ttl_ms: int = 30_000
    claim_poll_interval_ms: int = 1_000
    """How long to wait for a doorbell before looking for work anyway; doubled with scanners, which
    repeat lost doorbells."""
    max_concurrent_tasks: int = 1
    block_limit_ms: int | None = None
    """How long a task may block the event loop before the worker releases its other executions;
    by default three times the lease."""
    complete_on_exit: bool = False
    """Whether leaving `async with task:` without an exception completes the task."""
    batch: int = 64
    """How many executions one call claims or completes at most: enough to share a round trip, few
    enough that the next call overlaps with it."""
    scanners: bool = True
    """Whether this process may also run the deployment's scanners; one process at a time does."""

    def __post_init__(self) -> None:
        for field, least in _LEAST.items():
            value = getattr(self, field)
            if value is not None and (isinstance(value, bool) or value < least):
                raise ConfigError("worker", f"must be at least {least}", field)
        if not 1 <= self.batch <= _MAX_BATCH:
            raise ConfigError("worker", f"must be between 1 and {_MAX_BATCH}", "batch")
        for field, check in _CHECKS.items():
            try:
                # Store the checked value: the given one may be an iterator.
                msgspec.structs.force_setattr(self, field, check(getattr(self, field)))
            except EngineError as error:
                problem = error.detail.removeprefix(f"{field}: ")
                if error.code == "invalid_capabilities":
                    problem = f"{meaning(error.detail) or problem}. {error.hint}"
                raise ConfigError("worker", problem, field) from error
        if not self.lanes:
            raise ConfigError("worker", "at least one lane is required")
        for lane, weight in self.lane_weights.items():
            if lane not in self.lanes:
                raise ConfigError("worker", f"names {lane!r}, which is not a lane", "lane_weights")
            if isinstance(weight, bool) or not 1 <= weight <= _MAX_WEIGHT:
                problem = f"must be between 1 and {_MAX_WEIGHT}, got {weight!r} for {lane!r}"
                raise ConfigError("worker", problem, "lane_weights")

    @property
    def served(self) -> tuple[str, ...] | None:
        """The namespaces that it serves; None means all."""
        if "*" in self.namespaces:
            return None
        return tuple(self.namespaces) or (self.namespace,)

    @property
    def capabilities_csv(self) -> str:
        """The offered capabilities in their stored form."""
        return caps.to_csv(self.capabilities)

    @property
    def permits(self) -> int:
        """How many tasks may run at once."""
        return max(1, self.max_concurrent_tasks)

    @property
    def longest_block_s(self) -> float:
        """How long the event loop may be blocked before other executions are released."""
        return (self.block_limit_ms or _LEASES_BLOCKED * self.lease_ttl_ms) / 1000

    @property
    def renewal_interval_ms(self) -> int:
        """How often each lease is renewed."""
        return max(1, self.lease_ttl_ms // 3)

    @property
    def liveness_ttl_ms(self) -> int:
        """How long the registry keeps this process without a heartbeat."""
        return max(2 * self.lease_ttl_ms, 1_000)
