"""Pages of indexes that are ordered by score, then by execution id."""

from typing import Any

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.pages import Damage

Scored = tuple[float, ExecutionId]


class ScoreIndexes:
    """Reads indexes after a position whose entry may be gone."""

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
        range_ = (low, most, "BYSCORE", "LIMIT")
        found = await self._read(name, damage, *range_, 0, count)
        if after is None or not found:
            return found
        left = [entry for entry in found if entry > after]
        if len(left) < len(found):
            # Entries before the position have its score: there may be any number of them.
            skipped = len(found) - len(left)
            if not left:
                skipped = await self._rank(name, after, low, damage)
            left = await self._read(name, damage, *range_, skipped, count)
        return [entry for entry in left if entry > after]

    async def _rank(self, name: str, after: tuple[float, str], low: str, damage: Damage) -> int:
        """How many entries with the score of a position are not after it."""
        score = (low, low)
        first, last = 0, await self._calls.read(f"{name}: index", "ZCOUNT", name, *score)
        while first < last:
            middle = (first + last) // 2
            at = await self._read(name, damage, *score, "BYSCORE", "LIMIT", middle, 1)
            if at and at[0] > after:
                last = middle
            else:
                first = middle + 1
        return first

    async def _read(self, name: str, damage: Damage, *bounds: Any) -> list[Scored]:
        page: Any = await self._calls.read(f"{name}: index", "ZRANGE", name, *bounds, "WITHSCORES")
        return [(float(score), each) for member, score in page for each in damage.ids([member])]
