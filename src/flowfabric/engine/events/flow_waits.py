"""Waiting for a flow to finish, on any backend."""

import asyncio
from collections.abc import Awaitable, Callable

from flowfabric.core.contracts.flows import FlowState
from flowfabric.core.errors import TimeoutError_
from flowfabric.engine.api import check
from flowfabric.engine.api.events import Events


async def wait_flow(
    events: Events,
    tag: str,
    flow_id: str,
    read: Callable[[], Awaitable[FlowState | None]],
    timeout: float | None,
) -> FlowState:
    """The state in which a flow finished; `read` returns None while it has not."""
    limit = None if timeout is None else check.seconds(timeout, "timeout")
    state: FlowState | None = None

    async def has_finished() -> bool:
        nonlocal state
        state = await read()
        return state is not None

    try:
        async with asyncio.timeout(limit):
            while state is None:
                await events.wait_for(tag, flow_id, has_finished)
    except TimeoutError:
        told = f"flow {flow_id} did not finish within {limit:g} s"
        raise TimeoutError_("timeout", told, op="wait_flow") from None
    return state
