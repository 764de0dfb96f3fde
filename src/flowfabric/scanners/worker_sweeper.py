"""Worker processes that died without a word leave the registry."""

from __future__ import annotations

from flowfabric.core.errors import EngineError
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.base import ScanResult, Scope, Tally


class WorkerSweeper:
    """Removes expired registrations from the index of each namespace."""

    name = "worker_sweeper"

    async def scan(self, backend: ValkeyBackend, scope: Scope) -> ScanResult:
        """Sweep every namespace."""
        tally = Tally()
        for namespace in await backend.places.namespaces_in_use():
            cursor = "0"
            while True:
                if scope.spent():
                    return ScanResult(tally.processed, tally.errors, more=True)
                try:
                    cursor, swept = await backend.upkeep.sweep_workers(namespace, cursor)
                except EngineError as error:
                    tally.errors += 1
                    scope.trouble("workers not swept", error, namespace=namespace)
                    break
                tally.processed += swept
                scope.progress()
                if cursor == "0":
                    break
        return tally.result()
