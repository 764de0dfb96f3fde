"""Flows: chains of members, one member that a thousand wait for, and cancellation."""

import asyncio
import itertools
import time
from collections.abc import Iterable

import msgspec

from flowfabric.bench.arena import LANE, Arena, poll, timed
from flowfabric.bench.report import Figures, percentile, percentiles
from flowfabric.bench.workers import BenchApp, worker_process
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import FlowGraph, GraphEdge, GraphNode, JoinAll, Quorum
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.graph import MAX_NODES
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import flow_partition
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.flows import FlowFilter

_LENGTH = 10
_SUBMITTERS = 32
_CONCURRENCY = 256
_WARM_UP = 20
_PAUSE_S = 0.003
"""Long enough for the worker to become idle again."""
_SINGLE_SHARE = 10
"""One flow at a time is measured n / 10 times."""
_WIDTH = 1_000
_CLAIM = ClaimRequest(LANE, "bench", "bench-flows")
_CLAIMED_AT_ONCE = 100
_RACES = (10, 100, 1_000)
_FIRST_WINS = Quorum(1, "cancel_remaining")
_ACTIVE = FlowFilter(status="active")
_IDLE = NewExecution(
    execution_id=ExecutionId.trusted("{fp:0}:00000000-0000-4000-8000-000000000000"),
    execution_kind="idle",
)


def _graph(edges: Iterable[tuple[str, str]], of: NewExecution = _IDLE, race: str = "") -> FlowGraph:
    """A graph of these edges; the first upstream of `race` that completes cancels the others."""
    pairs = list(edges)
    keys = dict.fromkeys(itertools.chain.from_iterable(pairs))
    nodes = (
        GraphNode(
            key=key,
            execution_kind=of.execution_kind,
            input_payload=of.input_payload,
            payload_encoding=of.payload_encoding,
            lane_id=LANE,
            join=_FIRST_WINS if key == race else JoinAll(),
        )
        for key in keys
    )
    return FlowGraph(
        flow_id=new_uuid(),
        flow_kind="bench",
        nodes=tuple(nodes),
        edges=tuple(GraphEdge(frm=frm, to=to) for frm, to in pairs),
    )


def _noop(app: BenchApp) -> NewExecution:
    """An execution of the task `noop`."""
    return app.noop.new_execution(_IDLE.execution_id, app.noop.encode((), {}))


def _chain(of: NewExecution) -> FlowGraph:
    return _graph(itertools.pairwise(map(str, range(_LENGTH))), of)


