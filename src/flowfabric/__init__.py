"""FlowFabric: durable execution for Python on Valkey."""

from flowfabric.app.context import Context
from flowfabric.app.fabric import Fabric
from flowfabric.app.run import Run
from flowfabric.app.sync import SyncFabric, SyncRun
from flowfabric.app.tasks import Task
from flowfabric.core.errors import (
    ConfigError,
    EngineError,
    FlowFabricError,
    LeaseLost,
    PermanentError,
    RetryableError,
    TransportError,
)
from flowfabric.core.retry import Retry
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

__version__ = "0.1.0"

__all__ = [
    "Client",
    "ConfigError",
    "Context",
    "EngineError",
    "ExecutionCancelled",
    "ExecutionExpired",
    "ExecutionFailed",
    "Fabric",
    "FlowFabricError",
    "LeaseLost",
    "NotFinished",
    "PermanentError",
    "Retry",
    "RetryableError",
    "Run",
    "RunError",
    "SyncClient",
    "SyncFabric",
    "SyncRun",
    "Task",
    "TransportError",
    "Worker",
    "WorkerConfig",
    "__version__",
]
