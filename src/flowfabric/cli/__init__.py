"""The `flowfabric` command: one module a command, thin over the engine and the SDK."""