async def chain(at: Arena) -> Figures:
    """Run one flow of ten members at a time; then submit `n` and run them at the same time."""
    n, flows = at.options.n, at.backend.flows
    singles = _WARM_UP + max(1, n // _SINGLE_SHARE)
    # The worker reports when it has run everything, so that nothing needs to poll for the end.
    goal = (singles + n) * _LENGTH
    async with (
        BenchApp(at.url) as app,
        worker_process(at.url, goal=goal, concurrency=_CONCURRENCY) as worker,
    ):
        of = _noop(app)
        at.progress.begin("chain: one at a time", singles)
        times: list[float] = []
        for _ in range(singles):
            await asyncio.sleep(_PAUSE_S)
            start = time.perf_counter()
            flow = _chain(of)
            await flows.submit_flow(flow)
            await flows.wait_flow(flow.flow_id, 30)
            times.append((time.perf_counter() - start) * 1e3)
            at.progress.step()
        at.progress.begin("chain: many", n)
        left = iter([_chain(of) for _ in range(n)])

        async def submit_some() -> None:
            for flow in left:
                await flows.submit_flow(flow)
                at.progress.step()

        async def run_all() -> None:
            await asyncio.gather(*(submit_some() for _ in range(_SUBMITTERS)))
            await worker.events("reached")
            await poll(lambda: _none_active(at))

        server = await at.server_cpu_s()
        seconds, _ = await timed(run_all())
        server = await at.server_cpu_s() - server
    figures = percentiles(times[_WARM_UP:])
    return {"flows_per_s": n / seconds, **figures, "flow_server_us": server / n * 1e6}


async def _submit(at: Arena, flow: FlowGraph) -> None:
    """Submit a flow in as many calls as it needs, then release it."""
    if len(flow.nodes) <= MAX_NODES:
        await at.backend.flows.submit_flow(flow)
        return
    first, rest = flow.nodes[:MAX_NODES], flow.nodes[MAX_NODES:]
    later = {node.key for node in rest}
    edges = tuple(edge for edge in flow.edges if later.isdisjoint((edge.frm, edge.to)))
    await at.backend.flows.submit_flow(
        msgspec.structs.replace(flow, nodes=first, edges=edges, hold=True)
    )
    known = set(edges)
    await at.backend.flows.extend_flow(
        flow.flow_id, rest, [edge for edge in flow.edges if edge not in known]
    )
    await at.backend.flows.release_flow(flow.flow_id)


async def _none_active(at: Arena) -> bool:
    return not (await at.backend.flows.list_flows(limit=1, where=_ACTIVE)).entries


async def fanout(at: Arena) -> Figures:
    """Complete a member that a thousand wait for; then let a worker run the whole flow."""
    n, flows = at.options.n, at.backend.flows
    released: list[float] = []
    at.progress.begin("fanout: release", n)
    for _ in range(n):
        flow = _fan()
        await _submit(at, flow)
        (root,) = await _claim(at, flow, 1)
        start = time.perf_counter()
        await at.backend.executions.complete(root)
        await poll(lambda flow=flow: _has(at, flow, "waiting", _WIDTH))
        released.append((time.perf_counter() - start) * 1e3)
        await flows.cancel_flow(flow.flow_id, wait_timeout_ms=60_000)
        at.progress.step()
    whole: list[float] = []
    async with BenchApp(at.url) as app, worker_process(at.url, concurrency=_CONCURRENCY):
        at.progress.begin("fanout: whole flow", n)
        for _ in range(n):
            flow = _fan(_noop(app))
            start = time.perf_counter()
            await _submit(at, flow)
            await flows.wait_flow(flow.flow_id, 60)
            whole.append((time.perf_counter() - start) * 1e3)
            at.progress.step()
    members_per_s = (_WIDTH + 2) / (percentile(whole, 50) / 1e3)
    return {
        **percentiles(released, "release_"),
        **percentiles(whole, "whole_"),
        "members_per_s": members_per_s,
    }


def _fan(of: NewExecution = _IDLE) -> FlowGraph:
    parts = [str(number) for number in range(_WIDTH)]
    return _graph([*(("first", part) for part in parts), *((part, "last") for part in parts)], of)


async def _claim(at: Arena, flow: FlowGraph, count: int) -> list[Handle]:
    """Claim members of the flow; no worker serves its partition."""
    tag = f"{{fp:{flow_partition(flow.flow_id, at.backend.counts)}}}"
    found: list[Handle] = []
    while len(found) < count:
        size = min(_CLAIMED_AT_ONCE, count - len(found))
        claimed = await at.backend.claims.claim_many(_CLAIM, tag, size)
        found += (claim.handle for claim in claimed.claims)
    return found


async def _has(at: Arena, flow: FlowGraph, state: str, count: int) -> bool:
    known = await at.backend.flows.describe_flow(flow.flow_id, edge_groups=False)
    return known is not None and known.members.get(state, 0) == count


async def cancel(at: Arena) -> Figures:
    """Cancel flows of a thousand members; then let one of many running siblings win a race."""
    n, flows = at.options.n, at.backend.flows
    at.progress.begin("cancel: flows", n)
    seconds = 0.0
    for _ in range(n):
        flow = _fan()
        await _submit(at, flow)
        took, _ = await timed(flows.cancel_flow(flow.flow_id, wait_timeout_ms=60_000))
        seconds += took
        at.progress.step()
    figures: Figures = {"cancelled_per_s": n * (_WIDTH + 2) / seconds}
    for width in _RACES:
        at.progress.begin(f"cancel: {width:,} siblings", n)
        times = [await _race(at, width) for _ in range(n)]
        figures[f"race_p99_ms_{width}"] = percentile(times, 99)
    return figures


async def _race(at: Arena, width: int) -> float:
    """Milliseconds from the winner's completion until all its siblings are cancelled."""
    flow = _graph([(str(number), "end") for number in range(width)], race="end")
    await _submit(at, flow)
    winner, *_ = await _claim(at, flow, width)
    start = time.perf_counter()
    await at.backend.executions.complete(winner)
    await poll(lambda: _has(at, flow, "cancelled", width - 1))
    took = (time.perf_counter() - start) * 1e3
    await at.backend.flows.cancel_flow(flow.flow_id)
    at.progress.step()
    return took
