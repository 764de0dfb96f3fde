"""The scanners of flows: they continue the backlog of calls, and audit the results."""

import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, PartitionKey, is_uuid
from flowfabric.core.text import shown
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.flows import tag_of
from flowfabric.engine.api.upkeep import DependencyAudit, Index
from flowfabric.engine.flow_overview import describe_unit
from flowfabric.scanners.base import Cycle, report
from flowfabric.scanners.jobs import UuidScanner
from flowfabric.scanners.watch import Territory

_CASCADE_QUEUES = (
    *("cascade_backlog", "release_backlog", "reopen_backlog", "replay_backlog", "cascade_failed"),
    "subflow_outbox",
)
_PARKED = "cascade_poison"
_BLOCKED = "blocked:dependencies"
_PAGE = 50
_FLOWS_PAGE = 100
_PROJECTED_PER_CYCLE = 100
_CHANGED = frozenset({"repaired", "deleted", "orphan_removed"})
_INDEXES_AT_ONCE = 64
_AUDITED_PER_CYCLE = 2000
_MEMBERS_ASKED = 100


async def occupied(cycle: Cycle, tags: list[str], queues: Sequence[str]) -> list[str]:
    """The partitions with work in a queue, found by bisection, because usually few have any."""
    indexes = [Index(tag, queue) for tag in tags for queue in queues]
    if not await cycle.backend.upkeep.any_exists(indexes):
        if cycle.watch is not None:
            cycle.watch.learn_absent(indexes)
        return []
    if len(tags) == 1:
        return tags
    half = len(tags) // 2
    left = await occupied(cycle, tags[:half], queues)
    return left + await occupied(cycle, tags[half:], queues)


@dataclass
class QueueScanner:
    """Visits the partitions that have work in one of its queues."""

    name: str
    queues: Sequence[str]
    visit: Callable[[Cycle, str], Awaitable[None]]

    def indexes(self, territory: Territory) -> list[Index]:
        return [Index(tag, queue) for tag in territory for queue in self.queues]

    async def scan(self, cycle: Cycle) -> None:
        for tag in await occupied(cycle, list(cycle.territory), self.queues):
            if cycle.out_of_time():
                return
            with cycle.surviving("could not continue", partition=tag):
                await self.visit(cycle, tag)
                cycle.progress()


class CascadeDrain(QueueScanner):
    """Continues updates that were too large for the calls that ended or changed members.

    Retries updates that failed because a record is damaged. After several failures the engine stops
    retrying, and this scanner reports it once.
    """

    def __init__(self) -> None:
        super().__init__("cascade_drain", _CASCADE_QUEUES, self._drain)
        self._reported: dict[str, set[str]] = {}

    async def scan(self, cycle: Cycle) -> None:
        new = sorted(cycle.territory.keys() - self._reported.keys())
        await super().scan(cycle)
        # A process that takes over reports what failed too often before.
        if new and await cycle.backend.upkeep.any_exists([Index(tag, _PARKED) for tag in new]):
            for tag in new:
                with cycle.surviving("could not read failed updates", partition=tag):
                    await self._report_parked(cycle, tag)
        for tag in new:
            self._reported.setdefault(tag, set())

    async def _drain(self, cycle: Cycle, tag: str) -> None:
        flows, partition = cycle.backend.flows, PartitionKey.trusted(tag).index_number
        retry, more = True, True
        while more and not cycle.out_of_time():
            done = await flows.drain_cascade(partition, retry=retry)
            cycle.processed += done.resolved + done.skipped + done.cancelled
            cycle.progress()
            retry, more = False, done.pending
            if done.resolved or done.skipped:
                message = f"drained {tag}: {done.resolved} resolved, {done.skipped} skipped"
                fields = {"resolved": done.resolved, "skipped": done.skipped, "pending": more}
                report(
                    logging.DEBUG, self.name, "cascade_drained", message, partition=tag, **fields
                )
        await self._report_parked(cycle, tag)

    async def _report_parked(self, cycle: Cycle, tag: str) -> None:
        parked = await cycle.backend.upkeep.parked_units(tag)
        for unit in sorted(parked.keys() - self._reported.get(tag, set())):
            cycle.errors += 1
            message = f"stopped retrying {describe_unit(unit)}: {parked[unit]}"
            fields = {"item": unit, "partition": tag, "error": parked[unit]}
            report(logging.ERROR, self.name, "cascade_parked", message, **fields)
        self._reported[tag] = set(parked)


