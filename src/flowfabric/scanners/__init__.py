"""Background jobs: one small scanner per file, one supervisor per process."""

from __future__ import annotations

from flowfabric.scanners.filter import ScannerFilter
from flowfabric.scanners.hints import DueHints
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scanners.supervisor import ScannerSupervisor

__all__ = ["DueHints", "ScannerFilter", "ScannerSettings", "ScannerSupervisor"]
