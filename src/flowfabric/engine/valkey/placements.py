"""Where the executions of a lane are created, and idempotency keys when that changes.

A submitter may know an outdated placement. Without a key that is harmless: workers find the
execution wherever it is. With a key, a repeat must find the first execution. So a submitter sends
the number of shards that it knows, and a partition with newer settings refuses it. The submitter
then looks for the key where the lane's executions were created before. That search also makes the
old partitions refuse submitters that still create there.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from flowfabric.core.contracts.executions import CreateOutcome, Duplicate, NewExecution
from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts, key_name, spread_partition
from flowfabric.engine.valkey.calls import FunctionCalls, decoding, refused, text
from flowfabric.engine.valkey.pages import chunks

Outcomes = list[CreateOutcome | EngineError | None]
_SOUGHT = 200
_DEDUP_MS = 86_400_000
_STALE = "lane_placement_changed"


class Placement(NamedTuple):
    """Over how many partitions a lane is spread, and over how many until when it was before."""

    version: int = 0
    shards: int = 1
    earlier: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, stored: str) -> "Placement":
        """Reads `<version> <shards> <earlier shards>:<until ms> …`."""
        try:
            version, shards, *earlier = stored.split(" ")
            pairs = [each.split(":") for each in earlier]
            return cls(int(version), int(shards), tuple((int(n), int(at)) for n, at in pairs))
        except ValueError as error:
            raise CorruptionError("corruption", f"placements: {stored!r}") from error


_PINNED = Placement()


class Placements:
    """What this process knows of the lanes' placements; each registration of a lane renews it."""

    def __init__(self, counts: PartitionCounts) -> None:
        self._counts = counts
        self._known: dict[str, Placement] = {}
        # What to add to this process's clock for the server's time.
        self._offset_ms = 0.0

    def learn(self, lanes: Iterable[str], server_ms: int, stored: Sequence[Any]) -> None:
        """Remember the answer to a registration of these lanes."""
        self._offset_ms = server_ms - time.time() * 1000
        found = {text(lane): Placement.parse(text(each)) for lane, each in _pairs(stored)}
        self._known.update({lane: found.get(lane, _PINNED) for lane in lanes})

    def knows(self, lane: str) -> bool:
        return lane in self._known

    def of(self, lane: str) -> Placement:
        return self._known.get(lane, _PINNED)

    def moved(self, new: NewExecution) -> NewExecution:
        """The execution with an id where the lane's executions are created now."""
        shards, key = self.of(new.lane_id).shards, (new.namespace, new.idempotency_key)
        execution_id = ExecutionId.solo(new.lane_id, self._counts, shards, key)
        return msgspec.structs.replace(new, execution_id=execution_id, shards=shards)

    def earlier_tags(self, new: NewExecution) -> set[str]:
        """Other partitions where an execution with this key may have been created."""
        placement = self.of(new.lane_id)
        if not placement.earlier:
            return set()
        now = time.time() * 1000 + self._offset_ms
        kept = _DEDUP_MS if new.policy is None else new.policy.dedup_window_ms or _DEDUP_MS
        name = key_name(new.namespace, new.idempotency_key)
        partitions = {
            spread_partition(new.lane_id, name, shards, self._counts)
            for shards, until in placement.earlier
            if until + kept > now
        }
        return {f"{{fp:{each}}}" for each in partitions - {new.execution_id.partition}}


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


class KeyedCreation:
    """Creations with an idempotency key, whose partition depends on the lane's placement."""

    def __init__(self, calls: FunctionCalls, placements: Placements) -> None:
        self._calls = calls
        self._placements = placements

    async def find_earlier(
        self, items: Sequence[NewExecution], keyed: Iterable[int], outcomes: Outcomes
    ) -> None:
        """Set the outcome of those that exist where the lane was placed before."""
        groups: dict[tuple[str, str], list[int]] = {}
        for position in keyed:
            item = items[position]
            for tag in self._placements.earlier_tags(item):
                groups.setdefault((tag, item.lane_id), []).append(position)
        for (tag, lane), positions in groups.items():
            for part in chunks(positions, _SOUGHT):
                found = await self._find(tag, lane, [items[i] for i in part])
                for position, outcome in zip(part, found, strict=True):
                    outcomes[position] = outcomes[position] or outcome

    async def _find(
        self, tag: str, lane: str, items: Sequence[NewExecution]
    ) -> list[Duplicate | EngineError | None]:
        """The executions that have these keys there; the partition learns the lane's placement."""
        placement = self._placements.of(lane)
        args: list[Any] = [lane, placement.version, placement.shards]
        for item in items:
            args += (item.namespace, item.idempotency_key, item.idempotency_digest.hex())
        reply = await self._calls.fcall("ff_find_keys", tag, args, op="create_execution")
        with decoding(reply, "ff_find_keys", "create_execution"):
            pairs = zip(items, reply[2], strict=True)
            return [_found(item.execution_id, answer) for item, answer in pairs]

    async def place_again(
        self, items: list[NewExecution], keyed: Iterable[int], outcomes: Outcomes
    ) -> list[int]:
        """Move those that were refused to where the lane is placed now; returns their positions.

        The registry was read again since. A partition that refuses the current placement missed the
        last change, so it gets the change now.
        """
        stale = [i for i in keyed if is_stale(outcomes[i])]
        outdated: set[tuple[str, str]] = set()
        for position in stale:
            item, outcomes[position] = items[position], None
            if item.shards == self._placements.of(item.lane_id).shards:
                outdated.add((item.execution_id.tag, item.lane_id))
            else:
                items[position] = self._placements.moved(item)
        for tag, lane in outdated:
            await self._find(tag, lane, ())
        return stale


def is_stale(outcome: CreateOutcome | EngineError | None) -> bool:
    """Whether a creation was refused because the lane's placement has changed."""
    return isinstance(outcome, EngineError) and outcome.code == _STALE


def _found(execution_id: ExecutionId, answer: Any) -> Duplicate | EngineError | None:
    if answer == b"":
        return None
    if isinstance(answer, bytes):
        return Duplicate(ExecutionId.trusted(text(answer)))
    return refused(answer, "ff_find_keys", "create_execution", execution_id)
