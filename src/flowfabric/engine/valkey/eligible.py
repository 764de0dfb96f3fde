"""Looking at the executions of a lane that workers may take, without claiming them."""

import asyncio
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from flowfabric.core import capabilities as caps
from flowfabric.core.ids import ExecutionId, validate_lane, validate_namespaces
from flowfabric.engine.api import check
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.pages import Damage

Queue = list[tuple[float, bytes]]
_MAX_TURNS = 10_000


class EligibleScans:
    """Reads waiting executions in claim order; namespaces take turns."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls
        self._turns: dict[tuple[str, str, str], int] = {}
        """By lane and namespace of a partition: the number of the last scan that began with it."""
        self._scans = 0

    async def scan(
        self,
        lane_id: str,
        tag: str,
        limit: int,
        worker_capabilities: Iterable[str] | None,
        worker_tasks: Iterable[str],
        namespaces: Iterable[str] | None,
        without: Iterable[str],
        *,
        lost: bool,
    ) -> list[ExecutionId]:
        """See `Claims.scan_eligible_executions`."""
        spaces = None if namespaces is None else validate_namespaces(namespaces)
        left_out = validate_namespaces(without, "without")
        lane, tag = validate_lane(lane_id), self._calls.checked_tag(tag)
        if check.whole(limit, "limit") < 1:
            return []
        limit = min(limit, check.MAX_EXACT)
        offered = None
        if worker_capabilities is not None:
            tokens = caps.normalise(worker_capabilities, "worker")
            tasks = check.texts(worker_tasks, "worker_tasks")
            offered = caps.offered_csv(tokens, tasks, no_others=False)
        covers = caps.Offer(offered, spaces).covers
        indexes = (keys.eligible, keys.reclaimable) if lost else (keys.eligible,)
        used = [
            (namespace, index(tag, lane, each))
            for each in ("", *await self._calls.signatures(tag, lane))
            if (namespace := caps.signature_parts(each)[0]) not in left_out and covers(each)
            for index in indexes
        ]
        pages = await asyncio.gather(
            *(
                self._calls.read(f"{name}: index", "ZRANGE", name, 0, limit - 1, "WITHSCORES")
                for _, name in used
            )
        )
        waiting: dict[str, Queue] = {}
        for (namespace, _), page in zip(used, pages, strict=True):
            # Without a worker, all namespaces are in one queue.
            space = "" if offered is None else namespace
            entries = [(score, member) for member, score in page]
            waiting[space] = sorted((*waiting.get(space, ()), *entries))
        found = self._in_turn(
            tag, lane, {space: queue for space, queue in waiting.items() if queue}
        )
        return Damage("scan_eligible_executions").ids(member for _, member in found)[:limit]

    def _in_turn(self, tag: str, lane: str, queues: Mapping[str, Queue]) -> Queue:
        """One entry of each namespace after the other; that which waited longest for it begins."""
        names = sorted(queues, key=lambda name: (self._turns.get((tag, lane, name), 0), name))
        if len(names) > 1:
            if len(self._turns) >= _MAX_TURNS:
                self._turns.clear()
            self._scans += 1
            self._turns[tag, lane, names[0]] = self._scans
        rounds = zip_longest(*(queues[name] for name in names))
        return [entry for entries in rounds for entry in entries if entry is not None]
