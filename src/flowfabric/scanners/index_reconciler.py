"""Every execution stands in exactly the indexes that its record demands."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from flowfabric.core import keys
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.backend import Backend
from flowfabric.scanners.base import ScanResult, Scope, Tally

__all__ = ["IndexReconciler"]

log = logging.getLogger(__name__)

_PAGE = 100
_MAX_PER_CYCLE = 10_000
_QUIET_PER_CYCLE = 50
_SOUGHT_PER_CYCLE = 512
_SOUGHT_PER_CYCLE_CLUSTER = 32
_FIELDS = ("lifecycle_phase", "eligibility_state", "ownership_state")


class IndexReconciler:
    """Audits a rotating part of all executions and repairs drift seen in two cycles running.

    A partition that nothing happened in since an audit found it clean is audited again slowly:
    reading every finished execution over and over would cost more than an idle worker may.

    It also finds partitions that hold work but are not registered, which no scanner would visit.
    """

    name = "index_reconciler"

    def __init__(self) -> None:
        self.repaired = 0
        # execution id → tag and verdict of the last cycle
        self._suspects: dict[str, tuple[str, str]] = {}
        # tag → the member after which the walk goes on; only while it is under way
        self._cursors: dict[str, str] = {}
        # tag → what the partition looked like before a clean walk of all of it
        self._clean: dict[str, object] = {}
        self._walked: dict[str, object] = {}
        # the partition the next cycle begins with, and whose turn it is among those at rest
        self._resume = ""
        self._turn = 0
        # the first partition of the next part that is searched for unregistered work
        self._sought = 0

    async def scan(self, backend: Backend, scope: Scope) -> ScanResult:
        """Repair what drifted before and still does, then audit the next part."""
        tally = Tally()
        before, self._suspects = self._suspects, {}
        await self._settle(backend, scope, before, tally)
        await self._seek(backend, scope, tally)
        changed, quiet = await self._sort(backend, scope, tally)
        budget = _MAX_PER_CYCLE
        self._resume = ""
        for tag, looks in changed:
            if scope.spent() or budget <= 0:
                tally.more = budget > 0
                self._resume = self._resume or tag
                break
            budget -= await self._walk(backend, scope, tag, looks, budget, tally)
            self._resume = tag if tag in self._cursors else ""
        if quiet and not scope.spent():
            tag, looks = quiet[self._turn % len(quiet)]
            self._turn += 1
            await self._walk(backend, scope, tag, looks, _QUIET_PER_CYCLE, tally)
        return tally.result()

    async def _seek(self, backend: Backend, scope: Scope, tally: Tally) -> None:
        """Register what a failover forgot, in the next part of all partitions."""
        cluster = backend.transport.is_cluster
        first, count = self._sought, backend.counts.flow
        end = min(count, first + (_SOUGHT_PER_CYCLE_CLUSTER if cluster else _SOUGHT_PER_CYCLE))
        known = set(scope.territory.tags)
        tags = [tag for i in range(first, end) if (tag := f"{{fp:{i}}}") not in known]
        try:
            lost = await backend.occupied_partitions(tags)
            if lost:
                # One that was registered a moment ago is not lost.
                registered = set(await backend.used_partitions())
                lost = [tag for tag in lost if tag not in registered]
                await backend.register_places((), lost)
        except EngineError as error:
            tally.errors += 1
            scope.trouble("partitions not searched", error)
            return
        self._sought = end % count
        for tag in lost:
            tally.processed += 1
            log.warning(
                "partition %s holds work but was not registered: registered again",
                tag,
                extra={"action": "partition_registered", "scanner": self.name, "partition": tag},
            )

    async def _sort(
        self, backend: Backend, scope: Scope, tally: Tally
    ) -> tuple[list[tuple[str, object]], list[tuple[str, object]]]:
        """Partitions to audit now, beginning where the last cycle ended, and those at rest."""
        tags = scope.territory.tags
        first = tags.index(self._resume) if self._resume in tags else 0
        changed: list[tuple[str, object]] = []
        quiet: list[tuple[str, object]] = []
        for tag in tags[first:] + tags[:first]:
            try:
                looks = await self._looks(backend, tag)
            except EngineError as error:
                tally.errors += 1
                scope.trouble("partition not readable", error, partition=tag)
                continue
            rested = not scope.thorough and self._clean.get(tag) == looks
            (quiet if rested else changed).append((tag, looks))
        return changed, quiet

    async def _looks(self, backend: Backend, tag: str) -> object:
        """Changes with every creation and every event of the partition."""
        index, feed = keys.index(tag, "all_executions"), keys.events(tag)
        return await asyncio.gather(
            backend.transport.call("ZCARD", index, key=index),
            backend.transport.call("XREVRANGE", feed, "+", "-", "COUNT", 1, key=feed),
        )

    async def _walk(
        self, backend: Backend, scope: Scope, tag: str, looks: object, budget: int, tally: Tally
    ) -> int:
        """Audit up to `budget` executions of one partition from its cursor on."""
        if tag not in self._cursors:
            self._walked[tag] = looks
        done = 0
        while done < budget and not scope.spent():
            size = min(_PAGE, budget - done)
            try:
                ids = await self._page(backend, tag, self._cursors.get(tag), size)
                await self._audit(backend, scope, tag, ids, tally)
            except EngineError as error:
                tally.errors += 1
                scope.trouble("partition not audited", error, partition=tag)
                break
            scope.progress()
            done += len(ids)
            if len(ids) < size:
                self._cursors.pop(tag, None)
                clean = all(tag != suspect for suspect, _ in self._suspects.values())
                if clean:
                    self._clean[tag] = self._walked[tag]
                else:
                    self._clean.pop(tag, None)
                break
            self._cursors[tag] = ids[-1]
        return max(done, 1)

    async def _page(self, backend: Backend, tag: str, after: str | None, size: int) -> list[str]:
        key = keys.index(tag, "all_executions")
        first = "-" if after is None else f"({after}"
        members: Any = await backend.transport.call(
            "ZRANGE", key, first, "+", "BYLEX", "LIMIT", 0, size, key=key
        )
        return [member.decode(errors="replace") for member in members]

    async def _audit(
        self, backend: Backend, scope: Scope, tag: str, ids: list[str], tally: Tally
    ) -> None:
        accepted = await scope.filter.accepted(backend, ids)
        for member, verdict in await self._reconcile(backend, tag, accepted, "check"):
            if verdict == "consistent":
                continue
            if verdict == "orphan" or verdict.startswith("drifted:"):
                self._suspects[member] = (tag, verdict)
            else:
                tally.errors += 1
                self._warn("audit failed", execution_id=member, partition=tag, error=verdict)

    async def _reconcile(
        self, backend: Backend, tag: str, ids: list[str], mode: Literal["check", "repair"]
    ) -> list[tuple[str, str]]:
        if not ids:
            return []
        return list(zip(ids, await backend.reconcile_execution_index(tag, ids, mode), strict=True))

    async def _settle(
        self,
        backend: Backend,
        scope: Scope,
        suspects: dict[str, tuple[str, str]],
        tally: Tally,
    ) -> None:
        for member, (tag, verdict) in suspects.items():
            if tag not in scope.territory.tags or scope.spent():
                self._suspects[member] = (tag, verdict)
                continue
            try:
                ((_, now),) = await self._reconcile(backend, tag, [member], "check")
                if now == verdict:
                    await self._repair(backend, tag, member, verdict, tally)
                elif now != "consistent":
                    self._suspects[member] = (tag, now)
            except EngineError as error:
                tally.errors += 1
                self._warn("repair failed", execution_id=member, partition=tag, error=str(error))

    async def _repair(
        self, backend: Backend, tag: str, member: str, verdict: str, tally: Tally
    ) -> None:
        fields = await _state(backend, member)
        ((_, answer),) = await self._reconcile(backend, tag, [member], "repair")
        if answer == "consistent":
            return
        if answer != "orphan_removed" and not answer.startswith("repaired:"):
            tally.errors += 1
            self._warn("repair failed", execution_id=member, partition=tag, error=answer)
            return
        self.repaired += 1
        tally.processed += 1
        log.warning(
            "index of %s repaired: %s",
            member,
            answer,
            extra={
                "action": "index_repaired",
                "scanner": self.name,
                "partition": tag,
                "execution_id": member,
                "expected_index": verdict.removeprefix("drifted:"),
                "repair": answer,
                "lifecycle": fields["lifecycle_phase"],
                "eligibility": fields["eligibility_state"],
                "ownership": fields["ownership_state"],
            },
        )

    def _warn(self, what: str, **fields: str) -> None:
        log.warning(
            "%s: %s: %s",
            self.name,
            what,
            fields.get("error", ""),
            extra={"action": "scanner_failure", "scanner": self.name, **fields},
        )


async def _state(backend: Backend, member: str) -> dict[str, str | None]:
    try:
        return await backend.read_exec_core_fields(ExecutionId.parse(member), _FIELDS)
    except EngineError:
        return dict.fromkeys(_FIELDS)
