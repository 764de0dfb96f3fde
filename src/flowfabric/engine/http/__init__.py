"""The engine behind a FlowFabric server: every operation is an HTTP request."""
