"""Inputs and results of the engine's operations, one file a concern."""
