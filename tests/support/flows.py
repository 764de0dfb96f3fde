"""Flows for engine tests: graphs from short texts, and members that run and end."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from flowfabric.core.contracts.flows import (
    FlowGraph,
    FlowSnapshot,
    GraphEdge,
    GraphNode,
    JoinAll,
    JoinPolicy,
    Submitted,
)
from flowfabric.core.contracts.leases import Claim
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import flow_partition
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.flow_records import COUNTERS
from tests.support.engine import Engine


async def set_counters(engine: Engine, flow_id: str, **numbers: int) -> None:
    """Damage the stored counters of a flow."""
    key = keys.flow(TestFlow.tag_of(engine, flow_id), flow_id)
    packed: Any = await engine.backend.transport.call("HGET", key, "counters")
    counters = dict(zip(COUNTERS, msgspec.msgpack.decode(packed), strict=True)) | numbers
    packed = msgspec.msgpack.encode([*counters.values()])
    await engine.backend.transport.call("HSET", key, "counters", packed)


class TestFlow:
    """One submitted graph. Nodes are named by their keys."""

    __test__ = False

    def __init__(self, engine: Engine, submitted: Submitted) -> None:
        self.engine = engine
        self.flow_id = submitted.flow_id
        self.nodes = submitted.nodes
        self.tag = next(iter(submitted.nodes.values())).tag
        self.claims: dict[str, Claim] = {}

    @staticmethod
    def tag_of(engine: Engine, flow_id: str) -> str:
        """The hash tag of a flow and of everything in it."""
        return f"{{fp:{flow_partition(flow_id, engine.backend.counts)}}}"

    @property
    def backend(self) -> Any:
        return self.engine.backend

    def new_member_id(self) -> ExecutionId:
        """The id of an execution that may join the flow."""
        return ExecutionId.parse(f"{self.tag}:{new_uuid()}")

    async def claim(self) -> list[str]:
        """Claim everything that can run; returns the keys."""
        got = await self.backend.claims.claim_many(self.engine.want(), self.tag, 100)
        names = {execution_id: key for key, execution_id in self.nodes.items()}
        # Other flows may be in the same partition.
        own = {names[each.execution_id]: each for each in got.claims if each.execution_id in names}
        self.claims |= own
        return sorted(own)

    async def end(self, key: str, how: str = "success", result: bytes = b"") -> None:
        """End a member in one of the ways it can end by itself."""
        execution_id = self.nodes[key]
        executions = self.backend.executions
        if how == "cancelled":
            await executions.cancel_execution(execution_id, "test")
            return
        # Members of the same millisecond are claimed in the order of their ids.
        while key not in self.claims and await self.claim():
            pass
        handle = self.claims[key].handle
        if how == "success":
            await executions.complete_execution(execution_id, handle, result_payload=result)
        elif how == "failed":
            await executions.fail_execution(
                execution_id, handle, failure_reason="test", failure_category="permanent"
            )
        else:
            raise AssertionError(how)

    async def state(self, key: str) -> PublicState:
        state = await self.backend.reads.read_execution_state(self.nodes[key])
        assert state is not None
        return state

    async def states(self) -> dict[str, str]:
        return {key: (await self.state(key)).value for key in self.nodes}

    async def snapshot(self) -> FlowSnapshot:
        found = await self.backend.flows.describe_flow(self.flow_id)
        assert found is not None
        return found

    async def recount(self) -> dict[str, int]:
        """How many members are in each state, counted one by one."""
        counts: dict[str, int] = {}
        for state in (await self.states()).values():
            counts[state] = counts.get(state, 0) + 1
        return counts


def graph(
    text: str, joins: dict[str, JoinPolicy] | None = None, flow_id: str = "", **edge: Any
) -> FlowGraph:
    """A graph from `a>b b>c d`: edges, and nodes of their own."""
    keys: list[str] = []
    edges: list[GraphEdge] = []
    for part in text.split():
        ends = part.split(">")
        keys += (key for key in ends if key not in keys)
        edges += (GraphEdge(frm=a, to=b, **edge) for a, b in itertools.pairwise(ends))
    nodes = tuple(
        GraphNode(key=key, execution_kind="job", join=(joins or {}).get(key, JoinAll()))
        for key in keys
    )
    return FlowGraph(
        flow_id=flow_id or new_uuid(), flow_kind="test", nodes=nodes, edges=tuple(edges)
    )


async def submitted(engine: Engine, text: str, joins: Any = None, **edge: Any) -> TestFlow:
    """A submitted graph."""
    outcome = await engine.backend.flows.submit_flow(graph(text, joins, **edge))
    assert isinstance(outcome, Submitted)
    return TestFlow(engine, outcome)


def ids(flow: TestFlow, *keys: str) -> tuple[ExecutionId, ...]:
    return tuple(flow.nodes[key] for key in keys)


async def without_followups(engine: Engine) -> None:
    """As if each caller died after its call: nothing goes on in the background."""
    await engine.backend.drains.aclose()


async def set_units(engine: Engine, units: int = 128) -> None:
    """How much one call may do for members that depend on others; 128 is the default."""
    await engine.backend.calls.fcall("ff_test_units", "{fp:0}", (units,), op="test")


async def drained(engine: Engine, tag: str) -> None:
    """Continue until nothing is left to do for members that depend on others."""
    partition = int(tag[4:-1])
    for _ in range(10_000):
        if not (await engine.backend.flows.drain_cascade(partition)).pending:
            return
    raise AssertionError("the backlog never empties")
