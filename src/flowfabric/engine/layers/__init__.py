"""Wrappers around the engine's interface."""