class SiblingScanner(QueueScanner):
    """Handles decided joins that may still have upstreams to cancel, some at a time."""

    def __init__(self, name: str, handle: Callable[[str, ExecutionId], Awaitable[bool]]) -> None:
        super().__init__(name, ("pending_cancel_groups",), self._visit)
        self._handle = handle

    async def _visit(self, cycle: Cycle, tag: str) -> None:
        upkeep, handled = cycle.backend.upkeep, -1
        while handled and not cycle.out_of_time():
            names = await upkeep.sibling_groups(tag, _PAGE)
            known = {child: flow_id for flow_id, child in self._parsed(cycle, tag, names)}
            if malformed := set(names) - {f"{f}|{child.uuid}" for child, f in known.items()}:
                cycle.errors += await upkeep.forget_sibling_groups(tag, sorted(malformed))
                message = f"removed {len(malformed)} malformed entries of pending_cancel_groups"
                report(logging.WARNING, self.name, "member_malformed", message, partition=tag)
            accepted = set(await cycle.where.accepted(cycle.backend, list(known)))
            handled = 0
            for child, flow_id in known.items():
                if child in accepted:
                    with cycle.surviving("could not cancel siblings", execution_id=child):
                        handled += await self._handle(flow_id, child)
            cycle.processed += handled
            cycle.progress()

    @staticmethod
    def _parsed(cycle: Cycle, tag: str, names: Sequence[str]) -> Generator[tuple[str, ExecutionId]]:
        for name in names:
            flow_id, _, uuid = name.partition("|")
            # A flow of another partition is malformed, too.
            if is_uuid(uuid) and is_uuid(flow_id) and tag_of(flow_id, cycle.backend.counts) == tag:
                yield flow_id, ExecutionId.parse(f"{tag}:{uuid}")


def sibling_scanners(backend: Backend) -> list[QueueScanner]:
    """Two scanners: one cancels, the other only removes joins from the queue."""
    flows = backend.flows

    async def dispatch(flow_id: str, child: ExecutionId) -> bool:
        while (answer := await flows.drain_sibling_cancel_group(flow_id, child)) == "pending":
            pass
        return answer != "already_drained"

    async def reconcile(flow_id: str, child: ExecutionId) -> bool:
        return await flows.reconcile_sibling_cancel_group(flow_id, child) != "no_op"

    return [
        SiblingScanner("edge_cancel_dispatcher", dispatch),
        SiblingScanner("edge_cancel_reconciler", reconcile),
    ]


class FlowProjector:
    """Deletes flows whose retention is over, or whose submission was interrupted.

    Compares the counters of others with their members, some flows per cycle, and repairs them.
    """

    name = "flow_projector"

    def __init__(self, backend: Backend) -> None:
        self.repaired = 0
        self._due = UuidScanner(self.name, backend.upkeep.delete_due_flows, "flow_due")
        self._next = ("", "")
        """The partition and the flow after which the next cycle continues."""

    async def scan(self, cycle: Cycle) -> None:
        if await cycle.backend.upkeep.any_exists(self._due.indexes(cycle.territory)):
            await self._due.scan(cycle)
        await self._audit_some(cycle)

    async def _audit_some(self, cycle: Cycle) -> None:
        first, after = ("", "") if cycle.thorough else self._next
        tags = sorted(cycle.territory, key=lambda tag: (tag < first, tag))
        budget, self._next = _PROJECTED_PER_CYCLE, ("", "")
        for start in range(0, len(tags), _INDEXES_AT_ONCE):
            some = tags[start : start + _INDEXES_AT_ONCE]
            if not await cycle.backend.upkeep.any_exists([Index(t, "flow_index") for t in some]):
                continue
            for tag in some:
                with cycle.surviving("could not read the flows", partition=tag):
                    budget = await self._walk(cycle, tag, after if tag == first else "", budget)
                if self._next[0]:
                    return

    async def _walk(self, cycle: Cycle, tag: str, after: str, budget: int) -> int:
        """Audit the flows of a partition; returns how much of the budget is left."""
        partition = PartitionKey.trusted(tag).index_number
        while True:
            page = await cycle.backend.flows.flow_ids(partition, after, _FLOWS_PAGE)
            for flow_id in page:
                if cycle.out_of_time() or (budget <= 0 and not cycle.thorough):
                    self._next = (tag, after)
                    return budget
                with cycle.surviving("could not audit", flow_id=shown(flow_id), partition=tag):
                    budget -= not await self._audit(cycle, tag, flow_id)
                cycle.progress()
                after = flow_id
            if len(page) < _FLOWS_PAGE:
                return budget

    async def _audit(self, cycle: Cycle, tag: str, flow_id: str) -> bool:
        """Whether the audit changed anything."""
        audit = await cycle.backend.flows.project_flow_summary(flow_id)
        if audit.outcome not in _CHANGED:
            return False
        cycle.processed += 1
        if audit.outcome != "deleted":
            self.repaired += 1
            found = ", ".join(audit.drift) or "it was listed but does not exist"
            message = f"repaired flow {flow_id}: {found}"
            fields = {"flow_id": flow_id, "partition": tag, "drift": found}
            report(logging.WARNING, self.name, "flow_repaired", message, **fields)
        return True


