"""What happens to a flow: every operation, on any of its members, with little and much room."""

from __future__ import annotations

import random
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
from flowfabric.core.contracts.leases import ClaimedMany, Handle
from flowfabric.core.graph import edge_id, node_id, ordered
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import flow_partition
from flowfabric.core.policy import parse_policy
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.model.flow_audit import Recount
from tests.model.flow_model import ENDED, STRENGTH, Edge, FlowModel, Member
from tests.model.harness import T0, Harness
from tests.support.leaks import find_leaks

FLOW = "00000000-0000-4000-8000-0000000000f1"
TTL = 10**9
WANT = ClaimRequest("default", "w", "w-1", lease_ttl_ms=TTL)
BACKOFF, RETRIES = 1000, 1
LIFETIME = 60_000
MAX_MEMBERS = 8
LIVE = ("waiting", "active", "waiting_children", "delayed")
RETRIED = parse_policy(
    {"retry_policy": {"max_retries": RETRIES, "backoff": {"type": "fixed", "delay_ms": BACKOFF}}}
)
KINDS: tuple[DependencyKind, ...] = ("success_only", "success_only", "terminal", "failure_only")
ENDINGS: tuple[OnSatisfied, ...] = ("cancel_remaining", "let_run", "let_run")
UNITS = (1, 2, 3, 128)
# How likely each act is while it makes sense.
LIKELY = {
    "claim": 8,
    "complete": 6,
    "complete_and_claim": 3,
    "fail": 6,
    "wait": 2,
    "spawn": 2,
    "revoke": 1,
    "cancel": 1,
    "depend": 4,
    "stage": 1,
    "apply": 2,
    "extend": 1,
    "release": 1,
    "replay": 5,
    "replay_flow": 1,
    "retry_time": 2,
    "deadlines": 0.5,
    "cancel_flow": 0.3,
    "units": 0.5,
}
# Hypothesis prefers small numbers; a generator made of one does not.
seeds = st.integers(0, 2**32 - 1)


def word(answer: Any) -> str:
    """An outcome as the model words it."""
    if isinstance(answer, str):
        return answer
    return "retry_scheduled" if isinstance(answer, RetryScheduled) else answer.kind


