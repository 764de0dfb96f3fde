"""FlowFabric: durable execution for Python on Valkey.

Names are loaded when they are first used, so that the command line starts quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowfabric.app.calls import SubmitManyError
    from flowfabric.app.context import Context, SyncContext
    from flowfabric.app.fabric import Fabric, SyncFabric
    from flowfabric.app.run import Run, SyncRun, UnexpectedResult
    from flowfabric.app.tasks import Task
    from flowfabric.app.waits import Signal, WaitTimeout
    from flowfabric.core.conditions import (
        AllOf,
        Count,
        CountKind,
        OperatorOnly,
        Single,
        TimeoutOnly,
    )
    from flowfabric.core.errors import (
        ConfigError,
        EngineError,
        FlowFabricError,
        LeaseLost,
        PermanentError,
        RetryableError,
        TransportError,
    )
    from flowfabric.core.policy import Retry
    from flowfabric.engine.api.events import (
        CompletionEvent,
        Event,
        EventFilter,
        LeaseEvent,
        SignalEvent,
        WorkerEvent,
    )
    from flowfabric.sdk.client import (
        Client,
        ExecutionCancelled,
        ExecutionExpired,
        ExecutionFailed,
        NotFinished,
        RunError,
    )
    from flowfabric.sdk.config import WorkerConfig
    from flowfabric.sdk.sync import SyncClient
    from flowfabric.sdk.worker import Worker

from flowfabric.core.version import __version__

_HOMES = {
    "flowfabric.app.calls": ("SubmitManyError",),
    "flowfabric.app.context": ("Context", "SyncContext"),
    "flowfabric.app.fabric": ("Fabric", "SyncFabric"),
    "flowfabric.app.run": ("Run", "SyncRun", "UnexpectedResult"),
    "flowfabric.app.tasks": ("Task",),
    "flowfabric.app.waits": ("Signal", "WaitTimeout"),
    "flowfabric.core.conditions": (
        "AllOf",
        "Count",
        "CountKind",
        "OperatorOnly",
        "Single",
        "TimeoutOnly",
    ),
    "flowfabric.core.errors": (
        "ConfigError",
        "EngineError",
        "FlowFabricError",
        "LeaseLost",
        "PermanentError",
        "RetryableError",
        "TransportError",
    ),
    "flowfabric.core.policy": ("Retry",),
    "flowfabric.engine.api.events": (
        "CompletionEvent",
        "Event",
        "EventFilter",
        "LeaseEvent",
        "SignalEvent",
        "WorkerEvent",
    ),
    "flowfabric.sdk.client": (
        "Client",
        "ExecutionCancelled",
        "ExecutionExpired",
        "ExecutionFailed",
        "NotFinished",
        "RunError",
    ),
    "flowfabric.sdk.config": ("WorkerConfig",),
    "flowfabric.sdk.sync": ("SyncClient",),
    "flowfabric.sdk.worker": ("Worker",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AllOf",
    "Client",
    "CompletionEvent",
    "ConfigError",
    "Context",
    "Count",
    "CountKind",
    "EngineError",
    "Event",
    "EventFilter",
    "ExecutionCancelled",
    "ExecutionExpired",
    "ExecutionFailed",
    "Fabric",
    "FlowFabricError",
    "LeaseEvent",
    "LeaseLost",
    "NotFinished",
    "OperatorOnly",
    "PermanentError",
    "Retry",
    "RetryableError",
    "Run",
    "RunError",
    "Signal",
    "SignalEvent",
    "Single",
    "SubmitManyError",
    "SyncClient",
    "SyncContext",
    "SyncFabric",
    "SyncRun",
    "Task",
    "TimeoutOnly",
    "TransportError",
    "UnexpectedResult",
    "WaitTimeout",
    "Worker",
    "WorkerConfig",
    "WorkerEvent",
    "__version__",
]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
