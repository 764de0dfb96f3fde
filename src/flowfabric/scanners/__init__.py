"""Background jobs: the scanners, and one supervisor of them per process."""

from flowfabric.scanners.hints import DueHints
from flowfabric.scanners.settings import ScannerFilter, ScannerSettings
from flowfabric.scanners.supervisor import ScannerSupervisor

__all__ = ["DueHints", "ScannerFilter", "ScannerSettings", "ScannerSupervisor"]
