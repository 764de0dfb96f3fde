"""Map and reduce over 1,000 items in one flow.

Run it with `python -m examples.map_reduce`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import flowfabric as ff

app = ff.Fabric()
WORDS = ("durable", "work", "is", "calm", "work")


@app.task(lane="words")
async def count_words(page: int) -> dict[str, int]:
    """Map: count the words of one page."""
    return Counter(WORDS[number % len(WORDS)] for number in range(page))


@app.task(lane="words")
async def merge(counts: list[dict[str, int]]) -> dict[str, int]:
    """Reduce: add up all counts."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


async def main() -> None:
    """Submit 1,001 nodes and 1,000 edges in one flow."""
    flow = app.flow("word-count")
    pages = flow.map(count_words, range(1000))
    flow.add(merge, ff.gather(pages))
    async with app, app.worker():
        started = time.perf_counter()
        submitted = await flow.submit()
        print(f"submitted after {time.perf_counter() - started:.2f} s")
        total = await submitted.result(timeout=60)
        print(f"result after {time.perf_counter() - started:.2f} s")
    print(total)
    assert sum(total.values()) == sum(range(1000))


if __name__ == "__main__":
    asyncio.run(main())
