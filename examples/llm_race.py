"""Ask three models the same question: use the first answer and cancel the other two.

Run it with `python -m examples.llm_race`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import asyncio

import flowfabric as ff

app = ff.Fabric()
THINKS_S = {"haiku": 0.05, "novel": 60.0, "epic": 60.0}


@app.task(lane="llm", timeout="2m")
async def ask(model: str, question: str) -> str:
    """Ask one model. The `await` is cancelled if another model answers first."""
    await asyncio.sleep(THINKS_S[model])
    return f"{model}: 42, if you ask {question!r}"


@app.task(lane="llm")
async def present(ctx: ff.Context, answer: str) -> str:
    """Present the first answer; `ctx.inputs.fired_by` is the execution that gave it."""
    ctx.log.info("decided by %s", ctx.inputs.fired_by)
    return answer.upper()


async def main() -> None:
    """Run the race and print the final states."""
    flow = app.flow("race")
    answers = flow.map(ask, THINKS_S, question="why?")
    flow.add(present, ff.any_of(*answers, on_satisfied="cancel_remaining"))
    # A cancelled handler stops at the next lease renewal of its worker.
    async with app, app.worker(lease_ttl=1):
        race = await flow.submit()
        print(await race.result(timeout=30))
        states = {key: node.state.value for key, node in (await race.graph()).nodes.items()}
    for key, state in states.items():
        print(f"{key:10} {state}")
    assert sorted(states.values()) == ["cancelled", "cancelled", "completed", "completed"]


if __name__ == "__main__":
    asyncio.run(main())