class FlowLives(RuleBasedStateMachine):
    """One flow. Between two acts everything that a call left is done, and compared on the way."""

    harness: ClassVar[Harness]

    @initialize(seed=seeds)
    def begin(self, seed: int) -> None:
        self.rng, self.steps = random.Random(seed), 0
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
        hold = self.rng.random() < 0.15
        self.model = FlowModel(T0, held=hold)
        self.recount = Recount(self.backend, self.tag, FLOW)
        self.handles: dict[str, Handle] = {}
        self.units()
        nodes, edges = self.some_nodes(self.rng.randint(2, 6))
        flow = FlowGraph(flow_id=FLOW, flow_kind="test", nodes=nodes, edges=edges, hold=hold)
        submit = self.backend.flows.submit_flow
        self.agree(word(self.ask(submit(flow))), "submitted")
        self.agree(word(self.ask(submit(flow))), "already_submitted")
        self.grow(nodes, edges)
        self.settle()

    @rule(seed=seeds)
    def step(self, seed: int) -> None:
        self.steps += 1
        self.rng = random.Random(seed + self.steps)
        acts = self.sensible() if self.rng.random() < 0.93 else list(LIKELY)
        (act,) = self.rng.choices(acts, [LIKELY[each] for each in acts])
        note(act)
        getattr(self, act)()
        self.settle()
        note(f"{[(m.key, m.state, m.group) for m in self.model.members.values()]}")

    def sensible(self) -> list[str]:
        """Acts that are not refused."""
        members = self.model.members.values()
        states = {member.state for member in members}
        acts = ["units"]
        if self.holders():
            acts += ["complete", "complete_and_claim", "fail", "wait", "spawn", "revoke"]
        if any((m.state == "waiting" and not m.held) or m.revoked for m in members):
            acts.append("claim")
        if states & set(LIVE):
            acts += ["cancel", "cancel_flow"]
        if "delayed" in states:
            acts.append("retry_time")
        if any(member.deadline and not member.ended for member in members):
            acts.append("deadlines")
        if self.model.policy:
            return acts
        acts += ["depend", "stage", "extend"]
        if states & ENDED:
            acts += ["replay", "replay_flow"]
        if any(edge.state == "staged" for edge in self.model.edges.values()):
            acts.append("apply")
        if self.model.held:
            acts.append("release")
        return acts

    # --- choosing, asking, comparing -------------------------------------------------------

    def some_nodes(self, count: int) -> tuple[tuple[GraphNode, ...], tuple[GraphEdge, ...]]:
        """New nodes after any of those before them."""
        nodes, edges, first = list[GraphNode](), list[GraphEdge](), len(self.model.members)
        for n in range(first, first + count):
            before = self.rng.sample(range(n), self.rng.randint(0, min(n, 3)))
            edges += (
                GraphEdge(frm=f"n{i}", to=f"n{n}", kind=self.rng.choice(KINDS)) for i in before
            )
            late = T0 + LIFETIME if self.rng.random() < 0.2 else None
            join = self.some_join(len(before))
            nodes.append(
                GraphNode(
                    key=f"n{n}",
                    execution_kind="job",
                    join=join,
                    policy=RETRIED,
                    execution_deadline_at=late,
                )
            )
            note(f"n{n} after {before}: {join}")
        return tuple(nodes), tuple(edges)

    def some_join(self, edges: int) -> JoinPolicy:
        if not edges or self.rng.random() < 0.4:
            return JoinAll()
        ending = self.rng.choice(ENDINGS)
        spared = self.spares() and self.rng.random() < 0.3
        if self.rng.random() < 0.5:
            return AnyOf(ending, spared)
        return Quorum(self.rng.randint(1, edges), ending, spared)

    def spares(self) -> bool:
        """Whether joins may spare upstreams: which ones depends on the order of calls."""
        return False

    def ask(self, work: Any) -> Any:
        return self.harness.answer(work)

    def agree(self, actual: Any, expected: Any) -> None:
        note(f"{actual}")
        assert actual == expected, f"the engine says {actual}, the model {expected}"

    def id_of(self, key: str) -> ExecutionId:
        return node_id(FLOW, self.tag, key)

    def ids(self) -> list[ExecutionId]:
        return [self.id_of(key) for key in self.model.members]

    def key(self, *states: str) -> str:
        """One of the members, mostly one in these states."""
        all_keys = list(self.model.members)
        fitting = [key for key in all_keys if self.model.members[key].state in states]
        return self.rng.choice(fitting if fitting and self.rng.random() < 0.9 else all_keys)

    def holders(self) -> list[str]:
        """Members with a live lease."""
        members = self.model.members.values()
        return [m.key for m in members if m.state == "active" and not m.revoked]

    def holder(self) -> str | None:
        holders = self.holders()
        return self.rng.choice(holders) if holders else None

    def grow(self, nodes: Any, edges: Any) -> None:
        """The model gets what the engine got, in the order in which members join."""
        inbound = {node.key: [edge for edge in edges if edge.to == node.key] for node in nodes}
        for node in ordered(nodes, inbound):
            mine = [
                Edge(edge_id(FLOW, edge), edge.frm, edge.to, edge.kind)
                for edge in inbound[node.key]
            ]
            self.model.add(node.key, node.join, mine, node.execution_deadline_at)

    def settle(self) -> None:
        """Everything that the call left is done, and as the model says."""
        self.finish()
        self.same_as_the_model()

    def finish(self) -> None:
        """Do what was left, in as many calls as it takes; the recount holds after each."""
        for _ in range(1000):
            self.look()
            left = self.ask(self.backend.flows.drain_flow_cancel(FLOW))[2]
            if not self.ask(self.backend.flows.drain_cascade(self.partition)).pending and not left:
                break
        else:
            raise AssertionError("something is always left")
        self.look()
        self.harness.run(self.recount.settled())

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
                assert (join.total_deps, join.satisfied_count) == (n, good), key
                assert join.failed_count + join.skipped_count == bad, key
                assert join.group_state == member.group, key

    # --- workers ---------------------------------------------------------------------------

    def claim(self) -> None:
        count = self.rng.choice((1, 2, 100))
        self.took(self.ask(self.backend.claims.claim_many(WANT, self.tag, count)), count)

    def took(self, got: ClaimedMany, count: int) -> None:
        keys = {self.id_of(key): key for key in self.model.members}
        taken = {keys[claim.execution_id]: claim.handle for claim in got.claims}
        paused = {key for key, member in self.model.members.items() if member.paused}
        self.agree(set(taken), self.model.claim(taken if len(taken) == count else None))
        resumed = {key for key, handle in taken.items() if handle.kind == "resumed"}
        self.agree(resumed, paused & set(taken))
        self.handles |= taken

    def complete(self) -> None:
        if key := self.holder():
            for _ in range(self.rng.choice((1, 2))):
                answer = self.ask(self.backend.executions.complete(self.handles[key], b"r"))
                self.agree(word(answer), "completed")
            self.model.end(key, "completed")

    def complete_and_claim(self) -> None:
        self.units(128)  # All that the end means is done before the claim.
        if key := self.holder():
            items, count = [Completion(self.handles[key], b"r")], self.rng.choice((1, 2, 100))
            call = self.backend.claims.complete_and_claim
            outcomes, got = self.ask(call(self.tag, items, WANT, count))
            self.agree(outcomes, [None])
            self.model.end(key, "completed")
            self.took(got, count)

    def fail(self) -> None:
        if key := self.holder():
            retries = self.rng.choice((0, RETRIES))
            category = "transient" if retries else "permanent"
            answer = self.ask(self.backend.executions.fail(self.handles[key], "boom", category))
            self.agree(word(answer), self.model.fail(key, retries, BACKOFF))

    def revoke(self) -> None:
        if key := self.holder():
            self.ask(self.backend.leases.revoke_lease(self.id_of(key)))
            self.model.members[key].revoked = True

    def wait(self) -> None:
        if key := self.holder():
            answer = self.ask(self.backend.executions.wait_children(self.handles[key]))
            self.agree(word(answer), self.model.wait(key))

    def spawn(self) -> None:
        key = self.holder()
        if key is None or len(self.model.members) >= MAX_MEMBERS:
            return
        new = GraphNode(key=f"n{len(self.model.members)}", execution_kind="job", policy=RETRIED)
        spawn, wait = self.backend.flows.spawn_children, self.rng.random() < 0.5
        kind = self.rng.choice(KINDS)
        answer = self.ask(spawn(self.handles[key], [new], kind=kind, wait=wait))
        if self.model.policy or isinstance(answer, str):
            self.agree(answer, "flow_already_terminal")
            return
        own = GraphEdge(frm=new.key, to=f"\x1e{self.id_of(key).uuid}")
        self.model.add(new.key)
        self.agree(self.model.depend(Edge(edge_id(FLOW, own), new.key, key, kind)), "applied")
        parks = wait and self.model.members[key].group == "pending"
        self.agree(answer.parked, parks and self.model.wait(key) == "moved")
        # Its reply was lost.
        self.agree(self.ask(spawn(self.handles[key], [new], kind=kind, wait=wait)), answer)

    # --- growing ---------------------------------------------------------------------------

    def pair(self) -> tuple[Edge, tuple[Any, ...]]:
        kind = self.rng.choice(KINDS)
        frm, to = self.rng.choice(list(self.model.members)), self.key(*LIVE)
        if frm == to:
            frm = self.rng.choice(list(self.model.members))
        # Each kind once: a second edge between two members counts, too.
        edge = Edge(str(uuid5(UUID(FLOW), f"{frm} {to} {kind}")), frm, to, kind)
        note(f"{frm} > {to} {kind}")
        return edge, (FLOW, self.id_of(frm), self.id_of(to))

    def depend(self) -> None:
        edge, args = self.pair()
        add = self.backend.flows.add_dependency
        for _ in range(self.rng.choice((1, 2))):
            answer = self.ask(add(*args, edge_id=edge.edge_id, dependency_kind=edge.kind))
            self.agree(word(answer), self.model.depend(edge))

    def stage(self) -> None:
        edge, args = self.pair()
        stage = self.backend.flows.stage_dependency_edge
        answer = self.ask(stage(*args, edge_id=edge.edge_id, dependency_kind=edge.kind))
        self.agree(word(answer), self.model.stage(edge))

    def apply(self) -> None:
        staged = [edge.edge_id for edge in self.model.edges.values() if edge.state == "staged"]
        if known := staged or list(self.model.edges):
            chosen = self.rng.choice(known)
            answer = self.ask(self.backend.flows.apply_dependency_to_child(FLOW, chosen))
            self.agree(word(answer), self.model.apply(chosen))

    def extend(self) -> None:
        if len(self.model.members) >= MAX_MEMBERS:
            return
        nodes, edges = self.some_nodes(1)
        answer = self.ask(self.backend.flows.extend_flow(FLOW, nodes, edges))
        if self.model.policy or isinstance(answer, str):
            self.agree(answer, "flow_already_terminal")
            return
        self.agree(word(answer), "extended")
        repeat = self.ask(self.backend.flows.extend_flow(FLOW, nodes, edges))
        self.agree(word(repeat), "already_extended")
        self.grow(nodes, edges)

    # --- operators -------------------------------------------------------------------------

    def cancel(self) -> None:
        key = self.key(*LIVE)
        answer = self.ask(self.backend.executions.cancel_execution(self.id_of(key)))
        self.agree(word(answer), self.model.cancel(key))

    def replay(self) -> None:
        key, strict = self.key(*ENDED), self.rng.random() < 0.2
        reopen = self.rng.choice(("", "skipped", "skipped", "all"))
        note(f"{key} {reopen}")
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

    def replay_flow(self) -> None:
        failed_only = self.rng.random() < 0.5
        answer = self.ask(self.backend.flows.replay_flow(FLOW, failed_only=failed_only))
        expected = self.model.replay_flow(failed_only=failed_only)
        if isinstance(answer, str) or not answer.pending:
            told = answer if isinstance(answer, str) else (answer.replayed, answer.reopened)
            self.agree(told, expected)

    def release(self) -> None:
        for _ in range(2):
            self.agree(word(self.ask(self.backend.flows.release_flow(FLOW))), self.model.release())

    def cancel_flow(self) -> None:
        policy = self.rng.choice(list(STRENGTH))
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

    def units(self, count: int = 0) -> None:
        """How much one call may do."""
        count = count or self.rng.choice(UNITS)
        self.ask(self.backend.calls.fcall("ff_test_units", "{fp:0}", (count,), op="test"))

    def teardown(self) -> None:
        self.units(128)
        assert self.harness.run(find_leaks(self.backend)) == []


