"""Inputs and results of the engine's operations, one file per concern."""
