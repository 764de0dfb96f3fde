"""Quota policies on a cluster: each on its own slot, listed and reconciled across all of them."""

from __future__ import annotations

from flowfabric.core.contracts.quotas import Admitted, RateExceeded
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.valkey.backend import ValkeyBackend


async def test_policies_of_all_partitions(backend: ValkeyBackend) -> None:
    quotas = backend.quotas
    names = sorted(new_uuid() for _ in range(40))
    async with await backend.events.subscribe_operator_events("start") as feed:
        for name in names:
            await quotas.create_quota_policy(name, max_requests_per_window=1, max_concurrent=2)
        told = [await anext(feed) for _ in names]
    assert {getattr(event, "type", event) for event in told} == {"quota_created"}
    first, second = (ExecutionId.solo("default", backend.counts) for _ in range(2))
    for name in names:
        answers = await quotas.admit_many(name, [first, second])
        assert [type(answer) for answer in answers] == [Admitted, RateExceeded]
        await quotas.confirm_many(name, [first])
        await quotas.note_blocked(name, [second])
        assert (await quotas.blocked(name)).entries == (second,)
    page = await quotas.list_quota_policies(limit=25)
    rest = await quotas.list_quota_policies(page.next_cursor or "", limit=25)
    rows = [*page.entries, *rest.entries]
    assert [row.quota_policy_id for row in rows] == names
    assert {(row.window_count, row.slots_held) for row in rows} == {(1, 1)}
    partitions = await quotas.quota_partitions()
    outcomes = [await quotas.reconcile_quota_counters(each) for each in partitions]
    # No such execution runs, so its slots are free again.
    assert sum(outcome.changed for outcome in outcomes) == len(names)
    assert sum(outcome.errors for outcome in outcomes) == 0
    assert await backend.upkeep.trim_policy_events(2**45) == len(names)
