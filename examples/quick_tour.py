"""A tour in one file: submit, batch, priority, idempotency, delay, typed results, history.

Run it with `python -m examples.quick_tour`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import flowfabric as ff

app = ff.Fabric()
served: list[str] = []


@dataclass(frozen=True)
class Page:
    """A page and how many words it has."""

    url: str
    words: int


@app.task(lane="tour")
async def count_words(url: str, text: str) -> Page:
    """Arguments and results are typed: stored as JSON, and decoded to their types."""
    return Page(url, len(text.split()))


@app.task(lane="tour-ordered")
def note(name: str) -> None:
    """A plain function; it runs in a thread and records the order of its calls."""
    served.append(name)


async def submit_and_wait() -> None:
    """One execution and its result."""
    run = await app.submit(count_words, "example.org", "durable work is calm work")
    page = await run.result(timeout=10)
    assert page == Page("example.org", 5)
    print("result:", page)


async def submit_a_batch() -> None:
    """Many at once: a few round trips, one handle each."""
    calls = [{"url": f"example.org/{n}", "text": "word " * n} for n in range(200)]
    started = time.perf_counter()
    runs = await app.submit_many(count_words, calls)
    pages = await asyncio.gather(*(run.result(timeout=20) for run in runs))
    assert [page.words for page in pages] == list(range(200))
    print(f"batch: 200 results in {time.perf_counter() - started:.2f} s")


async def submit_once() -> None:
    """An idempotency key identifies one execution, no matter who submits it."""
    once = count_words.options(idempotency_key="tour-once")
    first = await once.submit("a", "b c")
    again = await once.submit("a", "b c")
    assert again.id == first.id
    assert again.duplicate
    print("idempotency: the second submit found", again.id.compact)


async def submit_by_priority() -> None:
    """Submit before a worker serves the lane: the highest priority then runs first."""
    runs = [
        await note.submit("whenever"),
        await note.options(priority=5).submit("soon"),
        await note.options(priority=100).submit("now"),
    ]
    async with app.worker(lanes=["tour-ordered"], concurrency=1):
        await asyncio.gather(*(run.result(timeout=10) for run in runs))
    assert served == ["now", "soon", "whenever"]
    print("priority: served", ", ".join(served))


async def submit_for_later() -> None:
    """A delay postpones an execution; until then, its state is `delayed`."""
    run = await count_words.options(delay="500ms", tags={"tour.part": "delay"}).submit("later", "x")
    assert await run.state() == "delayed"
    await run.result(timeout=10)
    info = await run.info()
    waited = int(info.started_at or 0) - int(info.created_at)
    assert waited >= 500
    print(f"delay: it started {waited} ms after it was submitted")


async def main() -> None:
    """Run all parts in order."""
    async with app:
        await submit_by_priority()
        async with app.worker(lanes=["tour"]):
            await submit_and_wait()
            await submit_a_batch()
            await submit_once()
            await submit_for_later()


if __name__ == "__main__":
    asyncio.run(main())
