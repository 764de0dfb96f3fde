"""Engine operations as methods of a client, and waiting for flows."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from flowfabric.core.closing import ClosedOnce
from flowfabric.core.contracts.flows import FlowState
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import FlowFabricError, NotFoundError, TransportError
from flowfabric.core.text import plural
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.flows import Flows

P = ParamSpec("P")
R = TypeVar("R")

_RETRY_S = 0.2
_DIAGNOSIS_S = 2.0


def engine_call(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """A client method that forwards to the engine: `Signals.x` calls `self.backend.signals.x`."""
    concern, name = method.__qualname__.split(".")
    concern = concern.lower()

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return getattr(getattr(self.backend, concern), name)(*args, **kwargs)

    return call


class FlowCalls(ClosedOnce):
    """The client's methods for flows."""

    backend: Backend

    submit_flow = engine_call(Flows.submit_flow)
    extend_flow = engine_call(Flows.extend_flow)
    release_flow = engine_call(Flows.release_flow)
    describe_flow = engine_call(Flows.describe_flow)
    cancel_flow = engine_call(Flows.cancel_flow)
    replay_flow = engine_call(Flows.replay_flow)
    delete_flow = engine_call(Flows.delete_flow)
    list_flows = engine_call(Flows.list_flows)
    list_members = engine_call(Flows.list_members)
    list_edges = engine_call(Flows.list_edges)
    set_flow_tags = engine_call(Flows.set_flow_tags)
    get_inputs = engine_call(Flows.get_inputs)

    async def wait_flow(self, flow_id: str, timeout: Duration | None = None) -> FlowState:
        """Wait until all members of a flow have ended; returns the state of the flow."""
        limit = asyncio.timeout(None if timeout is None else to_ms(timeout, "timeout") / 1000)
        try:
            async with limit:
                if await self.backend.flows.describe_flow(flow_id, edge_groups=False) is None:
                    raise NotFoundError("flow_not_found", flow_id, op="wait_flow")
                return await self._flow_ended(flow_id)
        except TimeoutError:
            if not limit.expired():
                raise
        raise TimeoutError(await self._unfinished_flow(flow_id, timeout))

    async def _flow_ended(self, flow_id: str) -> FlowState:
        while True:
            try:
                return await self.backend.flows.wait_flow(flow_id)
            except TransportError as error:
                # The flow exists, so keep waiting during an outage.
                if not error.retryable or self.closed:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _unfinished_flow(self, flow_id: str, timeout: Duration | None) -> str:
        """The timeout message, with the states of the nodes if they can be read quickly."""
        given = f"{timeout:g} s" if isinstance(timeout, (int, float)) else str(timeout)
        text = f"Flow {flow_id} did not finish within {given}."
        try:
            async with asyncio.timeout(_DIAGNOSIS_S):
                flow = await self.backend.flows.describe_flow(flow_id, edge_groups=False)
        except (FlowFabricError, TimeoutError):
            return text
        if flow is None:
            return text
        states = ", ".join(f"{count} {state}" for state, count in sorted(flow.members.items()))
        why = ""
        if flow.held:
            why = f" It is held: `flowfabric flow release {flow_id}` lets it run."
        elif flow.awaits_parent and flow.parent_execution_id is not None:
            node = flow.parent_execution_id.compact
            why = f" It starts when node {node} no longer waits for others."
        return f"{text} Its {plural(flow.node_count, 'node')}: {states}.{why}"
