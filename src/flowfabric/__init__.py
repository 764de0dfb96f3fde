"""FlowFabric: durable execution for Python on Valkey."""

__version__ = "0.1.0"
