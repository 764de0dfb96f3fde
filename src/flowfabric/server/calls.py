"""What a handler gets: the request, decoded, and what the server works with."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from flowfabric.core.errors import EngineError, NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId, canonical_uuid, validate_lane, validate_worker_id
from flowfabric.engine import metrics
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.events.subscription import FeedEvents
from flowfabric.engine.http.feeds import ServedFeeds
from flowfabric.observability import Gauges
from flowfabric.scanners.supervisor import ScannerSupervisor
from flowfabric.scheduler.grant_desk import GrantDesk
from flowfabric.scheduler.grants import WorkerGrants
from flowfabric.server import bodies
from flowfabric.server.auth import ApiCaller, Tokens
from flowfabric.server.changes import ChangeHub
from flowfabric.server.config import ServerConfig
from flowfabric.server.dispatcher import EventDispatcher
from flowfabric.server.exchange import Request
from flowfabric.server.frames import FrameHub
from flowfabric.server.openapi import rendered
from flowfabric.server.problems import (
    Problem,
    bad_path_id,
    closing,
    exhausted,
    invalid,
    not_json,
)
from flowfabric.server.remote_claims import RemoteDesk
from flowfabric.server.routing import Route

B = TypeVar("B")
K = TypeVar("K")
Q = TypeVar("Q")
T = TypeVar("T")


class Pool:
    """Permits of one kind of call, taken without waiting."""

    def __init__(self, name: str, ceiling: int) -> None:
        self.name = name
        self.ceiling = ceiling
        self.held = 0
        self.closed = False

    def __enter__(self) -> None:
        if self.closed:
            raise closing(self.name)
        if self.held >= self.ceiling:
            raise exhausted(self.name, self.ceiling)
        self.held += 1

    def __exit__(self, *_: object) -> None:
        self.held -= 1


class RequestPool(Pool):
    """Permits of requests. If none is free, the request whose body arrives slowest is dropped."""

    def __init__(self, ceiling: int) -> None:
        super().__init__("requests", ceiling)
        self.arriving: dict[asyncio.Timeout, None] = {}
        """The time limits of bodies that have not arrived, oldest first."""

    def __enter__(self) -> None:
        if self.held >= self.ceiling and self.arriving:
            slowest = next(iter(self.arriving))
            del self.arriving[slowest]
            if not slowest.expired():
                slowest.reschedule(0)
            self.held += 1
        else:
            super().__enter__()


class Services:
    """What all handlers of one process share."""

    def __init__(
        self, backend: Backend, config: ServerConfig, scanners: ScannerSupervisor | None = None
    ) -> None:
        self.backend = backend
        self.config = config
        self.tokens = Tokens(config.api_token, config.tokens_file)
        self.scanners = scanners
        self.dispatcher: EventDispatcher | None = None
        """None while this process has none, as in tests of single requests."""
        self.grants = WorkerGrants(backend)
        self.grants.attach()
        meter = metrics.active()
        self.gauges = None if meter is None else Gauges(backend, meter)
        """What `/metrics` reads from the deployment; None while metrics are off."""
        self.changes = ChangeHub()
        self.event_streams = Pool("event_streams", config.max_event_streams)
        self.remote = RemoteDesk(backend)
        self.grant_desk = GrantDesk(backend, self.remote.desk, self.grants)
        self.remote_claims = Pool("remote_claims", config.max_remote_claims)
        self.rotations = Pool("admin_rotate", 1)
        self.stopping = asyncio.Event()
        """Set when the process begins to shut down."""
        self.background: set[asyncio.Task[Any]] = set()
        self.routes: tuple[Route, ...] = ()

    @cached_property
    def frames(self) -> FrameHub:
        """Shares reads between viewers of attempt output."""
        return FrameHub(self.backend.streams.viewers(self.config.max_event_streams))

    @cached_property
    def feeds(self) -> ServedFeeds:
        """Pages of the event feeds, for clients that read them over HTTP."""
        events = self.backend.events
        assert isinstance(events, FeedEvents)
        return ServedFeeds(events.source, self.backend.counts)

    @cached_property
    def description(self) -> tuple[bytes, bytes]:
        """The OpenAPI document and its page."""
        return rendered(self.routes)

    def run(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run work that outlives its request; shutdown waits for it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task


class Call(Generic[B, Q]):
    """One request to a route."""

    __slots__ = ("body", "caller", "query", "request", "route", "services", "values")

    def __init__(
        self, services: Services, route: Route, values: tuple[str, ...], request: Request
    ) -> None:
        self.services = services
        self.route = route
        self.values = values
        self.request = request
        self.caller: ApiCaller
        self.body = cast("B", None)
        self.query: Q

    @property
    def backend(self) -> Backend:
        return self.services.backend

    def decoded(self, kind: type[K]) -> "Call[K, Q]":
        """The same request with its raw body as JSON of a type."""
        if not bodies.is_json(self.request.headers.get(b"content-type")):
            raise not_json(415)
        call: Call[K, Q] = Call(self.services, self.route, self.values, self.request)
        call.caller, call.query = self.caller, self.query
        call.body = bodies.decode(cast("bytes", self.body), kind)
        return call

    def value(self, name: str) -> str:
        """A parameter of the path, as it was sent."""
        return self.values[self.route.names.index(name)]

    def execution_id(self, name: str = "id") -> ExecutionId:
        """The execution that the path names; the compact spelling is accepted, too."""
        try:
            found = ExecutionId.parse(self.value(name)).check_partition(self.backend.counts)
        except ValidationError as error:
            raise bad_path_id("execution_id", error.detail.partition(": ")[2]) from None
        return self._same("execution_id", found)

    def uuid(self, field: str, name: str = "id") -> str:
        """A UUID that the path names."""
        value = self.value(name)
        found = canonical_uuid(value)
        if found is None:
            raise bad_path_id(field, f"InvalidUuid: {value[:80]!r}")
        return self._same(field, found)

    def lane(self, name: str = "lane") -> str:
        """A lane that the path names."""
        return self._same("lane_id", _checked(validate_lane, self.value(name)))

    def worker(self, name: str) -> str:
        """A worker or instance that the path names."""
        field = "worker_id" if name == "worker_id" else "worker_instance_id"
        found = _checked(lambda value: validate_worker_id(value, field), self.value(name))
        return self._same(field, found)

    def attempt_index(self) -> int:
        """The attempt that the path names."""
        text = self.value("idx")
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**32):
            raise invalid("idx", f"must be a 32-bit whole number, got {text[:40]!r}")
        return int(text)

    def _same(self, field: str, of_path: T) -> T:
        """The id of the path, unless the body names another."""
        of_body = getattr(self.body, field, None)
        if of_body is not None and of_body != of_path:
            text = f"path {field} does not match body {field}"
            raise Problem("invalid_input", text, error=text)
        return of_path

    def check_namespace(self, namespace: str) -> None:
        """Refuse a caller that may not use this namespace."""
        if not self.caller.sees(namespace):
            raise Problem("forbidden", f"this token may not use namespace {namespace!r}")

    def require_all_namespaces(self) -> None:
        """Refuse a caller that is limited to namespaces, because the operation affects all."""
        if self.caller.namespaces is not None:
            raise Problem("forbidden", "this call needs a token that is not limited to namespaces")

    async def visible(self, execution_id: ExecutionId) -> ExecutionId:
        """The execution, or `execution_not_found` if the caller may not use its namespace."""
        if self.caller.namespaces is not None:
            found = await self.backend.reads.get_execution_namespace(execution_id)
            if found is None or not self.caller.sees(found):
                raise NotFoundError("execution_not_found", execution_id)
        return execution_id

    async def execution(self, name: str = "id") -> ExecutionId:
        """The execution of the path, if the caller may see it."""
        return await self.visible(self.execution_id(name))

    async def visible_flow(self, flow_id: str) -> str:
        """The flow, or `flow_not_found` if the caller may not use its namespace."""
        if self.caller.namespaces is not None:
            found = await self.backend.flows.describe_flow(flow_id, edge_groups=False)
            if found is None or not self.caller.sees(found.namespace):
                raise NotFoundError("flow_not_found", flow_id)
        return flow_id

    async def flow(self) -> str:
        """The flow of the path, if the caller may see it."""
        return await self.visible_flow(self.uuid("flow_id"))

    async def until(self, ready: Callable[[], Awaitable[T | None]], wait_ms: int) -> T | None:
        """Await `ready`, at most `wait_ms`; None after that, or when the client disconnects."""
        if not wait_ms:
            return None
        waiting = asyncio.ensure_future(ready())
        gone: asyncio.Future[Any] = asyncio.ensure_future(self.request.disconnected())
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self.services.stopping.wait())
        others = {gone, stopping}
        try:
            await asyncio.wait(
                {waiting, *others},
                timeout=wait_ms / 1000,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return waiting.result() if waiting.done() else None
        finally:
            pending: list[asyncio.Future[Any]] = [
                each for each in (waiting, *others) if not each.done()
            ]
            for each in pending:
                each.cancel()
            await asyncio.gather(*pending, return_exceptions=True)


def _checked(check: Callable[[str], str], value: str) -> str:
    try:
        return check(value)
    except EngineError as error:
        raise Problem("invalid_input", error.detail) from None
