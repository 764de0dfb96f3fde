"""FlowFabric: durable execution for Python on Valkey.

Names are loaded when they are first used, so that the command line starts quickly.
"""

from flowfabric.core.version import __version__

# The module `typing` takes longer to load than the rest of this one, and until the command line is
# loaded, Ctrl-C prints Python's traceback. Type checkers know this name.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from flowfabric.app.budgets import BudgetHold, SyncBudgetHold
    from flowfabric.app.calls import IdempotencyConflict, SubmitManyError
    from flowfabric.app.children import Children, ChildrenFailed, SyncChildren
    from flowfabric.app.context import Context, SyncContext
    from flowfabric.app.fabric import Fabric, SyncFabric
    from flowfabric.app.flow import Flow, FlowBuilder, SyncFlow, SyncFlowBuilder
    from flowfabric.app.flow_views import FlowFailed, GraphView, NodeChange
    from flowfabric.app.handles import FutureValue, Node, any_of, gather, quorum
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
    from flowfabric.core.contracts.budgets import BudgetStatus, HardBreach, SoftBreach
    from flowfabric.core.errors import (
        BudgetExceeded,
        ConfigError,
        EngineError,
        FlowFabricError,
        LeaseLost,
        PayloadMismatch,
        PermanentError,
        RetryableError,
        TransportError,
    )
    from flowfabric.core.ids import budget_id, quota_id
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
    from flowfabric.sdk.spending import Usage
    from flowfabric.sdk.sync import SyncClient
    from flowfabric.sdk.worker import Worker

_HOMES = (
    ("app.budgets", "BudgetHold SyncBudgetHold"),
    ("app.calls", "IdempotencyConflict SubmitManyError"),
    ("app.children", "Children ChildrenFailed SyncChildren"),
    ("app.context", "Context SyncContext"),
    ("app.fabric", "Fabric SyncFabric"),
    ("app.flow", "Flow FlowBuilder SyncFlow SyncFlowBuilder"),
    ("app.flow_views", "FlowFailed GraphView NodeChange"),
    ("app.handles", "FutureValue Node any_of gather quorum"),
    ("app.run", "Run SyncRun UnexpectedResult"),
    ("app.tasks", "Task"),
    ("app.waits", "Signal WaitTimeout"),
    ("core.conditions", "AllOf Count CountKind OperatorOnly Single TimeoutOnly"),
    ("core.contracts.budgets", "BudgetStatus HardBreach SoftBreach"),
    (
        "core.errors",
        "BudgetExceeded ConfigError EngineError FlowFabricError LeaseLost PermanentError",
    ),
    ("core.errors", "PayloadMismatch RetryableError TransportError"),
    ("core.ids", "budget_id quota_id"),
    ("core.policy", "ExponentialBackoff FixedBackoff Retry"),
    ("engine.api.events", "CompletionEvent Event EventFilter LeaseEvent SignalEvent WorkerEvent"),
    ("engine.overview", "Wait"),
    ("sdk.client", "Client ExecutionCancelled ExecutionExpired ExecutionFailed NotFinished"),
    ("sdk.client", "RunError"),
    ("sdk.config", "WorkerConfig"),
    ("sdk.spending", "Usage"),
    ("sdk.sync", "SyncClient"),
    ("sdk.worker", "Worker"),
)
_HOME_OF = {name: f"flowfabric.{home}" for home, names in _HOMES for name in names.split()}

__all__: list[str] = ["AllOf", "BudgetExceeded", "BudgetHold", "BudgetStatus", "Children"]
__all__ += ["ChildrenFailed", "Client", "CompletionEvent", "ConfigError", "Context", "Count"]
__all__ += ["CountKind", "EngineError", "Event", "EventFilter", "ExecutionCancelled"]
__all__ += ["ExecutionExpired", "ExecutionFailed", "ExponentialBackoff", "Fabric", "FixedBackoff"]
__all__ += ["Flow", "FlowBuilder", "FlowFabricError", "FlowFailed", "FutureValue", "GraphView"]
__all__ += ["HardBreach", "IdempotencyConflict", "LeaseEvent", "LeaseLost", "Node", "NodeChange"]
__all__ += ["NotFinished", "OperatorOnly", "PayloadMismatch", "PermanentError", "Retry"]
__all__ += ["RetryableError", "Run", "RunError", "Signal", "SignalEvent", "Single", "SoftBreach"]
__all__ += ["SubmitManyError", "SyncBudgetHold", "SyncChildren", "SyncClient", "SyncContext"]
__all__ += ["SyncFabric", "SyncFlow", "SyncFlowBuilder", "SyncRun", "Task", "TimeoutOnly"]
__all__ += ["TransportError", "UnexpectedResult", "Usage", "Wait", "WaitTimeout", "Worker"]
__all__ += ["WorkerConfig", "WorkerEvent", "__version__", "any_of", "budget_id", "gather", "quorum"]
__all__ += ["quota_id"]


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name):
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 - as slow to load as `typing`

        value = getattr(import_module(home), name)
        globals()[name] = value
        return value
