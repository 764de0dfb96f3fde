"""A read whose reply is lost is made again; whatever happens, its effect is never in doubt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import ReplyError, TransportError
from flowfabric.engine.events.subscription import FeedEvents
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.calls import unreadable
from flowfabric.sdk.client import Client
from flowfabric.valkey.link import READ_FUNCTIONS
from tests.support.engine import LANE, Engine
from tests.support.server import TestServer
from tests.support.storage import lossy
from tests.support.suspension import Waits

Read = Callable[[ValkeyBackend, Handle], Awaitable[Any]]


async def watched(backend: ValkeyBackend, ask: Callable[[Client], Awaitable[Any]]) -> Any:
    """Ask a client of its own, and stop what it watches."""
    client = Client(backend)
    try:
        return await ask(client)
    finally:
        await cast("FeedEvents", backend.events)._watch.aclose()


READS: dict[str, Read] = {
    "read_execution_state": lambda b, h: b.reads.read_execution_state(h.execution_id),
    "read_execution_info": lambda b, h: b.reads.read_execution_info(h.execution_id),
    "describe_execution": lambda b, h: b.reads.describe_execution(h.execution_id),
    "get_execution_result": lambda b, h: b.reads.get_execution_result(h.execution_id),
    "read_outcome": lambda b, h: b.reads.read_outcome(h.execution_id),
    "read_execution_context": lambda b, h: b.reads.read_execution_context(h.execution_id),
    "read_execution_policy": lambda b, h: b.reads.read_execution_policy(h.execution_id),
    "find_executions": lambda b, h: b.listings.find_executions(
        h.execution_id.rpartition(":")[2][:8]
    ),
    "get_execution_namespace": lambda b, h: b.reads.get_execution_namespace(h.execution_id),
    "get_execution_tag": lambda b, h: b.reads.get_execution_tag(h.execution_id, "a.b"),
    "get_execution_tags": lambda b, h: b.reads.get_execution_tags(h.execution_id),
    "read_exec_core_fields": lambda b, h: b.reads.read_exec_core_fields(
        h.execution_id, ["lane_id"]
    ),
    "read_total_attempt_count": lambda b, h: b.reads.read_total_attempt_count(h.execution_id),
    "read_attempts": lambda b, h: b.reads.read_attempts(h.execution_id),
    "read_execution_history": lambda b, h: b.reads.read_execution_history(h.execution_id),
    "explain_execution": lambda b, h: b.reads.explain_execution(h.execution_id),
    "list_executions": lambda b, _: b.listings.list_executions(),
    "list_pending_waitpoints": lambda b, h: b.waitpoints.list_pending_waitpoints(h.execution_id),
    "read_waits": lambda b, h: b.waitpoints.read_waits(h.execution_id),
    "read_steps": lambda b, h: b.steps.read_steps(h.execution_id),
    "list_suspended": lambda b, _: b.suspensions.list_suspended(),
    "list_workers": lambda b, _: b.workers.list_workers(),
    "list_expired_leases": lambda b, _: b.leases.list_expired_leases(),
    "list_lanes": lambda b, _: b.lanes.list_lanes(),
    "get_lane": lambda b, _: b.lanes.get_lane(LANE),
    "busiest_partitions": lambda b, _: b.lanes.busiest_partitions(),
    "scan_eligible": lambda b, h: b.claims.scan_eligible_executions(LANE, h.execution_id.tag, 5),
    "list_kids": lambda b, _: b.secrets.list_waitpoint_hmac_kids(),
    "read_stream": lambda b, h: b.streams.read_stream(h.execution_id, 0),
    "wait": lambda b, h: watched(b, lambda client: client.wait(h.execution_id)),
    "result": lambda b, h: watched(b, lambda client: client.result(h.execution_id)),
}


async def ended(engine: Engine) -> Handle:
    await Waits.open(engine)
    handle = await engine.running(tags={"a.b": "c"})
    await engine.backend.streams.append_frame(handle, Frame(payload=b"said"))
    await engine.backend.executions.complete(handle, b"done")
    return handle


@pytest.mark.parametrize("name", READS)
async def test_a_lost_reply_goes_unnoticed(engine: Engine, valkey: TestServer, name: str) -> None:
    handle = await ended(engine)
    wanted = await READS[name](engine.backend, handle)
    async with lossy(engine, valkey) as (client, proxy):
        await READS[name](client, handle)
        # Keys and functions begin with this; greetings of other connections do not hold it.
        proxy.drop_next_reply(b"ff")
        assert await READS[name](client, handle) == wanted
        assert proxy.dropped == 1


@pytest.mark.parametrize("name", ["read_execution_state", "list_kids", "read_stream", "result"])
async def test_a_read_without_an_answer_has_no_effect(
    engine: Engine, valkey: TestServer, name: str
) -> None:
    handle = await ended(engine)
    async with lossy(engine, valkey) as (client, proxy):
        client.transport._request_timeout = 0.05  # type: ignore[attr-defined]
        proxy.down()
        with pytest.raises(TransportError) as caught:
            await READS[name](client, handle)
        assert (caught.value.retryable, caught.value.ambiguous) == (True, False)
        assert "taken effect" not in str(caught.value)
        proxy.up()


async def test_reads_are_what_the_library_says_they_are(engine: Engine) -> None:
    """Two functions are reads to their callers although they leave a note of themselves."""
    listed: Any = await engine.backend.transport.call("FUNCTION", "LIST")
    (library,) = listed
    cannot_write = {
        function[b"name"].decode()
        for function in library[b"functions"]
        if b"no-writes" in function[b"flags"]
    }
    assert {*READ_FUNCTIONS} == cannot_write | {"ff_stream_read", "ff_waitpoint_token"}


def test_an_unreadable_answer_to_a_read_leaves_nothing_in_doubt() -> None:
    read, written = (unreadable(7, name, "op") for name in ("ff_read_waits", "ff_create"))
    assert isinstance(read, ReplyError)
    assert (read.ambiguous, written.ambiguous) == (False, True)