class CancelReconciler(UuidScanner):
    """Cancels the remaining members of a cancelled flow after its grace period."""

    def __init__(self, backend: Backend) -> None:
        super().__init__("cancel_reconciler", backend.upkeep.drain_flow_cancels, "cancel_backlog")

    async def accepted(self, cycle: Cycle, tag: str, ids: Sequence[str]) -> list[str]:  # noqa: ARG002
        """Flows with an accepted member, because one deployment submits all members."""
        if cycle.where.is_empty:
            return list(ids)
        return [flow_id for flow_id in ids if await self._accepts(cycle, flow_id)]

    async def _accepts(self, cycle: Cycle, flow_id: str) -> bool:
        try:
            page = await cycle.backend.flows.list_members(flow_id, limit=_MEMBERS_ASKED)
        except EngineError:
            return False
        ids = [member.execution_id for member in page.entries]
        return bool(await cycle.where.accepted(cycle.backend, ids))


class DependencyReconciler:
    """Audits members that wait for others, some in each cycle, and repairs what it finds.

    The call that ends a member resolves its edges or queues them, so any finding is a fault of the
    engine or of the server.
    """

    name = "dependency_reconciler"

    def __init__(self) -> None:
        self.faults = 0
        self._next: Index | None = None
        # Where the audit of an index, and of a member with many edges, continues.
        self._ranks: dict[Index, int] = {}
        self._cursors: dict[str, str] = {}

    async def scan(self, cycle: Cycle) -> None:
        territory = cycle.territory.items()
        indexes = sorted(Index(tag, _BLOCKED, lane) for tag, lanes in territory for lane in lanes)
        first, budget = self._next, _AUDITED_PER_CYCLE
        if first is not None and not cycle.thorough:
            indexes.sort(key=lambda index: index < first)
        for start in range(0, len(indexes), _INDEXES_AT_ONCE):
            some = indexes[start : start + _INDEXES_AT_ONCE]
            if not await cycle.backend.upkeep.any_exists(some):
                continue
            for index in some:
                if cycle.out_of_time() or (budget <= 0 and not cycle.thorough):
                    self._next = index
                    return
                place = {"partition": index.tag, "index": str(index)}
                with cycle.surviving("could not audit", **place):
                    budget -= await self._audit(cycle, index)
        self._next = None

    async def _audit(self, cycle: Cycle, index: Index) -> int:
        """Audit a page of one index, or all of it in a thorough cycle; returns its size."""
        upkeep, done = cycle.backend.upkeep, 0
        while True:
            rank = self._ranks.pop(index, 0)
            ids = await upkeep.list_index(index, rank, _PAGE)
            # Repaired members leave the index, so the ones after them move up.
            left = await self._look(cycle, index, ids)
            cycle.progress()
            done += len(ids)
            if len(ids) < _PAGE:
                return done
            self._ranks[index] = rank + len(ids) - left
            if not cycle.thorough or cycle.out_of_time():
                return done

    async def _look(self, cycle: Cycle, index: Index, ids: list[str]) -> int:
        """Audit some members; returns how many faults were repaired."""
        left = await cycle.where.accepted(cycle.backend, ids)
        repaired = 0
        while left:
            members = [(member, self._cursors.pop(member, "0")) for member in left]
            audits = await cycle.backend.upkeep.audit_dependencies(index.tag, members)
            for member, audit in zip(left, audits, strict=True):
                repaired += self._note(cycle, index, member, audit)
                if audit.cursor != "0":
                    self._cursors[member] = audit.cursor
            left = [member for member in left if cycle.thorough and member in self._cursors]
        return repaired

    def _note(self, cycle: Cycle, index: Index, member: str, audit: DependencyAudit) -> bool:
        fields = {"execution_id": shown(member), "partition": index.tag, "lane": index.lane}
        if audit.verdict == "consistent":
            return False
        cycle.errors += 1
        if audit.verdict.startswith("error:"):
            why = audit.verdict.removeprefix("error:")
            message = f"could not audit {shown(member)}: {why}"
            report(logging.WARNING, self.name, "scanner_failure", message, error=why, **fields)
            return False
        self.faults += 1
        cycle.processed += 1
        message = f"{audit.verdict} {shown(member)}, which waited for members that had ended"
        report(logging.WARNING, self.name, "dependency_fault", message, **fields)
        return True
