"""Time-driven upkeep: one small scanner a file, one supervisor a process."""

from __future__ import annotations

from flowfabric.scanners.filter import ScannerFilter
from flowfabric.scanners.hints import DueHints
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scanners.supervisor import ScannerSupervisor

__all__ = ["DueHints", "ScannerFilter", "ScannerSettings", "ScannerSupervisor"]
