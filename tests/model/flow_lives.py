"""What happens to a flow: every operation, on any of its members, with little and much room."""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID, uuid5

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from flowfabric.core.contracts.executions import RetryScheduled
from flowfabric.core.contracts.flows import (
    AnyOf,
    DependencyKind,
    FlowGraph,
    GraphEdge,
    GraphNode,
    JoinAll,
    JoinPolicy,
    OnSatisfied,
    Quorum,
)
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.graph import edge_id, node_id
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import flow_partition
from flowfabric.core.policy import parse_policy
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.model.flow_audit import Recount
from tests.model.flow_model import ENDED, Edge, FlowModel
from tests.model.harness import T0, Harness
from tests.support.leaks import find_leaks

FLOW = "00000000-0000-4000-8000-0000000000f1"
TTL = 10**9
BACKOFF, RETRIES = 1000, 1
LIFETIME = 60_000
MAX_MEMBERS = 9
LIVE = ("waiting", "active", "waiting_children", "delayed")
RETRIED = parse_policy(
    {"retry_policy": {"max_retries": RETRIES, "backoff": {"type": "fixed", "delay_ms": BACKOFF}}}
)

number = st.integers(0, 11)
KINDS: tuple[DependencyKind, ...] = ("success_only", "success_only", "terminal", "failure_only")
kinds = st.sampled_from(KINDS)
ENDINGS: list[OnSatisfied] = ["cancel_remaining", "let_run"]
behaviours = st.sampled_from(ENDINGS)
units = st.sampled_from([1, 2, 3, 128])


@st.composite
def policies(draw: st.DrawFn, edges: int) -> JoinPolicy:
    if not edges or draw(st.booleans()):
        return JoinAll()
    if draw(st.booleans()):
        return AnyOf(draw(behaviours))
    return Quorum(draw(st.integers(1, edges)), draw(behaviours))


Graph = tuple[tuple[GraphNode, ...], tuple[GraphEdge, ...]]


@st.composite
def graphs(draw: st.DrawFn, first: int = 0, size: int = 0) -> Graph:
    """New nodes, numbered from `first`, after any of those before them."""
    nodes, edges = list[GraphNode](), list[GraphEdge]()
    for n in range(first, first + (size or draw(st.integers(2, 6)))):
        before = draw(st.lists(st.integers(0, n - 1), max_size=3, unique=True)) if n else []
        edges += (GraphEdge(frm=f"n{i}", to=f"n{n}", kind=draw(kinds)) for i in before)
        nodes.append(
            GraphNode(
                key=f"n{n}",
                execution_kind="job",
                join=draw(policies(len(before))),
                policy=RETRIED,
                execution_deadline_at=draw(st.sampled_from([None, None, T0 + LIFETIME])),
            )
        )
    return tuple(nodes), tuple(edges)


ONE = {"n": number}
TWO = {"n": number, "m": number}
ACTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "claim": {},
    "complete": {**ONE, "again": st.booleans()},
    "fail": {**ONE, "transient": st.booleans()},
    "cancel": ONE,
    "revoke": ONE,
    "depend": {**TWO, "kind": kinds, "again": st.booleans()},
    "stage": {**TWO, "kind": kinds},
    "apply": ONE,
    "extend": {"data": st.data(), "again": st.booleans()},
    "spawn": {**ONE, "wait": st.booleans()},
    "wait": ONE,
    "replay": {**ONE, "strict": st.booleans(), "reopen": st.sampled_from(["", "skipped", "all"])},
    "replay_flow": {"failed_only": st.booleans()},
    "release": {},
    "retry_time": {},
    "deadlines": {},
    "cancel_flow": {"policy": st.sampled_from(["flow_only", "cancel_pending", "cancel_all"])},
    "units": {"count": units},
}
LIKELY = {"claim": 6, "complete": 6, "fail": 4, "replay": 3, "depend": 3, "spawn": 2, "release": 2}
WEIGHTED = [act for act in ACTS for _ in range(LIKELY.get(act, 1))]
NEED_LEASE = frozenset({"complete", "fail", "revoke", "wait", "spawn"})


