"""Measurements of this machine: `flowfabric bench SCENARIO`."""
