"""What commands read from the engine."""