def word(answer: Any) -> str:
    """An outcome as the model words it."""
    if isinstance(answer, str):
        return answer
    return "retry_scheduled" if isinstance(answer, RetryScheduled) else answer.kind


class FlowLives(RuleBasedStateMachine):
    """One flow. Between two acts everything that a call left is done, and compared on the way."""

    harness: ClassVar[Harness]

    @initialize(data=st.data(), hold=st.sampled_from([False, False, False, True]), count=units)
    def begin(self, data: st.DataObject, hold: bool, count: int) -> None:
        self.harness.reset()
        self.backend: ValkeyBackend = self.harness.backend
        self.backend.places.known_places.clear()
        self.backend.places.known_namespaces.clear()
        self.harness.run(self.backend.meta.prepare())
        # As if each caller died after its call.
        self.harness.run(self.backend.drains.aclose())
        self.harness.freeze(T0)
        partition = flow_partition(FLOW, self.backend.counts)
        self.partition, self.tag = partition, f"{{fp:{partition}}}"
        self.model = FlowModel(T0, held=hold)
        self.recount = Recount(self.backend, self.tag, FLOW)
        self.handles: dict[str, Handle] = {}
        self.units(count)
        nodes, edges = data.draw(graphs())
        flow = FlowGraph(flow_id=FLOW, flow_kind="test", nodes=nodes, edges=edges, hold=hold)
        submit = self.backend.flows.submit_flow
        self.agree(word(self.ask(submit(flow))), "submitted")
        self.agree(word(self.ask(submit(flow))), "already_submitted")
        self.grow(nodes, edges)
        self.settle()
        note(f"{[(n.key, n.join) for n in nodes]} {[(e.frm, e.to, e.kind) for e in edges]}")

    # --- choosing, asking, comparing -------------------------------------------------------

    def ask(self, work: Any) -> Any:
        return self.harness.answer(work)

    def agree(self, actual: Any, expected: Any) -> None:
        note(f"{actual}")
        assert actual == expected, f"the engine says {actual}, the model {expected}"

    def id_of(self, key: str) -> ExecutionId:
        return node_id(FLOW, self.tag, key)

    def key(self, n: int, *states: str) -> str:
        """One of the members, mostly one in these states."""
        all_keys = list(self.model.members)
        fitting = [key for key in all_keys if self.model.members[key].state in states]
        choice = fitting if fitting and n % 6 else all_keys
        return choice[n % len(choice)]

    def holder(self, n: int) -> str | None:
        """A member with a live lease."""
        holders = [
            key
            for key, member in self.model.members.items()
            if member.state == "active" and not member.revoked
        ]
        return holders[n % len(holders)] if holders else None

    def grow(self, nodes: Any, edges: Any) -> None:
        """The model gets what the engine got."""
        for node in nodes:
            mine = [
                Edge(edge_id(FLOW, edge), edge.frm, edge.to, edge.kind)
                for edge in edges
                if edge.to == node.key
            ]
            self.model.add(node.key, node.join, mine, node.execution_deadline_at)

    def settle(self) -> None:
        """Do what the call left, in as many calls as it takes; the recount holds after each."""
        for _ in range(1000):
            self.look()
            left = self.ask(self.backend.flows.drain_flow_cancel(FLOW))[2]
            if not self.ask(self.backend.flows.drain_cascade(self.partition)).pending and not left:
                break
        else:
            raise AssertionError("something is always left")
        self.look()
        self.harness.run(self.recount.settled())
        self.same_as_the_model()

    def look(self) -> None:
        staged = sum(1 for edge in self.model.edges.values() if edge.state == "staged")
        self.harness.run(self.recount.look(staged))

    def same_as_the_model(self) -> None:
        for key, state in self.recount.states.items():
            member = self.model.members[key]
            if {state, member.state} == {"skipped", "cancelled"}:
                # What both were about to end ended by whoever came first.
                member.state = state
            assert state == member.state, key
            n, good, bad = self.model.counted(key)
            if n:
                join = self.recount.joins[key]
                found = (join.total_deps, join.satisfied_count)
                assert found == (n, good), key
                assert join.failed_count + join.skipped_count == bad, key
                assert join.group_state == member.group, key

    @rule(act=st.sampled_from(WEIGHTED), data=st.data())
    def step(self, act: str, data: st.DataObject) -> None:
        if act in NEED_LEASE and self.holder(0) is None:
            act = "claim"
        drawn = {
            name: data if name == "data" else data.draw(strategy, name)
            for name, strategy in ACTS[act].items()
        }
        note(f"{act} {drawn}")
        getattr(self, act)(**drawn)
        self.settle()
        note(f"{[(m.key, m.state, m.group) for m in self.model.members.values()]}")

    # --- workers ---------------------------------------------------------------------------

    def claim(self) -> None:
        want = ClaimRequest("default", "w", "w-1", lease_ttl_ms=TTL)
        got = self.ask(self.backend.claims.claim_many(want, self.tag, 100))
        keys = {self.id_of(key): key for key in self.model.members}
        taken = {keys[claim.execution_id]: claim.handle for claim in got.claims}
        paused = {key for key, member in self.model.members.items() if member.paused}
        self.agree(set(taken), self.model.claim())
        for key, handle in taken.items():
            assert (handle.kind == "resumed") == (key in paused)
        self.handles |= taken

    def complete(self, n: int, again: bool) -> None:
        if key := self.holder(n):
            complete = self.backend.executions.complete
            self.agree(word(self.ask(complete(self.handles[key], b"r"))), "completed")
            if again:
                self.agree(word(self.ask(complete(self.handles[key], b"r"))), "completed")
            self.model.end(key, "completed")

    def fail(self, n: int, transient: bool) -> None:
        if key := self.holder(n):
            category = "transient" if transient else "permanent"
            answer = self.ask(self.backend.executions.fail(self.handles[key], "boom", category))
            self.agree(word(answer), self.model.fail(key, RETRIES if transient else 0, BACKOFF))

    def revoke(self, n: int) -> None:
        if key := self.holder(n):
            self.ask(self.backend.leases.revoke_lease(self.id_of(key)))
            self.model.members[key].revoked = True

    def wait(self, n: int) -> None:
        if key := self.holder(n):
            answer = self.ask(self.backend.executions.wait_children(self.handles[key]))
            self.agree(word(answer), self.model.wait(key))

    def spawn(self, n: int, wait: bool) -> None:
        key = self.holder(n)
        if key is None or len(self.model.members) >= MAX_MEMBERS:
            return None
        new = GraphNode(key=f"n{len(self.model.members)}", execution_kind="job", policy=RETRIED)
        spawn = self.backend.flows.spawn_children
        answer = self.ask(spawn(self.handles[key], [new], wait=wait))
        if self.model.policy:
            return self.agree(answer, "flow_already_terminal")
        own = GraphEdge(frm=new.key, to=f"\x1e{self.id_of(key).uuid}")
        self.model.add(new.key)
        self.agree(self.model.depend(Edge(edge_id(FLOW, own), new.key, key, "terminal")), "applied")
        parks = wait and self.model.members[key].group == "pending"
        self.agree(answer.parked, parks and self.model.wait(key) == "moved")
        # Its reply was lost.
        self.agree(self.ask(spawn(self.handles[key], [new], wait=wait)), answer)
        return None

    # --- growing ---------------------------------------------------------------------------

    def pair(self, n: int, m: int, kind: str) -> tuple[Edge, tuple[Any, ...]]:
        keys = list(self.model.members)
        frm, to = keys[n % len(keys)], self.key(m, *LIVE)
        # Each kind once: a second edge between two members counts, too.
        edge = Edge(str(uuid5(UUID(FLOW), f"{frm} {to} {kind}")), frm, to, kind)
        return edge, (FLOW, self.id_of(frm), self.id_of(to))

    def depend(self, n: int, m: int, kind: str, again: bool) -> None:
        edge, args = self.pair(n, m, kind)
        for _ in range(1 + again):
            answer = self.ask(
                self.backend.flows.add_dependency(*args, edge_id=edge.edge_id, dependency_kind=kind)
            )
            self.agree(word(answer), self.model.depend(edge))

    def stage(self, n: int, m: int, kind: str) -> None:
        edge, args = self.pair(n, m, kind)
        answer = self.ask(
            self.backend.flows.stage_dependency_edge(
                *args, edge_id=edge.edge_id, dependency_kind=kind
            )
        )
        self.agree(word(answer), self.model.stage(edge))

    def apply(self, n: int) -> None:
        staged = [edge.edge_id for edge in self.model.edges.values() if edge.state == "staged"]
        known = staged or list(self.model.edges)
        if known:
            chosen = known[n % len(known)]
            answer = self.ask(self.backend.flows.apply_dependency_to_child(FLOW, chosen))
            self.agree(word(answer), self.model.apply(chosen))

    def extend(self, data: st.DataObject, again: bool) -> None:
        first = len(self.model.members)
        if first >= MAX_MEMBERS:
            return None
        nodes, edges = data.draw(graphs(first, 1))
        answer = self.ask(self.backend.flows.extend_flow(FLOW, nodes, edges))
        if self.model.policy:
            return self.agree(answer, "flow_already_terminal")
        self.agree(word(answer), "extended")
        if again:
            repeat = self.ask(self.backend.flows.extend_flow(FLOW, nodes, edges))
            self.agree(word(repeat), "already_extended")
        return self.grow(nodes, edges)

    # --- operators -------------------------------------------------------------------------

    def cancel(self, n: int) -> None:
        key = self.key(n, *LIVE)
        answer = self.ask(self.backend.executions.cancel_execution(self.id_of(key)))
        self.agree(word(answer), self.model.cancel(key))

    def replay(self, n: int, strict: bool, reopen: str) -> None:
        key = self.key(n, *ENDED)
        answer = self.ask(
            self.backend.executions.replay_execution(
                self.id_of(key),
                strict=strict,
                reopen_downstream=bool(reopen),
                include_completed=reopen == "all",
            )
        )
        expected, _ = self.model.replay(key, strict=strict, reopen=reopen)
        self.agree(answer if isinstance(answer, str) else answer.public_state.value, expected)

    def replay_flow(self, failed_only: bool) -> None:
        answer = self.ask(self.backend.flows.replay_flow(FLOW, failed_only=failed_only))
        expected = self.model.replay_flow(failed_only=failed_only)
        if isinstance(answer, str) or not answer.pending:
            told = answer if isinstance(answer, str) else (answer.replayed, answer.reopened)
            self.agree(told, expected)

    def release(self) -> None:
        for _ in range(2):
            self.agree(word(self.ask(self.backend.flows.release_flow(FLOW))), self.model.release())

    def cancel_flow(self, policy: str) -> None:
        for _ in range(2):
            answer = self.ask(
                self.backend.flows.cancel_flow(FLOW, "why", cancellation_policy=policy)
            )
            self.model.cancel_flow(policy)
            self.agree(answer.cancellation_policy, self.model.policy)

    # --- time ------------------------------------------------------------------------------

    def pass_time(self, ms: int) -> None:
        self.model.now += ms
        self.harness.freeze(self.model.now)

    def ids(self) -> list[ExecutionId]:
        return [self.id_of(key) for key in self.model.members]

    def retry_time(self) -> None:
        self.pass_time(BACKOFF)
        self.ask(self.backend.upkeep.promote_delayed(self.tag, "default", self.ids()))
        self.model.promote()

    def deadlines(self) -> None:
        self.pass_time(LIFETIME)
        expire = self.backend.upkeep.expire_execution
        # One by one: the end of one may end others first.
        for key in list(self.model.members):
            due = [self.id_of(key)]
            (answer,) = self.ask(expire(self.tag, ExpireReason.EXECUTION_DEADLINE, due))
            self.agree(answer, self.model.expire(key))
            self.settle()

    def units(self, count: int) -> None:
        """How much one call may do."""
        self.ask(self.backend.calls.fcall("ff_test_units", "{fp:0}", (count,), op="test"))

    def teardown(self) -> None:
        self.units(128)
        assert self.harness.run(find_leaks(self.backend)) == []
