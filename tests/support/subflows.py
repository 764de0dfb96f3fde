"""Subflows for engine tests: members that own flows, and the flows that they own."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.core.contracts.flows import FlowGraph, Submitted
from tests.support.engine import Engine
from tests.support.flows import TestFlow, graph

NEVER_CLAIMED = "waiting_children"


def owning(text: str, *owners: str, **fields: Any) -> FlowGraph:
    """The graph of this text; these nodes own flows."""
    plain = graph(text, input_name="before")
    nodes = tuple(
        msgspec.structs.replace(node, execution_kind="subflow", **fields)
        if node.key in owners
        else node
        for node in plain.nodes
    )
    return msgspec.structs.replace(plain, nodes=nodes)


async def parent(engine: Engine, text: str = "a>s>z", owner: str = "s", **fields: Any) -> TestFlow:
    outcome = await engine.backend.flows.submit_flow(owning(text, owner, **fields))
    assert isinstance(outcome, Submitted)
    return TestFlow(engine, outcome)


async def child(
    flow: TestFlow, text: str, owner: str = "s", *, spread: bool = False, **fields: Any
) -> TestFlow:
    """A subflow of this member; its nodes are known to both."""
    plain = msgspec.structs.replace(graph(text), flow_id="", **fields)
    outcome = await flow.backend.flows.submit_flow(
        plain, parent_execution_id=flow.nodes[owner], spread=spread
    )
    assert isinstance(outcome, Submitted)
    if not spread:
        flow.nodes.update(outcome.nodes)
    return TestFlow(flow.engine, outcome)


async def drained(engine: Engine, *flows: TestFlow) -> None:
    """Everything that calls left to do is done, messages between partitions too."""
    partitions = {next(iter(flow.nodes.values())).partition for flow in flows}
    for _ in range(50):
        left = [await engine.backend.flows.drain_cascade(each) for each in partitions]
        if not any(each.pending for each in left):
            return
    raise AssertionError("something is always left")
