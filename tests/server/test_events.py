"""Server-sent events: order, ends, resuming, sharing, and what is refused before the start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from flowfabric.core.ids import ExecutionId
from tests.server.conftest import Serving
from tests.support.engine import Engine
from tests.support.flows import TestFlow, submitted
from tests.support.http import Http, read_head
from tests.support.sdk import until
from tests.support.streams import append
from tests.support.suspension import Waits

UNKNOWN = "{fp:7}:11111111-2222-4333-8444-555555555555"


class Seen(msgspec.Struct):
    """One event as a client reads it."""

    name: str
    id: str
    data: Any


class Source:
    """Reads events one by one."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._rest = b""

    async def block(self) -> bytes | None:
        """The next event or comment; None when the server has ended the stream."""
        async with asyncio.timeout(20):
            while b"\n\n" not in self._rest:
                size = (await self._reader.readline()).strip()
                if not size or size == b"0":
                    return None
                self._rest += await self._reader.readexactly(int(size, 16))
                await self._reader.readline()
        found, _, self._rest = self._rest.partition(b"\n\n")
        return found

    async def next(self) -> Seen | None:
        while (block := await self.block()) is not None:
            if not block.startswith(b":"):
                fields = dict(line.split(": ", 1) for line in block.decode().split("\n"))
                return Seen(fields["event"], fields["id"], json.loads(fields["data"]))
        return None

    async def rest(self) -> list[Seen]:
        found: list[Seen] = []
        while (event := await self.next()) is not None:
            found.append(event)
        return found


@asynccontextmanager
async def follow(http: Http, path: str, **headers: str) -> AsyncGenerator[Source]:
    async with http.open("GET", path, headers=headers) as (reader, status, found):
        assert status == 200
        assert found["content-type"] == "text/event-stream"
        yield Source(reader)


async def test_an_execution_is_followed_to_its_end(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}/events"
    async with follow(http, path) as source:
        first = await source.next()
        assert first is not None
        assert (first.name, first.data["public_state"]) == ("state", "waiting")
        assert first.data["entry"] is None
        handle = (await engine.claim()).handle
        claimed = await source.next()
        assert claimed is not None
        assert (claimed.data["public_state"], claimed.data["entry"]["type"]) == (
            "active",
            "acquired",
        )
        await engine.backend.executions.progress(handle, 40, "almost")
        progress = await source.next()
        assert progress is not None
        assert (progress.name, progress.data["progress_pct"]) == ("progress", 40)
        await engine.backend.executions.complete(handle, b"1")
        done, end = await source.rest()
        assert (done.data["public_state"], done.data["entry"]["outcome"]) == (
            "completed",
            "success",
        )
        assert (end.name, end.data) == (
            "end",
            {"execution_id": execution_id, "public_state": "completed"},
        )
    assert engine.backend._events._open == set()


async def test_a_stream_resumes_after_the_last_event(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}/events"
    async with follow(http, path) as source:
        first = await source.next()
    assert first is not None
    handle = (await engine.claim()).handle
    await engine.backend.executions.complete(handle)
    for resumed in (
        follow(http, path, last_event_id=first.id),
        follow(http, f"{path}?cursor={first.id}"),
    ):
        async with resumed as source:
            events = await source.rest()
        assert [event.name for event in events] == ["state", "state", "state", "end"]
        assert [event.data["entry"] and event.data["entry"]["type"] for event in events[:3]] == [
            None,
            "acquired",
            "completion",
        ]
        # A client that is cut after the first of them resumes where it was.
        assert events[0].id == first.id
        assert len({event.id for event in events[:3]}) == 3
    async with follow(http, path, last_event_id=events[-1].id) as source:
        again = await source.rest()
    assert [event.name for event in again] == ["state", "end"]


async def test_an_ended_execution_has_a_state_and_an_end(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id)
    async with follow(http, f"/v1/executions/{execution_id}/events") as source:
        events = await source.rest()
    assert [event.name for event in events] == ["state", "end"]
    assert events[1].data["public_state"] == "cancelled"


