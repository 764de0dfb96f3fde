"""Server-sent events: executions, attempt output, flows, and everything (10 §11.3)."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, get_args

import msgspec

from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.contracts.flows import FlowSnapshot
from flowfabric.core.contracts.streams import StreamFrames
from flowfabric.core.errors import EngineError, NotFoundError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import flow_partition
from flowfabric.engine.api.events import Event, EventFilter, Family, Start, Subscription
from flowfabric.server.calls import Call
from flowfabric.server.changes import Changes, Found, Opens
from flowfabric.server.entries import entry_of
from flowfabric.server.exchange import EventStream
from flowfabric.server.problems import Problem, invalid
from flowfabric.server.routes.execution_reads import TERMINAL
from flowfabric.server.routes.streams import frame_of, parse_cursor
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import EVENTS
from flowfabric.server.sse import DRAIN_S, TICK_S, Viewer, drained, given_position, sent, stream

routes = Routes()
_FAMILIES: tuple[Family, ...] = get_args(Family)
_MOVES: tuple[Family, ...] = ("completion", "lease", "operator")
"""The families that carry changes of an execution's state."""
Events = Callable[[Viewer], AsyncGenerator[bytes]]


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Where to continue, if the header `Last-Event-ID` is not sent."""

    cursor: str = ""


async def _opened(
    call: Call[Any, Any], prepare: Callable[[AsyncExitStack], Awaitable[Events]]
) -> EventStream:
    """Take a permit, check everything that can be refused, and start the stream."""
    async with AsyncExitStack() as held:
        held.enter_context(call.services.event_streams)
        events = await prepare(held)
        return stream(call, events, held.pop_all().aclose)


def _opens(
    call: Call[Any, Any], partition: int | None, where: EventFilter, families: Sequence[Family]
) -> Opens:
    async def opens(cursor: Start) -> Subscription[Event]:
        partitions = None if partition is None else [partition]
        return await call.backend.events.subscribe(
            families, cursor, where=where, partitions=partitions
        )

    return opens


async def _followed(held: AsyncExitStack, opens: Opens, cursor: str) -> Changes:
    changes = Changes(opens)
    held.push_async_callback(changes.aclose)
    await changes.start(cursor)
    return changes


@routes.get(
    "/v1/executions/{id}/events",
    scope="read",
    counted=False,
    answers={200: EVENTS},
    errors=(404, 410, 503),
)
async def execution_events(call: Call[None, EventsQuery]) -> EventStream:
    """Follow the changes of an execution until it has ended."""
    execution_id = call.execution_id()

    async def prepare(held: AsyncExitStack) -> Events:
        await call.visible(execution_id)
        where = EventFilter(execution_id=execution_id)
        opens = _opens(call, execution_id.partition, where, (*_MOVES, "signal"))
        cursor = given_position(call, call.query.cursor)
        await call.backend.reads.read_execution_state(execution_id)
        changes = await _followed(held, opens, cursor)
        follower = _ExecutionFollower(call, execution_id, changes)
        return lambda viewer: follower.events(viewer, resumed=bool(cursor))

    return await _opened(call, prepare)


class _ExecutionFollower:
    def __init__(self, call: Call[Any, Any], execution_id: ExecutionId, changes: Changes) -> None:
        self._call = call
        self._id = execution_id
        self._changes = changes
        self._state = ""
        self._progress: tuple[Any, Any] = (None, None)

    async def events(self, viewer: Viewer, *, resumed: bool) -> AsyncGenerator[bytes]:
        changes = self._changes
        info = await self._read()
        self._progress = (info.progress_pct, info.progress_message)
        yield await self._moved(info)
        if self._state in TERMINAL:
            if resumed:
                async for event in drained(changes):
                    yield self._entry(event, info)
            yield self._end()
            return
        while not viewer.is_over:
            event = await changes.next(TICK_S, *viewer.ends)
            if isinstance(event, EngineError):
                raise event
            info = await self._read()
            if event is not None:
                yield self._entry(event, info)
            # A signal may have resumed it, which has no entry; an end has one.
            if info.public_state != self._state and (
                event is None or info.public_state not in TERMINAL
            ):
                yield await self._moved(info)
            if (progress := (info.progress_pct, info.progress_message)) != self._progress:
                self._progress = progress
                yield await self._progressed(info)
            if info.public_state in TERMINAL and (event is None or event.type == "completion"):
                yield self._end()
                return
            yield viewer.heartbeat()

    async def _read(self) -> ExecutionInfo:
        return await self._call.backend.reads.read_execution_info(self._id)

    async def _moved(self, info: ExecutionInfo) -> bytes:
        """The current state; the feed does not say what changed it."""
        self._state = info.public_state.value
        at = await self._call.backend.meta.server_time_ms()
        return sent("state", self._data(at, None), self._changes.position)

    def _entry(self, event: Event, info: ExecutionInfo) -> bytes:
        if event.type == "signal":
            return sent("signal", entry_of(event), self._changes.position)
        self._state = info.public_state.value
        return sent("state", self._data(event.at, entry_of(event)), self._changes.position)

    def _data(self, at: int, entry: dict[str, Any] | None) -> dict[str, Any]:
        return {"execution_id": self._id, "public_state": self._state, "at": at, "entry": entry}

    async def _progressed(self, info: ExecutionInfo) -> bytes:
        data = {
            "execution_id": self._id,
            "progress_pct": info.progress_pct,
            "progress_message": info.progress_message,
            "at": await self._call.backend.meta.server_time_ms(),
        }
        return sent("progress", data, self._changes.position)

    def _end(self) -> bytes:
        data = {"execution_id": self._id, "public_state": self._state}
        return sent("end", data, self._changes.position)


@routes.get(
    "/v1/executions/{id}/attempts/{idx}/stream/events",
    scope="read",
    counted=False,
    answers={200: EVENTS},
    errors=(404, 503),
)
async def stream_events(call: Call[None, EventsQuery]) -> EventStream:
    """Follow the output of an attempt until it is complete."""
    execution_id, attempt = call.execution_id(), call.attempt_index()

    async def prepare(held: AsyncExitStack) -> Events:
        await call.visible(execution_id)
        given = given_position(call, call.query.cursor) or "0-0"
        try:
            position = parse_cursor("cursor", given)
            after = position.after() if position.is_concrete else None
        except Problem:
            after = None
        if after is None:
            raise Problem("invalid_cursor", "must be the id of a frame")
        await call.backend.reads.read_execution_state(execution_id)
        where = EventFilter(execution_id=execution_id)
        opens = _opens(call, execution_id.partition, where, _MOVES)
        changes = await held.enter_async_context(call.services.changes.follow(execution_id, opens))
        follower = _FrameFollower(call, execution_id, attempt, after)
        return lambda viewer: follower.events(viewer, changes)

    return await _opened(call, prepare)


class _FrameFollower:
    def __init__(
        self, call: Call[Any, Any], execution_id: ExecutionId, attempt: int, after: str
    ) -> None:
        self._call = call
        self._id = execution_id
        self._attempt = attempt
        self._after = after
        self._state = ""

    async def events(self, viewer: Viewer, changes: Found) -> AsyncGenerator[bytes]:
        yield await self._moved(await self._read_state())
        reading = asyncio.ensure_future(self._read())
        changing = asyncio.ensure_future(changes.get())
        try:
            while not viewer.is_over:
                await asyncio.wait(
                    {reading, changing, *viewer.ends},
                    timeout=TICK_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                has_output = False
                if reading.done():
                    page = reading.result()
                    for frame in page.frames:
                        yield sent("frame", frame_of(frame), frame.id)
                    if page.closed_at is not None and page.next_cursor == self._after:
                        async for each in self._last_moves(changing, changes):
                            yield each
                        yield self._end(page.closed_at, page.closed_reason)
                        return
                    self._after = page.next_cursor
                    has_output = bool(page.frames) or page.closed_at is not None
                    reading = asyncio.ensure_future(self._read())
                if changing.done():
                    yield await self._moved(await self._read_state(), changing.result())
                    changing = asyncio.ensure_future(changes.get())
                elif not has_output and (state := await self._read_state()) != self._state:
                    yield await self._moved(state)
                if not has_output and self._state in TERMINAL and await self._never_started():
                    yield self._end(None, None)
                    return
                yield viewer.heartbeat()
        finally:
            reading.cancel()
            changing.cancel()
            await asyncio.gather(reading, changing, return_exceptions=True)

    async def _last_moves(
        self, changing: asyncio.Future[Event | EngineError], changes: Found
    ) -> AsyncGenerator[bytes]:
        """What closed the stream; it may arrive after the last frame."""
        state = await self._read_state()
        if state != self._state:
            await asyncio.wait({changing}, timeout=DRAIN_S)
        if changing.done():
            yield await self._moved(state, changing.result())
        while not changes.empty():
            yield await self._moved(state, changes.get_nowait())
        if state != self._state:
            yield await self._moved(state)

    async def _read(self) -> StreamFrames:
        return await self._call.services.frames.tail(self._id, self._attempt, self._after)

    async def _never_started(self) -> bool:
        page = await self._call.backend.streams.tail_stream(
            self._id, self._attempt, after=self._after, count_limit=1
        )
        return not page.frames and page.closed_at is None

    async def _read_state(self) -> str:
        return (await self._call.backend.reads.read_execution_state(self._id)).value

    async def _moved(self, state: str, event: Event | EngineError | None = None) -> bytes:
        if isinstance(event, EngineError):
            raise event
        self._state = state
        at = await self._call.backend.meta.server_time_ms() if event is None else event.at
        entry = None if event is None else entry_of(event)
        data = {"execution_id": self._id, "public_state": state, "at": at, "entry": entry}
        return sent("state", data, self._after)

    def _end(self, closed_at: int | None, reason: str | None) -> bytes:
        return sent("end", {"closed_at": closed_at, "closed_reason": reason}, self._after)


@routes.get(
    "/v1/flows/{id}/events",
    scope="read",
    counted=False,
    answers={200: EVENTS},
    errors=(404, 410, 503),
)
async def flow_events(call: Call[None, EventsQuery]) -> EventStream:
    """Follow the changes of a flow and its members until it has finished."""
    flow_id = call.uuid("flow_id")

    async def prepare(held: AsyncExitStack) -> Events:
        follower = _FlowFollower(call, flow_id)
        await follower.read()
        await call.visible_flow(flow_id)
        cursor = given_position(call, call.query.cursor)
        partition = flow_partition(flow_id, call.backend.counts)
        opens = _opens(call, partition, EventFilter(flow_id=flow_id), _FAMILIES)
        changes = await _followed(held, opens, cursor)
        return lambda viewer: follower.events(viewer, changes, resumed=bool(cursor))

    return await _opened(call, prepare)


class _FlowFollower:
    def __init__(self, call: Call[Any, Any], flow_id: str) -> None:
        self._call = call
        self._flow_id = flow_id
        self._shown: dict[str, Any] = {}

    async def read(self) -> FlowSnapshot:
        found = await self._call.backend.flows.describe_flow(self._flow_id, edge_groups=False)
        if found is None:
            raise NotFoundError("flow_not_found", self._flow_id)
        return found

    async def events(
        self, viewer: Viewer, changes: Changes, *, resumed: bool
    ) -> AsyncGenerator[bytes]:
        flow = await self.read()
        at = await self._call.backend.meta.server_time_ms()
        yield sent("state", self._state(flow, at, None), changes.position)
        if _is_finished(flow):
            if resumed:
                async for event in drained(changes):
                    yield await self._event(event, flow, changes.position)
            yield sent("end", _flow_names(flow), changes.position)
            return
        while not viewer.is_over:
            event = await changes.next(TICK_S, *viewer.ends)
            if isinstance(event, EngineError):
                raise event
            flow = await self.read()
            if event is not None:
                yield await self._event(event, flow, changes.position)
            # Changes of the derived state have no entry in the feed, except for the finish.
            if self._shown != _flow_names(flow) and (event is None or not _is_finished(flow)):
                at = await self._call.backend.meta.server_time_ms()
                yield sent("state", self._state(flow, at, None), changes.position)
            if _is_finished(flow) and (event is None or event.type == "flow_finished"):
                yield sent("end", _flow_names(flow), changes.position)
                return
            yield viewer.heartbeat()

    async def _event(self, event: Event, flow: FlowSnapshot, position: str) -> bytes:
        entry = entry_of(event)
        if event.type == "signal":
            return sent("signal", entry, position)
        if event.execution_id is None:
            return sent("state", self._state(flow, event.at, entry), position)
        try:
            member = ExecutionId.trusted(event.execution_id)
            state = await self._call.backend.reads.read_execution_state(member)
        except NotFoundError:
            state = None
        data = {"execution_id": event.execution_id, "public_state": state, "at": event.at}
        return sent("member", data | {"entry": entry}, position)

    def _state(self, flow: FlowSnapshot, at: int, entry: dict[str, Any] | None) -> dict[str, Any]:
        self._shown = _flow_names(flow)
        return self._shown | {"at": at, "entry": entry}


def _is_finished(flow: FlowSnapshot) -> bool:
    return flow.derived_state in ("completed", "failed")


def _flow_names(flow: FlowSnapshot) -> dict[str, Any]:
    return {
        "flow_id": flow.flow_id,
        "public_flow_state": flow.public_flow_state,
        "derived_state": flow.derived_state,
    }


class AllEventsQuery(EventsQuery, frozen=True, kw_only=True):
    """Which events to follow."""

    namespace: str | None = None
    families: str = ""


@routes.get("/v1/events", scope="read", counted=False, answers={200: EVENTS}, errors=(410, 503))
async def all_events(call: Call[None, AllEventsQuery]) -> EventStream:
    """Follow the events of all executions and flows, from now on or from a cursor."""
    query = call.query
    names = [name for part in query.families.split(",") if (name := part.strip())]
    if unknown := sorted(set(names) - set(_FAMILIES)):
        raise invalid("families", f"{unknown[0]!r} is not one of {', '.join(_FAMILIES)}")
    if query.namespace is not None:
        call.check_namespace(query.namespace)
    families: list[Any] = names or list(_FAMILIES)
    opens = _opens(call, None, EventFilter(namespace=query.namespace), families)

    async def prepare(held: AsyncExitStack) -> Events:
        changes = await _followed(held, opens, given_position(call, query.cursor))
        return lambda viewer: _all(viewer, changes, call)

    return await _opened(call, prepare)


async def _all(
    viewer: Viewer, changes: Changes, call: Call[None, AllEventsQuery]
) -> AsyncGenerator[bytes]:
    while not viewer.is_over:
        event = await changes.next(TICK_S, *viewer.ends)
        if isinstance(event, EngineError):
            raise event
        if event is not None and call.caller.sees(event.namespace):
            name = "signal" if event.type == "signal" else "state"
            yield sent(name, entry_of(event), changes.position)
        yield viewer.heartbeat()
