"""Work that only some workers can do: CPU workers prepare frames, a GPU worker renders them.

Run it with `python -m examples.gpu_pipeline`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import asyncio

import flowfabric as ff

app = ff.Fabric()


@app.task(lane="video")
async def prepare(number: int) -> str:
    """Any worker of the lane can run this."""
    return f"frame {number}"


@app.task(lane="video", capabilities={"gpu"})
async def render(frame: str) -> str:
    """Waits for a worker that offers `gpu`; other workers skip it."""
    return f"{frame}, rendered"


async def main() -> None:
    async with app, app.worker(concurrency=4):
        frames = [await (await app.submit(prepare, n)).result(timeout=20) for n in range(3)]
        waiting = await app.submit(render, frames[0])
        # The only worker has no GPU. The explanation names the missing capability.
        why = await waiting.explain()
        assert "lacks gpu" in str(why), why
        print(why)
        async with app.worker(concurrency=1, capabilities=["gpu"]):
            rest = [await app.submit(render, frame) for frame in frames[1:]]
            for run in (waiting, *rest):
                print(await run.result(timeout=20))


if __name__ == "__main__":
    asyncio.run(main())
