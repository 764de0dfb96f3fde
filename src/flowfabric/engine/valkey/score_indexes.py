"""Pages of indexes that are ordered by score, then by execution id."""

from flowfabric.core.ids import ExecutionId
from flowfabric.core.text import lossless
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.pages import Damage

Scored = tuple[float, ExecutionId]


class ScoreIndexes:
    """Reads indexes after a position whose entry may have been removed."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def page(
        self,
        name: str,
        after: tuple[float, str] | None,
        count: int,
        damage: Damage,
        most: float | str = "+inf",
    ) -> list[Scored]:
        """The next entries, up to a score."""
        low = "-inf" if after is None else repr(after[0])
        found: list[Scored] = []
        offset = 0
        while len(found) < count:
            page = await self._read(name, low, most, offset, count)
            entries = [
                (float(score), each) for member, score in page for each in damage.ids([member])
            ]
            found += [entry for entry in entries if after is None or entry > after]
            if len(page) < count:
                break
            offset += count
            if after is not None and not found:
                # Many entries before the position may have the same score.
                offset = max(offset, await self._rank(name, low, after[1]))
        return found[:count]

    async def _rank(self, name: str, score: str, last_id: str) -> int:
        """How many entries with this score are not after the id."""
        first, last = 0, await self._calls.read(f"{name}: index", "ZCOUNT", name, score, score)
        while first < last:
            middle = (first + last) // 2
            page = await self._read(name, score, score, middle, 1)
            if page and lossless(page[0][0]) > last_id:
                last = middle
            else:
                first = middle + 1
        return first

    async def _read(
        self, name: str, low: str, high: float | str, offset: int, count: int
    ) -> list[tuple[bytes, float]]:
        bounds = (low, high, "BYSCORE", "LIMIT", offset, count, "WITHSCORES")
        return await self._calls.read(f"{name}: index", "ZRANGE", name, *bounds)
