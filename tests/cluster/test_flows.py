"""Flows on a cluster: a flow and its members share a slot, and subflows reach other nodes."""

from __future__ import annotations

import asyncio

import flowfabric as ff
from flowfabric.scanners.supervisor import ScannerSupervisor
from tests.support.cluster import TestCluster
from tests.support.engine import Engine
from tests.support.flows import TestFlow, graph, submitted
from tests.support.subflows import child, drained, parent


async def test_a_whole_flow_in_every_part_of_the_cluster(engine: Engine) -> None:
    for _ in range(12):
        flow = await submitted(engine, "a>b a>c b>d c>d")
        await flow.end("a")
        assert await flow.claim() == ["b", "c"]
        await flow.end("b")
        await flow.end("c", "failed")
        assert await flow.state("d") == "skipped"
        assert (await flow.snapshot()).derived_state == "failed"
        assert (await engine.backend.flows.replay_flow(flow.flow_id)).replayed == 1
        flow.claims.clear()
        await flow.end("c")
        await flow.end("d")
        assert await engine.backend.flows.wait_flow(flow.flow_id, 5) == "completed"
    listed = await engine.backend.flows.list_flows(limit=100)
    assert len(listed.entries) == 12
    supervisor = ScannerSupervisor(engine.backend)
    for scanner in ("cascade_drain", "dependency_reconciler", "flow_projector"):
        assert (await supervisor.scan_once(scanner)).errors == 0


async def test_cancelling_and_deleting_a_flow(engine: Engine) -> None:
    wide = graph(" ".join(f"a>m{n}" for n in range(300)))
    outcome = await engine.backend.flows.submit_flow(wide)
    flow = TestFlow(engine, outcome)  # pyright: ignore[reportArgumentType]
    await flow.end("a")
    await engine.backend.flows.cancel_flow(flow.flow_id, "enough", wait_timeout_ms=20_000)
    assert (await flow.snapshot()).members == {"completed": 1, "cancelled": 300}
    await engine.backend.flows.delete_flow(flow.flow_id)
    assert await engine.backend.flows.describe_flow(flow.flow_id) is None


async def test_a_subflow_on_another_node_starts_ends_and_is_cancelled(engine: Engine) -> None:
    flow = await parent(engine)
    sub = await child(flow, "x>y", spread=True)
    assert sub.tag != flow.tag
    await flow.end("a")
    await drained(engine, flow, sub)
    await sub.end("x")
    await sub.end("y", result=b"far away")
    await drained(engine, flow, sub)
    await flow.claim()
    assert flow.claims["z"].inputs.inputs["before"].result == b"far away"

    flow = await parent(engine, "s")
    sub = await child(flow, "x>y", spread=True)
    await drained(engine, flow, sub)
    await engine.backend.flows.cancel_flow(flow.flow_id, "why")
    await drained(engine, flow, sub)
    assert await sub.states() == {"x": "cancelled", "y": "cancelled"}
    assert await flow.state("s") == "cancelled"


async def test_an_application_runs_a_flow(engine: Engine, cluster: TestCluster) -> None:
    app = ff.Fabric(cluster.url)

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    @app.task
    def add(numbers: list[int]) -> int:
        return sum(numbers)

    async with app, app.worker(), asyncio.timeout(50):
        flow = app.flow("sum")
        flow.add(add, ff.gather(flow.map(double, range(20))))
        assert await (await flow.submit()).result() == 380
