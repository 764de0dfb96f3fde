"""What callers of the engine see: operations by concern, their requests and results."""
