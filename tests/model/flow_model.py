"""A flow by its rules alone: members, edges, joins, and what an end means for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from flowfabric.core.contracts.flows import AnyOf, JoinAll, JoinPolicy

ENDED = frozenset({"completed", "failed", "cancelled", "expired", "skipped"})
SATISFYING = {
    "success_only": frozenset({"completed"}),
    "failure_only": frozenset({"failed", "expired"}),
    "terminal": ENDED,
}
STRENGTH = {"flow_only": 1, "cancel_pending": 2, "cancel_all": 3}
MAX_REPLAYS = 10


@dataclass
class Member:
    """One member, and how far its join is decided."""

    key: str
    join: JoinPolicy
    state: str = "waiting"
    group: str = "pending"
    runs: int = 0
    replayed: bool = False
    """Whether the current run has not begun."""
    retries: int = 0
    held: bool = False
    paused: bool = False
    """Whether the next claim resumes an attempt."""
    revoked: bool = False
    delay_until: int = 0
    deadline: int | None = None
    ran: bool = False
    """Whether an attempt was running, or paused, when it ended."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass
class Edge:
    """One edge: staged, open, satisfied or impossible."""

    edge_id: str
    frm: str
    to: str
    kind: str
    state: str = "open"
    run: int = -1
    """The run of the upstream that resolved it; only a later one does so again."""