async def test_signals_are_events(http: Http, engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    async with follow(http, f"/v1/executions/{parked.handle.execution_id}/events") as source:
        await source.next()
        await waits.send(parked)
        signal = await source.next()
        assert signal is not None
        assert (signal.name, signal.data["signal_name"]) == ("signal", "go")


async def test_what_a_signal_changes_is_shown_at_once(
    serve: Serving, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.routes.events.TICK_S", 60.0)
    waits = await Waits.open(engine)
    parked = await waits.park()
    path = f"/v1/executions/{parked.handle.execution_id}/events"
    async with serve() as http, follow(http, path) as source:
        await source.next()
        await waits.send(parked)
        signal, resumed = await source.next(), await source.next()
        assert signal is not None
        assert resumed is not None
        assert signal.data["effect"] == "resume_condition_satisfied"
        assert (resumed.name, resumed.data["public_state"]) == ("state", "waiting")
        assert resumed.data["entry"] is None


async def test_output_is_followed_frame_by_frame(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, handle, "one")
    path = f"/v1/executions/{handle.execution_id}/attempts/0/stream/events"
    async with follow(http, path) as source:
        state, first = await source.next(), await source.next()
        assert state is not None
        assert first is not None
        assert (state.name, state.data["public_state"]) == ("state", "active")
        assert (first.name, first.data["fields"]["payload"]) == ("frame", "one")
        assert first.id == first.data["id"]
        await append(engine, handle, b"\xff")
        second = await source.next()
        assert second is not None
        assert second.data["fields"]["encoding"] == "base64"
        await engine.backend.executions.complete(handle)
        events = await source.rest()
        assert events[-1].name == "end"
        assert events[-1].data["closed_reason"] == "attempt_success"
    async with follow(http, path, last_event_id=first.id) as source:
        events = [event for event in await source.rest() if event.name != "state"]
    assert [event.name for event in events] == ["frame", "end"]
    assert events[0].id == second.id


async def test_output_of_an_attempt_that_never_started(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id)
    path = f"/v1/executions/{execution_id}/attempts/3/stream/events"
    async with follow(http, path) as source:
        events = await source.rest()
    assert [event.name for event in events] == ["state", "end"]
    assert events[1].data == {"closed_at": None, "closed_reason": None}


async def test_output_is_followed_with_the_changes_of_the_feed(
    serve: Serving, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the feed can report these changes in time.
    monkeypatch.setattr("flowfabric.server.routes.events.TICK_S", 60.0)
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}"
    async with (
        serve() as http,
        follow(http, f"{path}/events") as states,
        follow(http, f"{path}/attempts/0/stream/events") as output,
    ):
        for source in (states, output):
            first = await source.next()
            assert first is not None
            assert (first.data["public_state"], first.data["entry"]) == ("waiting", None)
        handle = (await engine.claim()).handle
        claimed = [await states.next(), await output.next()]
        await append(engine, handle, "one")
        frame = await output.next()
        await engine.backend.executions.complete(handle)
        done = [await states.next(), await output.next()]
        for one, other in (claimed, done):
            assert one is not None
            assert other is not None
            assert (other.name, other.data) == (one.name, one.data)
        assert frame is not None
        assert [each and each.data["entry"]["type"] for each in done] == ["completion"] * 2
        assert [each and each.id for each in (claimed[1], done[1])] == ["0-0", frame.id]
        assert [each.name for each in await output.rest()] == ["end"]
    assert engine.backend._events._open == set()


async def test_output_of_a_cancelled_execution_that_never_started_ends(
    serve: Serving, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.routes.events.TICK_S", 60.0)
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}/attempts/0/stream/events"
    async with serve() as http, follow(http, path) as source:
        await source.next()
        await engine.backend.executions.cancel_execution(execution_id)
        *changes, end = await source.rest()
    assert {event.data["public_state"] for event in changes} == {"cancelled"}
    assert [event.data["entry"]["type"] for event in changes] == ["completion"]
    assert end.data == {"closed_at": None, "closed_reason": None}


async def tailing(engine: Engine, count: int) -> bool:
    """Whether so many clients wait for frames."""
    clients = cast("bytes", await engine.backend.transport.call("CLIENT", "LIST"))
    return clients.count(b"cmd=xread") == count


async def test_viewers_of_one_stream_share_one_read(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    path = f"/v1/executions/{handle.execution_id}/attempts/0/stream/events"
    async with follow(http, path) as one, follow(http, path) as two, follow(http, path) as three:
        sources = (one, two, three)
        for source in sources:
            await source.next()
        await until(lambda: tailing(engine, 2), "one shared read of frames, one of the feed")
        # Viewers take none of the permits of reads and tails.
        assert engine.backend.stream_pool.held == 0
        await append(engine, handle, "all")
        await engine.backend.executions.complete(handle)
        for source in sources:
            *seen, end = await source.rest()
            # The frame and the change come from different reads, in either order.
            frame, state = sorted(seen, key=lambda each: each.name)
            assert frame.data["fields"]["payload"] == "all"
            assert state.data["public_state"] == "completed"
            assert end.name == "end"
    await until(lambda: tailing(engine, 0), "no read without viewers")


async def test_a_flow_is_followed_with_its_members(http: Http, engine: Engine) -> None:
    made = await http.post(
        "/v1/flows/submit",
        {
            "flow_kind": "etl",
            "namespace": "default",
            "nodes": [{"key": "a", "execution_kind": "job"}],
        },
    )
    flow_id, nodes = made.json["Submitted"]["flow_id"], made.json["Submitted"]["nodes"]
    async with follow(http, f"/v1/flows/{flow_id}/events") as source:
        first = await source.next()
        assert first is not None
        assert (first.name, first.data["derived_state"]) == ("state", "open")
        await engine.backend.executions.cancel_execution(ExecutionId(nodes["a"]))
        member, finished, end = await source.rest()
        assert (member.name, member.data["public_state"]) == ("member", "cancelled")
        assert (finished.name, finished.data["entry"]["type"]) == ("state", "flow_finished")
        assert (end.name, end.data) == (
            "end",
            {"flow_id": flow_id, "public_flow_state": "open", "derived_state": "failed"},
        )
    assert TestFlow.tag_of(engine, flow_id) == ExecutionId(nodes["a"]).tag


async def test_the_derived_state_of_a_flow_is_shown_when_members_change_it(
    serve: Serving, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.routes.events.TICK_S", 60.0)
    flow = await submitted(engine, "a")
    async with serve() as http, follow(http, f"/v1/flows/{flow.flow_id}/events") as source:
        await source.next()
        assert await flow.claim() == ["a"]
        member, state = await source.next(), await source.next()
        assert member is not None
        assert state is not None
        assert (member.name, member.data["public_state"]) == ("member", "active")
        assert (state.name, state.data["derived_state"]) == ("state", "running")
        assert (state.data["entry"], state.id) == (None, member.id)
        await flow.end("a")
        rest = await source.rest()
        assert [event.name for event in rest] == ["member", "state", "end"]
        assert rest[1].data["entry"]["type"] == "flow_finished"


async def test_everything_is_followed_and_filtered(http: Http, engine: Engine) -> None:
    other, ours = await engine.create(namespace="other"), await engine.create(namespace="acme")
    path = "/v1/events?namespace=acme&families=completion"
    async with follow(http, path) as source:
        await engine.backend.executions.cancel_execution(other)
        await engine.backend.executions.cancel_execution(ours)
        event = await source.next()
        assert event is not None
        assert (event.name, event.data["execution_id"]) == ("state", ours)
        assert event.data["event_id"].startswith(f"fp:{ours.partition}/")
    third = await engine.create(namespace="acme")
    await engine.backend.executions.cancel_execution(third)
    async with follow(http, path, last_event_id=event.id) as source:
        again = await source.next()
    assert again is not None
    assert again.data["execution_id"] == third


async def test_workers_that_come_and_go_are_events_too(http: Http, engine: Engine) -> None:
    workers = engine.backend.workers

    async def register(instance: str, namespace: str = "default") -> None:
        await workers.register_worker(
            worker_id="w", worker_instance_id=instance, lanes=["default"], namespace=namespace
        )

    await register("w-1")
    await register("w-2", "other")
    async with follow(http, "/v1/events?families=worker&namespace=default") as source:
        await workers.mark_worker_dead("w-2", "other")
        await workers.mark_worker_dead("w-1", reason="deploy")
        event = await source.next()
    assert event is not None
    assert event.name == "state"
    assert event.data == {
        "event_id": event.data["event_id"],
        "type": "worker_dead",
        "at": event.data["at"],
        "namespace": "default",
        "worker_id": "w",
        "worker_instance_id": "w-1",
        "reason": "deploy",
    }
    await register("w-3")
    async with follow(http, "/v1/events", last_event_id=event.id) as source:
        again = await source.next()
    assert again is not None
    assert (again.data["type"], again.data["worker_instance_id"]) == ("worker_registered", "w-3")


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        (f"/v1/executions/{UNKNOWN}/events", 404, "execution_not_found"),
        (f"/v1/executions/{UNKNOWN}/attempts/0/stream/events", 404, "execution_not_found"),
        ("/v1/flows/11111111-2222-4333-8444-555555555555/events", 404, "flow_not_found"),
        ("/v1/events?families=nope", 400, "invalid_input"),
        ("/v1/events?cursor=nope", 400, "invalid_cursor"),
        ("/v1/events?cursor=now", 400, "invalid_cursor"),
    ],
)
async def test_refused_before_the_stream_starts(
    http: Http, path: str, status: int, kind: str
) -> None:
    assert (await http.get(path)).kind == (status, kind)


async def test_bad_and_expired_positions(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}"
    for route, position in (("events", "x"), ("attempts/0/stream/events", "start")):
        answer = await http.get(f"{path}/{route}", last_event_id=position)
        assert answer.kind == (400, "invalid_cursor")
    async with follow(http, f"{path}/events") as source:
        first = await source.next()
    assert first is not None
    for _ in range(3):
        handle = (await engine.claim()).handle
        await engine.backend.executions.delay(handle, 1)
    await engine.trim_feed(execution_id)
    expired = await http.get(f"{path}/events", last_event_id=first.id)
    assert expired.kind == (410, "cursor_expired")


async def test_streams_have_a_pool_of_their_own(serve: Serving, engine: Engine) -> None:
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}/events"
    async with serve(max_event_streams=1) as http:
        async with follow(http, path) as source:
            await source.next()
            full = await http.get(path)
            assert full.kind == (429, "resource_exhausted")
            assert "event_streams" in full.json["error"]
        # Refused requests hold no permit, and the client that left gave its own back.
        for _ in range(3):
            assert (await http.get(f"/v1/executions/{UNKNOWN}/events")).status in (404, 429)

        async def free() -> bool:
            return (await http.get(f"/v1/executions/{UNKNOWN}/events")).status == 404

        await until(free, "a free permit")


async def test_head_ends_at_once_and_holds_nothing(serve: Serving, engine: Engine) -> None:
    flow = await submitted(engine, "a")
    execution_id = flow.nodes["a"]
    paths = (
        f"/v1/executions/{execution_id}/events",
        f"/v1/executions/{execution_id}/attempts/0/stream/events",
        f"/v1/flows/{flow.flow_id}/events",
        "/v1/events",
    )
    async with serve(max_event_streams=1) as http:
        reader, writer = await asyncio.open_connection(*http.address)
        for path in paths * 2:
            writer.write(f"HEAD {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
            async with asyncio.timeout(20):
                status, headers = await read_head(reader)
            assert (status, headers["content-type"]) == (200, "text/event-stream")
        writer.close()
        assert (await http.send("HEAD", f"/v1/executions/{UNKNOWN}/events")).status == 404
    assert engine.backend._events._open == set()


async def test_heartbeats(serve: Serving, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.server.sse.HEARTBEAT_S", 0.0)
    monkeypatch.setattr("flowfabric.server.routes.events.TICK_S", 0.01)
    execution_id = await engine.create()
    async with serve() as http, follow(http, f"/v1/executions/{execution_id}/events") as source:
        assert (await source.block() or b"").startswith(b"event: state")
        assert await source.block() == b": heartbeat"


async def test_streams_end_without_an_end_when_the_server_stops(
    serve: Serving, engine: Engine
) -> None:
    execution_id = await engine.create()
    async with serve() as http:
        opened = http.open("GET", f"/v1/executions/{execution_id}/events")
        reader, _, _ = await opened.__aenter__()
        source = Source(reader)
        await source.next()
    assert await source.rest() == []
    await opened.__aexit__(None, None, None)
