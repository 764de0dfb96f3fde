"""The scanner of quota policies."""

from flowfabric.scanners.base import Cycle


class QuotaReconciler:
    """Frees slots of executions that no longer run, and drops what expired."""

    name = "quota_reconciler"

    async def scan(self, cycle: Cycle) -> None:
        quotas = cycle.backend.quotas
        # Its territory names the partitions of executions, unless one of quotas was asked for.
        asked = [tag for tag in cycle.territory if tag.startswith("{q:")]
        for partition in await quotas.quota_partitions():
            if asked and f"{{q:{partition}}}" not in asked:
                continue
            if cycle.out_of_time():
                return
            with cycle.surviving("could not reconcile the quotas", partition=f"{{q:{partition}}}"):
                outcome = await quotas.reconcile_quota_counters(partition)
                cycle.processed += outcome.changed
                cycle.errors += outcome.errors
                cycle.progress()
