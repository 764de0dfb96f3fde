"""Recounts everything that a flow stores about its members, whatever happened to them."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric.core.contracts.flows import AnyOf, FlowAudit, JoinAll, JoinSnapshot
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.feeds import decode_entry
from tests.model.flow_model import ENDED

QUEUES = (
    *("cascade_backlog", "pending_cancel_groups", "release_backlog", "cancel_backlog"),
    *("reopen_backlog", "replay_backlog", "cascade_failed", "cascade_poison"),
)
_BLOCKED = {"suspended", "delayed", "rate_limited", "waiting_children"}


class Recount:
    """One look at a flow: what it says of itself, and what its members and edges say."""

    def __init__(self, backend: ValkeyBackend, tag: str, flow_id: str) -> None:
        self.backend = backend
        self.tag = tag
        self.flow_id = flow_id
        self._events_from = "-"
        self._completions: dict[str, int] = {}
        self.states: dict[str, str] = {}
        self.joins: dict[str, JoinSnapshot] = {}
        self.policy: str | None = None

    async def look(self, staged: int | None = None) -> None:
        """Fail where a counter, a state, an index or the feed disagrees with the members.

        `staged`: how many edges exist that do not count yet, if the caller knows.
        """
        flows = self.backend.flows
        snapshot, page, listed, audit = await asyncio.gather(
            flows.describe_flow(self.flow_id),
            flows.list_members(self.flow_id),
            flows.list_edges(self.flow_id),
            flows.project_flow_summary(self.flow_id),
        )
        assert snapshot is not None
        assert audit == FlowAudit("consistent")
        self.policy = snapshot.cancellation_policy
        self.states = {member.node: member.public_state.value for member in page.entries}
        self.joins = {member.node: member.join for member in page.entries if member.join}
        counts: dict[str, int] = {}
        for state in self.states.values():
            counts[state] = counts.get(state, 0) + 1
        assert snapshot.members == counts
        sizes = (snapshot.node_count, snapshot.edge_count)
        assert sizes == (len(page.entries), len(listed.entries))
        assert snapshot.graph_revision == snapshot.node_count + snapshot.edge_count
        assert snapshot.derived_state == derived(counts)
        assert (snapshot.finished_at is not None) == (set(counts) <= ENDED)
        self._same_edges(page.entries, listed.entries, staged)
        ids = [member.execution_id for member in page.entries]
        await self._same_indexes(ids)
        await self._same_feed(ids)

    def _same_edges(self, members: Any, edges: Any, staged: int | None) -> None:
        applied = 0
        for member in members:
            mine = [e for e in edges if e.downstream_execution_id == member.execution_id]
            good = sum(1 for edge in mine if edge.edge_state == "satisfied")
            bad = sum(1 for edge in mine if edge.edge_state == "impossible")
            join = member.join
            if join is None:
                assert good == bad == 0
                continue
            applied += join.total_deps
            assert join.satisfied_count == good
            assert join.failed_count + join.skipped_count == bad
            assert join.running_count == join.total_deps - good - bad
            check_decision(join)
        assert staged is None or applied == len(edges) - staged

    async def _same_indexes(self, ids: list[ExecutionId]) -> None:
        verdicts = await self.backend.upkeep.reconcile_execution_index(self.tag, ids, "check")
        assert verdicts == ["consistent"] * len(ids)

    async def _same_feed(self, ids: list[ExecutionId]) -> None:
        """Each run of a member ends once."""
        call = self.backend.transport.call
        entries: Any = await call("XRANGE", keys.events(self.tag), self._events_from, "+")
        for entry, flat in entries:
            event = decode_entry(self.tag[1:-1], entry, flat)
            if event.type == "completion":
                known = self._completions.get(event.execution_id, 0)
                self._completions[event.execution_id] = known + 1
            self._events_from = "(" + entry.decode()
        for execution_id in ids:
            info = await self.backend.reads.read_execution_info(execution_id)
            ended = info.replay_count + (info.public_state.value in ENDED)
            assert self._completions.get(execution_id, 0) == ended

    async def queued(self) -> list[str]:
        """The queues of the partition that hold anything."""
        call, kept = self.backend.transport.call, list[str]()
        for name in QUEUES:
            if await call("EXISTS", keys.index(self.tag, name)):
                kept.append(name)
        return kept

    async def settled(self) -> None:
        """Fail unless nothing is left to do: then nobody waits for what has been decided."""
        assert await self.queued() == []
        for key, state in self.states.items():
            if state == "waiting_children":
                assert self.joins[key].group_state == "pending", key
        if self.policy == "cancel_all":
            assert set(self.states.values()) <= ENDED
        audited = await self.backend.upkeep.audit_dependencies(
            self.tag,
            [(member.execution_id, "0") for member in await self._blocked()],
        )
        assert [verdict for verdict, _ in audited] == ["consistent"] * len(audited)

    async def _blocked(self) -> list[Any]:
        page = await self.backend.flows.list_members(self.flow_id)
        return [each for each in page.entries if each.public_state == "waiting_children"]


def derived(counts: dict[str, int]) -> str:
    """08 §14"""
    found = set(counts)
    if found and found <= ENDED:
        return "failed" if found & {"failed", "cancelled", "expired"} else "completed"
    if "active" in found:
        return "running"
    return "blocked" if found & _BLOCKED else "open"


def check_decision(join: JoinSnapshot) -> None:
    """Fail if the counters of a join contradict its state."""
    good, bad = join.satisfied_count, join.failed_count + join.skipped_count
    assert good + bad <= join.total_deps
    if isinstance(join.policy, JoinAll):
        decided = "impossible" if bad else "satisfied" if good == join.total_deps else "pending"
        assert join.group_state == decided
        return
    k = 1 if isinstance(join.policy, AnyOf) else join.policy.k
    # One that was decided stays so, whatever comes later.
    assert join.group_state == "impossible" or (join.group_state == "satisfied") == (good >= k)
