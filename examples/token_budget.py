"""Eight agents share a token budget. They never overspend, and suspended agents resume later.

Run it with `python -m examples.token_budget`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import flowfabric as ff

app = ff.Fabric()
BUDGET = "fleet"
MOST, USED = 1000, 700


async def ask_model(question: str, max_tokens: int) -> tuple[str, int]:
    """A model that answers with fewer tokens than it may use."""
    await asyncio.sleep(0.02)
    return f"{question} Because of {max_tokens - USED} reasons.", USED


@app.task(lane="agents")
async def agent(ctx: ff.Context, question: str) -> str:
    """Hold the maximum that the answer may cost, then settle with the actual cost."""
    async with ctx.reserve(BUDGET, tokens=MOST) as hold:
        answer, tokens = await ask_model(question, MOST)
        await hold.settle(tokens=tokens)
    return answer


async def report(client: ff.Client, runs: list[ff.Run[str]]) -> Counter[str]:
    """Print the usage and the states of the agents."""
    status = await client.budget(BUDGET)
    states = Counter([(await run.state()).value for run in runs])
    print(f"{status.usage['tokens']} of {status.hard_limits['tokens']} tokens: {dict(states)}")
    assert status.usage["tokens"] <= status.hard_limits["tokens"]
    assert status.reserved == {}
    return states


async def main() -> None:
    """Run the agents until they reach the limit, raise it, and resume the suspended agents."""
    async with app, app.worker():
        client = await app.client()
        if await exists(client):
            await client.delete_budget(BUDGET, force=True)
        await client.create_budget(BUDGET, {"tokens": 3000}, on_hard_limit="suspend")
        runs = await agent.submit_many([[f"Why {number}?"] for number in range(8)])
        await asyncio.gather(*(run_until_stop(run) for run in runs))
        first = await report(client, runs)
        assert first["completed"] > 0
        assert first["suspended"] > 0

        print("The limit is raised, and the suspended agents resume.")
        await client.update_budget(BUDGET, {"tokens": 20_000})
        for run in runs:
            if (await run.state()).value == "suspended":
                await run.approve()
        answers = [await run.result(timeout=30) for run in runs]
        assert (await report(client, runs))["completed"] == len(answers)
        assert (await client.budget(BUDGET)).usage == {"tokens": USED * len(runs)}
        print(answers[0])


async def exists(client: ff.Client) -> bool:
    """Whether an earlier run of this example left its budget behind."""
    return any(each.scope_id == BUDGET for each in (await client.list_budgets()).entries)


async def run_until_stop(run: ff.Run[str]) -> None:
    """Wait until an agent has answered or is suspended."""
    done = asyncio.create_task(run.wait(timeout=30))
    stopped = asyncio.create_task(run.wait_until_suspended(timeout=30))
    _, pending = await asyncio.wait([done, stopped], return_when=asyncio.FIRST_COMPLETED)
    for waiting in pending:
        waiting.cancel()
    await asyncio.gather(done, stopped, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