class Unfinished(FlowLives):
    """The same acts while earlier ones are half done: whatever wins, everything is counted."""

    def agree(self, actual: Any, expected: Any) -> None:
        """Who comes first decides."""
        note(f"{actual}")
        del expected

    def spares(self) -> bool:
        return True

    def look(self) -> None:
        self.harness.run(self.recount.look())

    def settle(self) -> None:
        """Go on with what the engine says; the model only chooses what to do next."""
        self.look()
        members, states = self.model.members, self.recount.states
        for key in set(members) - set(states):
            del members[key]
        for key, state in states.items():
            member = members.setdefault(key, Member(key, JoinAll()))
            member.state = state
            member.revoked = member.revoked and state == "active"
            if key in self.recount.joins:
                member.group = self.recount.joins[key].group_state

    @rule(seed=seeds)
    def upkeep(self, seed: int) -> None:
        """Somebody goes on with what was left, or looks whether something was lost."""
        self.steps += 1
        self.rng = random.Random(seed + self.steps)
        flows, act = self.backend.flows, self.rng.choice(("drain", "drain", "look", "finish"))
        note(act)
        if act == "finish":
            self.finish()
        elif act == "drain":
            self.ask(flows.drain_flow_cancel(FLOW))
            self.ask(flows.drain_cascade(self.partition))
        else:
            child = self.id_of(self.key())
            self.ask(flows.reconcile_sibling_cancel_group(FLOW, child))
            self.ask(flows.drain_sibling_cancel_group(FLOW, child))
            self.ask(flows.cascade_completion(self.id_of(self.key(*ENDED))))
            everybody = [(each, "0") for each in self.ids()]
            self.ask(self.backend.upkeep.audit_dependencies(self.tag, everybody))
        self.settle()

    def teardown(self) -> None:
        self.finish()
        super().teardown()
