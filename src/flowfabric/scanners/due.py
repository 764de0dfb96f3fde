"""The loop shared by all scanners of time-ordered indexes."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.core.ids import is_execution_id
from flowfabric.core.text import shown
from flowfabric.engine.api.upkeep import DuePage, DueScan
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.base import ScanResult, Scope, Tally
from flowfabric.scanners.tracker import FailureTracker
from flowfabric.scanners.watch import Key, by_partition, grouped

log = logging.getLogger(__name__)

_INDEXES_PER_CALL = 200
_UNDER_WAY = 16


def lane_indexes(lanes: Iterable[str], suffix: str) -> dict[str, str]:
    """The index of each lane, with the lane it belongs to."""
    return {f"lane:{keys.lane_part(lane)}:{suffix}": lane for lane in lanes}


class DueScanner(ABC):
    """Acts on the due members of its indexes, page by page, until a short page or the budget.

    Members that stay (they failed, rest, or belong to another deployment) are stepped over with
    an offset, so they never hide what stands behind them.
    """

    name: str
    page: int = 50
    #: Answers that took the member out of the index.
    settled: frozenset[str]
    #: Answers that leave the member where it is, rightly.
    left: frozenset[str]

    def __init__(self) -> None:
        self.tracker = FailureTracker()

    @abstractmethod
    def indexes(self, lanes: Iterable[str]) -> Mapping[str, str]:
        """Index names after `ff:idx:T:`, each with its lane (empty: not lane-scoped)."""

    @abstractmethod
    async def act(
        self, backend: ValkeyBackend, tag: str, lane: str, ids: Sequence[str]
    ) -> list[str]:
        """The engine call; one answer per id."""

    async def accepted(
        self,
        backend: ValkeyBackend,
        scope: Scope,
        tag: str,  # noqa: ARG002 - for indexes of something else than executions
        ids: Sequence[str],
    ) -> list[str]:
        """Those of the members that this process may touch, in order."""
        return await scope.filter.accepted(backend, ids)

    def is_member(self, tag: str, member: str) -> bool:
        """Whether this can be a member at all; what cannot is removed like one without a record."""
        return is_execution_id(member, tag)

    async def scan(self, backend: ValkeyBackend, scope: Scope) -> ScanResult:
        """One cycle over every index of the territory."""
        self.tracker.begin_cycle()
        owners = {
            (tag, index): lane
            for tag, lanes in scope.territory.lanes.items()
            for index, lane in self.indexes(lanes).items()
        }
        tally = Tally()
        groups = grouped(owners, _INDEXES_PER_CALL, apart=backend.transport.is_cluster)
        for start in range(0, len(groups), _UNDER_WAY):
            wave = groups[start : start + _UNDER_WAY]
            for page in await self._survey(backend, scope, wave, tally):
                if scope.spent():
                    tally.more = True
                    return tally.result()
                await self._drain(backend, scope, page, owners[page.tag, page.index], tally)
        return tally.result()

    async def _survey(
        self, backend: ValkeyBackend, scope: Scope, groups: list[list[Key]], tally: Tally
    ) -> list[DuePage]:
        """The first page of every index of a few groups, each read by one call."""
        scans: list[DueScan | BaseException] = await asyncio.gather(
            *(backend.upkeep.scan_due(by_partition(group), self.page) for group in groups),
            return_exceptions=True,
        )
        if all(isinstance(scan, EngineError) for scan in scans):
            raise next(scan for scan in scans if isinstance(scan, EngineError))
        pages: list[DuePage] = []
        for group, scan in zip(groups, scans, strict=True):
            if isinstance(scan, DueScan):
                scope.progress()
                pages += scan.pages
                _unreadable(scope, scan, tally)
                if scope.watch is not None:
                    scope.watch.learn(group, scan)
            elif isinstance(scan, EngineError):
                tally.errors += 1
                scope.trouble("index not readable", scan, partition=",".join(by_partition(group)))
            else:
                raise scan
        return pages

    async def _drain(
        self, backend: ValkeyBackend, scope: Scope, page: DuePage, lane: str, tally: Tally
    ) -> None:
        """Everything due in one index, beginning with a page already read."""
        tag, ids, offset = page.tag, page.ids, 0
        seen: set[str] = set()
        while True:
            fresh = [member for member in ids if member not in seen]
            gone = await self._handle(backend, scope, tag, lane, fresh, tally)
            seen.update(fresh)
            if len(ids) < self.page:
                return
            if scope.spent():
                tally.more = True
                return
            offset += len(ids) - gone
            try:
                scan = await backend.upkeep.scan_due({tag: [page.index]}, self.page, offset)
            except EngineError as error:
                tally.errors += 1
                scope.trouble("index not readable", error, partition=tag)
                return
            scope.progress()
            _unreadable(scope, scan, tally)
            ids = scan.pages[0].ids if scan.pages else []

    async def _handle(
        self,
        backend: ValkeyBackend,
        scope: Scope,
        tag: str,
        lane: str,
        ids: list[str],
        tally: Tally,
    ) -> int:
        """Act on one page; how many members left the index."""
        awake = [member for member in ids if not self.tracker.skips(member)]
        accepted = await self.accepted(backend, scope, tag, awake)
        if not accepted:
            return 0
        gone = 0
        for member, answer in await self._answers(backend, scope, tag, lane, accepted, tally):
            if answer in self.settled:
                gone += 1
                tally.processed += 1
                self.tracker.succeeded(member)
                if not self.is_member(tag, member):
                    self._tell_malformed(member, tag)
            elif answer in self.left:
                self.tracker.succeeded(member)
            else:
                tally.errors += 1
                self._failed(member, tag, answer)
        return gone

    async def _answers(
        self,
        backend: ValkeyBackend,
        scope: Scope,
        tag: str,
        lane: str,
        ids: list[str],
        tally: Tally,
    ) -> list[tuple[str, str]]:
        try:
            return list(zip(ids, await self.act(backend, tag, lane, ids), strict=True))
        except EngineError as error:
            if error.retryable:
                # The server's trouble is not the items': nothing is held against them.
                tally.errors += 1
                scope.trouble("call failed", error, partition=tag)
                return []
            if len(ids) == 1:
                return [(ids[0], f"error:{error}")]
        answers: list[tuple[str, str]] = []
        for member in ids:
            answers += await self._answers(backend, scope, tag, lane, [member], tally)
        return answers

    def _tell_malformed(self, member: str, tag: str) -> None:
        log.warning(
            "%s: malformed member removed: %s",
            self.name,
            shown(member),
            extra={
                "action": "member_malformed",
                "scanner": self.name,
                "item": shown(member),
                "partition": tag,
            },
        )

    def _failed(self, member: str, tag: str, answer: str) -> None:
        if self.tracker.failed(member):
            log.error(
                "persistent %s failure: %s rests for %d cycles",
                self.name,
                shown(member),
                self.tracker.BACKOFF_CYCLES,
                extra={
                    "action": "scanner_poison",
                    "scanner": self.name,
                    "item": shown(member),
                    "failures": self.tracker.STRIKES,
                    "backoff_cycles": self.tracker.BACKOFF_CYCLES,
                },
            )
        else:
            self._warn("item failed", execution_id=shown(member), partition=tag, error=answer)

    def _warn(self, what: str, **fields: str) -> None:
        log.warning(
            "%s: %s: %s",
            self.name,
            what,
            fields.get("error", ""),
            extra={"action": "scanner_failure", "scanner": self.name, **fields},
        )


def _unreadable(scope: Scope, scan: DueScan, tally: Tally) -> None:
    """An index that cannot be read is one error, and the scan goes on."""
    for (tag, index), why in scan.unreadable.items():
        tally.errors += 1
        error = CorruptionError("corruption", f"{keys.index(tag, index)}: {why}")
        scope.trouble("index not readable", error, partition=tag, index=index)
