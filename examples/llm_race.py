"""Three models race for an answer: the first one counts, the others are cancelled.

Run it with `python -m examples.llm_race`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import asyncio

import flowfabric as ff

app = ff.Fabric()
THINKS_S = {"haiku": 0.05, "novel": 60.0, "epic": 60.0}


@app.task(lane="llm", timeout="2m")
async def ask(model: str, question: str) -> str:
    """One model; cancelled where it waits when another was first."""
    await asyncio.sleep(THINKS_S[model])
    return f"{model}: 42, if you ask {question!r}"


@app.task(lane="llm")
async def present(ctx: ff.Context, answer: str) -> str:
    """Gets the winner's answer; `ctx.inputs.fired_by` is the winner's execution."""
    ctx.log.info("decided by %s", ctx.inputs.fired_by)
    return answer.upper()


async def main() -> None:
    """The race, and what became of the losers."""
    flow = app.flow("race")
    answers = flow.map(ask, THINKS_S, question="why?")
    flow.add(present, ff.any_of(*answers, on_satisfied="cancel_remaining"))
    # The losers notice at their next lease renewal.
    async with app, app.worker(lease_ttl=1):
        race = await flow.submit()
        print(await race.result(timeout=30))
        states = {key: node.state.value for key, node in (await race.graph()).nodes.items()}
    for key, state in states.items():
        print(f"{key:10} {state}")
    assert sorted(states.values()) == ["cancelled", "cancelled", "completed", "completed"]


if __name__ == "__main__":
    asyncio.run(main())
