"""Removes workers that died without signing off."""

from __future__ import annotations

from flowfabric.scanners.base import Cycle


class WorkerSweeper:
    """Removes expired registrations of each namespace."""

    name = "worker_sweeper"

    async def scan(self, cycle: Cycle) -> None:
        for namespace in await cycle.backend.places.namespaces_in_use():
            if cycle.out_of_time():
                return
            with cycle.surviving("could not sweep the workers", namespace=namespace):
                cycle.processed += await cycle.backend.upkeep.sweep_workers(namespace)
