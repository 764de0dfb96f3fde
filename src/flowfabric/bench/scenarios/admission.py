"""Executions with a budget and a quota each, compared with executions that have none."""

from typing import Any

from flowfabric.app.tasks import TaskFunction
from flowfabric.bench.arena import Arena, timed
from flowfabric.bench.report import Figures
from flowfabric.bench.scenarios.lifecycle import process, submit
from flowfabric.bench.workers import LIMITS, BenchApp
from flowfabric.core.contracts.budgets import NewBudget
from flowfabric.core.ids import budget_id, quota_id

_WARM_UP = 512
_NEVER = 10**9
_SLOTS = 10_000


async def run(at: Arena) -> Figures:
    """Submit and run n executions without limits, then n with limits that stay open."""
    budget = NewBudget(
        budget_id=budget_id(LIMITS), dimensions=("tokens",), hard_limits=(_NEVER,), soft_limits=(0,)
    )
    await at.backend.budgets.create_budget(budget)
    await at.backend.quotas.create_quota_policy(
        quota_id(LIMITS), max_requests_per_window=_NEVER, max_concurrent=_SLOTS
    )
    async with BenchApp(at.url) as app:
        at.progress.begin("admission", 2 * (_WARM_UP + at.options.n))
        plain, _ = await _lifecycles(at, app, app.noop)
        limited, server_us = await _lifecycles(at, app, app.limited)
    return {
        "plain_per_s": plain,
        "limited_per_s": limited,
        "of_plain": limited / plain,
        "server_us": server_us,
    }


async def _lifecycles(
    at: Arena, app: BenchApp, task: TaskFunction[..., None, ..., Any]
) -> tuple[float, float]:
    """Lifecycles per second, and the server's time for each in µs."""
    n = at.options.n
    await submit(at, app, _WARM_UP, task)
    await process(at, app, _WARM_UP)
    server = await at.server_cpu_s()
    submit_s, _ = await timed(submit(at, app, n, task))
    whole_s = submit_s + await process(at, app, n)
    return n / whole_s, (await at.server_cpu_s() - server) / n * 1e6
