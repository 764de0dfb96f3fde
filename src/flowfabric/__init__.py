"""FlowFabric: durable execution for Python on Valkey.

Names are loaded when they are first used, so that the command line starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowfabric.app.calls import IdempotencyConflict, SubmitManyError
    from flowfabric.app.children import Children, ChildrenFailed, SyncChildren
    from flowfabric.app.context import Context, SyncContext
    from flowfabric.app.fabric import Fabric, SyncFabric
    from flowfabric.app.flow import Flow, FlowBuilder, SyncFlow, SyncFlowBuilder
    from flowfabric.app.flow_views import FlowFailed, GraphView, NodeChange
    from flowfabric.app.graphs import FutureValue, Node, any_of, gather, quorum
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
        PayloadMismatch,
        PermanentError,
        RetryableError,
        TransportError,
    )
    from flowfabric.core.policy import ExponentialBackoff, FixedBackoff, Retry
    from flowfabric.engine.api.events import (
        CompletionEvent,
        Event,
        EventFilter,
        LeaseEvent,
        SignalEvent,
        WorkerEvent,
    )
    from flowfabric.engine.overview import Wait
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

_HOMES = (
    ("app.calls", "IdempotencyConflict SubmitManyError"),
    ("app.children", "Children ChildrenFailed SyncChildren"),
    ("app.context", "Context SyncContext"),
    ("app.fabric", "Fabric SyncFabric"),
    ("app.flow", "Flow FlowBuilder SyncFlow SyncFlowBuilder"),
    ("app.flow_views", "FlowFailed GraphView NodeChange"),
    ("app.graphs", "FutureValue Node any_of gather quorum"),
    ("app.run", "Run SyncRun UnexpectedResult"),
    ("app.tasks", "Task"),
    ("app.waits", "Signal WaitTimeout"),
    ("core.conditions", "AllOf Count CountKind OperatorOnly Single TimeoutOnly"),
    ("core.errors", "ConfigError EngineError FlowFabricError LeaseLost PermanentError"),
    ("core.errors", "PayloadMismatch RetryableError TransportError"),
    ("core.policy", "ExponentialBackoff FixedBackoff Retry"),
    ("engine.api.events", "CompletionEvent Event EventFilter LeaseEvent SignalEvent WorkerEvent"),
    ("engine.overview", "Wait"),
    ("sdk.client", "Client ExecutionCancelled ExecutionExpired ExecutionFailed NotFinished"),
    ("sdk.client", "RunError"),
    ("sdk.config", "WorkerConfig"),
    ("sdk.sync", "SyncClient"),
    ("sdk.worker", "Worker"),
)
_HOME_OF = {name: f"flowfabric.{home}" for home, names in _HOMES for name in names.split()}

__all__: list[str] = ["AllOf", "Children", "ChildrenFailed", "Client", "CompletionEvent"]
__all__ += ["ConfigError", "Context", "Count", "CountKind", "EngineError", "Event", "EventFilter"]
__all__ += ["ExecutionCancelled", "ExecutionExpired", "ExecutionFailed", "ExponentialBackoff"]
__all__ += ["Fabric", "FixedBackoff", "Flow", "FlowBuilder", "FlowFabricError", "FlowFailed"]
__all__ += ["FutureValue", "GraphView", "IdempotencyConflict", "LeaseEvent", "LeaseLost", "Node"]
__all__ += ["NodeChange", "NotFinished", "OperatorOnly", "PayloadMismatch", "PermanentError"]
__all__ += ["Retry", "RetryableError", "Run", "RunError", "Signal", "SignalEvent", "Single"]
__all__ += ["SubmitManyError", "SyncChildren", "SyncClient", "SyncContext", "SyncFabric"]
__all__ += ["SyncFlow", "SyncFlowBuilder", "SyncRun", "Task", "TimeoutOnly", "TransportError"]
__all__ += ["UnexpectedResult", "Wait", "WaitTimeout", "Worker", "WorkerConfig", "WorkerEvent"]
__all__ += ["__version__", "any_of", "gather", "quorum"]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