class FlowModel:
    """Every call does all of its work: nothing is ever left to do."""

    def __init__(self, now: int = 0, *, held: bool = False) -> None:
        self.now = now
        self.held = held
        self.policy: str | None = None
        self.members: dict[str, Member] = {}
        self.edges: dict[str, Edge] = {}

    # --- looking --------------------------------------------------------------------------

    @property
    def states(self) -> dict[str, str]:
        return {key: member.state for key, member in self.members.items()}

    def inbound(self, key: str) -> list[Edge]:
        return [edge for edge in self.edges.values() if edge.to == key]

    def outbound(self, key: str) -> list[Edge]:
        return [edge for edge in self.edges.values() if edge.frm == key]

    def counted(self, key: str) -> tuple[int, int, int]:
        """Edges that count, those satisfied, those impossible."""
        states = [edge.state for edge in self.inbound(key)]
        applied = len(states) - states.count("staged")
        return applied, states.count("satisfied"), states.count("impossible")

    def verdict(self, key: str) -> str | None:
        """How the counters decide the join of a member, or None while they do not."""
        join = self.members[key].join
        n, good, bad = self.counted(key)
        if isinstance(join, JoinAll):
            return "impossible" if bad else "satisfied" if good == n else None
        k = 1 if isinstance(join, AnyOf) else join.k
        staged = len(self.inbound(key))
        if good >= k:
            return "satisfied"
        return "impossible" if staged >= k and bad > staged - k else None

    def reaches(self, frm: str, to: str) -> bool:
        """Whether edges lead from one member to another."""
        seen, work = {frm}, [frm]
        while work:
            key = work.pop()
            if key == to:
                return True
            after = {edge.to for edge in self.outbound(key)} - seen
            seen |= after
            work += after
        return False

    @property
    def ends_members(self) -> bool:
        return self.policy in ("cancel_all", "cancel_pending")

    def drains(self, member: Member) -> bool:
        """Whether a member of a cancelled flow goes on with its attempt."""
        return self.policy == "cancel_pending" and member.paused

    # --- ends -----------------------------------------------------------------------------

    def end(self, key: str, state: str) -> None:
        self._end(self.members[key], state, work := deque[str]())
        self._cascade(work)

    def _end(self, member: Member, state: str, work: deque[str]) -> None:
        member.ran = member.paused or member.state in ("active", "suspended")
        member.state = state
        member.held = member.paused = member.revoked = False
        work.append(member.key)

    def _cascade(self, work: deque[str]) -> None:
        while work:
            for edge in self.outbound(work.popleft()):
                self._resolve(edge, work)

    def _resolve(self, edge: Edge, work: deque[str]) -> None:
        upstream, child = self.members[edge.frm], self.members[edge.to]
        if edge.state != "open" or not upstream.ended or upstream.runs <= edge.run:
            return
        edge.run = upstream.runs
        edge.state = "satisfied" if upstream.state in SATISFYING[edge.kind] else "impossible"
        verdict = self.verdict(child.key) if child.group == "pending" else None
        if verdict is None:
            return
        child.group = verdict
        if child.state == "waiting_children":
            self._move(child, work)
        if not isinstance(child.join, JoinAll) and child.join.on_satisfied == "cancel_remaining":
            for each in self.inbound(child.key):
                sibling = self.members[each.frm]
                if each.state == "open" and not sibling.ended:
                    self._end(sibling, "cancelled", work)

    def _move(self, child: Member, work: deque[str]) -> None:
        if self.ends_members and not self.drains(child):
            self._end(child, "cancelled", work)
        elif child.group == "satisfied":
            self._unblock(child)
        else:
            self._end(child, "skipped", work)

    def _unblock(self, member: Member) -> None:
        member.held = self.held
        late = member.delay_until > self.now and not self.held
        member.state = "delayed" if late else "waiting"

    # --- growing --------------------------------------------------------------------------

    def add(
        self,
        key: str,
        join: JoinPolicy | None = None,
        edges: Iterable[Edge] = (),
        deadline: int | None = None,
    ) -> None:
        """A new member; its edges count at once."""
        member = self.members[key] = Member(key, join or JoinAll(), deadline=deadline)
        member.held = self.held
        mine = list(edges)
        for edge in mine:
            self.edges[edge.edge_id] = edge
            member.state, member.held = "waiting_children", False
        for edge in mine:
            self._resolve(edge, work := deque[str]())
            self._cascade(work)

    def stage(self, edge: Edge) -> str:
        if edge.edge_id in self.edges:
            return "already_staged"
        if problem := self._edge_problem(edge):
            return problem
        edge.state = "staged"
        self.edges[edge.edge_id] = edge
        return "staged"

    def _edge_problem(self, edge: Edge) -> str | None:
        if edge.frm == edge.to:
            return "self_referencing_edge"
        if self.policy:
            return "flow_already_terminal"
        return "cycle_detected" if self.reaches(edge.to, edge.frm) else None

    def apply(self, edge_id: str) -> str:
        edge = self.edges.get(edge_id)
        if edge is None:
            return "invalid_dependency"
        if edge.state != "staged":
            return "already_applied"
        if self.policy:
            return "flow_already_terminal"
        child = self.members[edge.to]
        if child.ended:
            return "terminal"
        edge.state = "open"
        if child.group == "satisfied" and isinstance(child.join, JoinAll):
            child.group = "pending"
        if child.group == "pending" and child.state in ("waiting", "delayed"):
            child.state, child.held = "waiting_children", False
        self._resolve(edge, work := deque[str]())
        self._cascade(work)
        return "applied"

    def depend(self, edge: Edge) -> str:
        """Stage and apply in one call."""
        known = edge.frm != edge.to and edge.edge_id in self.edges
        if not known:
            if edge.frm != edge.to and not self.policy and self.members[edge.to].ended:
                return "terminal"
            if problem := self._edge_problem(edge):
                return problem
            edge.state = "staged"
            self.edges[edge.edge_id] = edge
        return self.apply(edge.edge_id)

    def wait(self, key: str) -> str:
        """A running member waits for its dependencies."""
        member = self.members[key]
        n, good, bad = self.counted(key)
        if member.group == "impossible":
            return "impossible"
        if member.group == "satisfied" or n == good + bad:
            return "ready"
        member.state, member.paused = "waiting_children", True
        return "moved"

    # --- workers --------------------------------------------------------------------------

    def claim(self, keys: Iterable[str] | None = None) -> set[str]:
        """What can run is running now; only these members, if they are given."""
        taken = set[str]()
        for member in [self.members[key] for key in keys or self.members]:
            resumed = member.state == "waiting" and self.drains(member)
            if not (member.state == "waiting" and not member.held) and not member.revoked:
                continue
            if self.ends_members and not resumed:
                self.end(member.key, "cancelled")
                continue
            member.state = "active"
            member.paused = member.revoked = member.replayed = False
            taken.add(member.key)
        return taken

    def fail(self, key: str, retries: int, backoff_ms: int) -> str:
        member = self.members[key]
        if member.retries >= retries or self.ends_members:
            self.end(key, "failed")
            return "terminal_failed"
        member.retries += 1
        member.state, member.delay_until = "delayed", self.now + backoff_ms
        return "retry_scheduled"

    def promote(self) -> None:
        """The time of delayed members has come."""
        for member in self.members.values():
            if member.state != "delayed" or member.delay_until > self.now:
                continue
            if self.ends_members:
                self.end(member.key, "cancelled")
            else:
                member.state = "waiting"

    def expire(self, key: str) -> str:
        member = self.members[key]
        if member.ended:
            return "already_terminal"
        if member.deadline is None or member.deadline > self.now:
            return "not_yet_due"
        self.end(key, "expired")
        return "expired"

    # --- operators ------------------------------------------------------------------------

    def cancel(self, key: str) -> str:
        if self.members[key].state == "cancelled":
            return "cancelled"
        if self.members[key].ended:
            return "execution_not_active"
        self.end(key, "cancelled")
        return "cancelled"

    def release(self) -> str:
        if self.held and self.ends_members:
            return "flow_already_terminal"
        self.held = False
        for member in self.members.values():
            if member.held:
                self._unblock(member)
        return "released"

    def cancel_flow(self, policy: str) -> None:
        if self.policy and STRENGTH[policy] <= STRENGTH[self.policy]:
            return
        self.policy = policy
        work = deque[str]()
        for member in self.members.values():
            if not member.ended and self._is_owed(member):
                self._end(member, "cancelled", work)
        self._cascade(work)

    def _is_owed(self, member: Member) -> bool:
        if self.policy != "cancel_pending":
            return self.policy == "cancel_all"
        if member.state == "waiting":
            return not member.paused
        return member.state in ("delayed", "waiting_children")

    # --- replays --------------------------------------------------------------------------

    def replay(self, key: str, *, strict: bool, reopen: str) -> tuple[str, int]:
        """The state of the member, or why it stays as it is; and how many members it reopened."""
        if problem := self._replay_problem(self.members[key], strict=strict):
            return problem, 0
        self._run_again(self.members[key])
        state = self.members[key].state
        return state, self._reopen([key], everything=reopen == "all") if reopen else 0

    def _replay_problem(self, member: Member, *, strict: bool = False) -> str | None:
        if not member.ended:
            return "execution_not_terminal"
        if member.runs >= MAX_REPLAYS:
            return "max_replays_exhausted"
        if self.policy:
            return "flow_already_terminal"
        unmet = strict and self._waits_again(member) and self.counted(member.key)[2]
        return "deps_not_satisfied" if unmet else None

    def _waits_again(self, member: Member) -> bool:
        """Whether it never got past its dependencies."""
        if self.counted(member.key)[0] == 0:
            return False
        return member.state == "skipped" or (not member.ran and member.group != "satisfied")

    def _run_again(self, member: Member, upstream: str = "") -> None:
        """`upstream`: it waits for the new run of this one, whatever that decided before."""
        waits = upstream or self._waits_again(member)
        member.runs, member.replayed = member.runs + 1, True
        member.retries = member.delay_until = 0
        member.deadline = None
        if not waits:
            self._unblock(member)
            return
        opened = [
            edge
            for edge in self.inbound(member.key)
            if edge.state == "impossible" or (edge.state == "satisfied" and edge.frm == upstream)
        ]
        member.group = self._open(member.key, opened)
        if member.group == "satisfied":
            self._unblock(member)
        else:
            member.state = "waiting_children"
        self._resolve_again(opened)

    def _open(self, key: str, opened: list[Edge]) -> str:
        """How the join of the member stands when these edges wait for a later run."""
        for edge in opened:
            edge.state = "open"
        return self.verdict(key) or "pending"

    def _resolve_again(self, opened: list[Edge]) -> None:
        for edge in opened:
            self._resolve(edge, work := deque[str]())
            self._cascade(work)

    def _reopen(self, keys: list[str], *, everything: bool) -> int:
        """Reopen what depends on these members that run again; returns how many members."""
        work, count = deque(keys), 0
        while work:
            upstream = self.members[work.popleft()]
            for edge in self.outbound(upstream.key):
                decided = edge.state in ("satisfied", "impossible")
                child = self.members[edge.to]
                reopened = child.replayed and child.group == "satisfied" and not child.ended
                if edge.state == "staged" or (decided and upstream.runs <= edge.run):
                    # What the new run decided stands.
                    continue
                if decided and (child.state == "waiting_children" or reopened):
                    child.group = self._open(child.key, [edge])
                    if child.group == "pending":
                        child.state, child.held = "waiting_children", False
                    self._resolve_again([edge])
                elif child.ended and (everything or child.state == "skipped"):
                    if self._replay_problem(child):
                        continue
                    self._run_again(child, upstream.key)
                    count += 1
                    work.append(child.key)
        return count

    def replay_flow(self, *, failed_only: bool) -> tuple[int, int] | str:
        """How many members were replayed and reopened."""
        if self.policy:
            return "flow_already_terminal"
        states = {"failed", "expired"} if failed_only else {"failed", "expired", "cancelled"}
        replayed = reopened = 0
        for member in self.members.values():
            if member.state in states and not self._replay_problem(member):
                self._run_again(member)
                replayed += 1
                reopened += self._reopen([member.key], everything=False)
        return replayed, reopened
