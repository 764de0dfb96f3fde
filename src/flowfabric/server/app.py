"""The ASGI application: authentication, limits and decoding, then the request's handler.

To add a route, write a handler in the file of its resource under `routes/`:

    @routes.post(
        "/v1/things/{id}/paint", scope="operate", answers={200: Painted}, errors=(404, 409)
    )
    async def paint(call: Call[PaintRequest, NoQuery]) -> Reply:
        \"\"\"Paint a thing.\"\"\"
        execution_id = await call.execution()
        return answer(variant(await call.backend.things.paint(execution_id, call.body.colour)))

`Call[Body, Query]` names two structs: the JSON body (None: ignored) and the query parameters. They
are decoded before the handler runs, and OpenAPI describes them. The handler raises engine errors
or a `Problem`; `errors` are the statuses that do not follow from the rest, and each has a row in
`tests/server/status_rows.py`. A new file is joined in `routes/table.py`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from flowfabric.core.errors import EngineError, FlowFabricError, NotFoundError
from flowfabric.engine.layers.audit import acting_as
from flowfabric.engine.layers.tracing import continued
from flowfabric.server import bodies, queries
from flowfabric.server.auth import ANYONE
from flowfabric.server.calls import Call, RequestPool, Services
from flowfabric.server.cors import Cors
from flowfabric.server.exchange import (
    ClientGone,
    EventStream,
    Headers,
    Receive,
    Request,
    Send,
    send_events,
    send_reply,
)
from flowfabric.server.idempotency import IdempotentReplies
from flowfabric.server.problems import Problem, invalid, not_json, problem_of, too_fast
from flowfabric.server.routing import Match, Route, RouteTable
from flowfabric.server.wire import Reply, encode

log = logging.getLogger(__name__)
access = logging.getLogger(f"{__name__}.access")
Observer = Callable[[str, str, int, float], None]
"""Called after each request: method, route template, status, seconds."""
_NOT_FOUND = Reply(404, b'{"error":"not found"}')
_NOT_ALLOWED = b'{"error":"method not allowed"}'
_UNAUTHORIZED = Reply(
    401,
    b'{"error":"missing or invalid Authorization header","code":"unauthorized"}',
    headers=(("WWW-Authenticate", "Bearer"),),
)
_UNKNOWN = "unknown"
_COLLECTIONS = {"quota_policy": "quotas"}


class ServerApp:
    """The ASGI application of one server process."""

    def __init__(self, services: Services, table: RouteTable) -> None:
        config = services.config
        self.services = services
        self.table = table
        services.routes = tuple(table.routes)
        self.tokens = services.tokens
        self.observers: list[Observer] = []
        self._without_cors = {
            route.template.encode() for route in table.routes if not route.cross_origin
        }
        self._cors = Cors(config.cors_origins, with_token=self.tokens.required)
        self._limits = {
            "large": config.limits.large,
            "medium": config.limits.medium,
            "control": config.limits.control,
            "bulk": config.limits.bulk,
        }
        self._requests = RequestPool(config.max_requests)
        self._repeats = IdempotentReplies(services.backend.notes)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        # Only a stopping listener cancels it, after closing the connection.
        with suppress(asyncio.CancelledError):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        request = Request(scope, receive)
        headers: Headers = [(b"x-request-id", request.request_id.encode())]
        if unquote_to_bytes(request.path) not in self._without_cors:
            asked = self._cors.preflight(request.method, request.headers)
            if asked is not None:
                await send_reply(send, Reply(200), [*headers, *asked])
                return
            headers += self._cors.headers(request.headers.get(b"origin"))
        template = _UNKNOWN
        try:
            match = self.table.find(request.path)
            route = None if match is None else match.methods.get(request.method)
            if route is not None:
                template = route.template
            answer = await self._answer(request, match, route)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - every failure becomes an answer
            answer = self._failure(error, request, template)
        if isinstance(answer, EventStream):
            status = 200
            await send_events(send, answer, headers, only_head=scope["method"] == "HEAD")
        else:
            status = answer.status
            await send_reply(send, answer, headers)
        # The method as sent, because a HEAD request is served like a GET.
        seconds, method = time.perf_counter() - started, scope["method"]
        for observe in self.observers:
            observe(method, template, status, seconds)
        if access.isEnabledFor(logging.DEBUG):
            extra = {"action": "http_request", "status": status, "request_id": request.request_id}
            access.debug("%s %s %d %.1f ms", method, template, status, seconds * 1000, extra=extra)

    async def _answer(
        self, request: Request, match: Match | None, route: Route | None
    ) -> Reply | EventStream:
        caller = ANYONE
        if route is None or route.scope is not None:
            found = self.tokens.identify(request.headers.get(b"authorization"))
            if found is None:
                return _UNAUTHORIZED
            caller = found
            if caller.limit is not None and (wait_s := caller.limit.take()):
                raise too_fast(caller.token_id, caller.limit.rate_per_s, wait_s)
        if match is None:
            return _NOT_FOUND
        if not match.is_text:
            raise invalid("path", "is not UTF-8")
        if route is None:
            return Reply(405, _NOT_ALLOWED, headers=(("Allow", match.allowed),))
        if route.scope is not None and not caller.may(route.scope):
            raise Problem("forbidden", f"this token does not have the scope {route.scope!r}")
        call: Call[Any, Any] = Call(self.services, route, match.values, request)
        call.caller = caller
        if not route.counted:
            return await self._handle(call)
        with self._requests:
            return await self._handle(call)

    async def _handle(self, call: Call[Any, Any]) -> Reply | EventStream:
        route, request = call.route, call.request
        body = b""
        if route.method in ("POST", "PUT"):
            arriving = self._requests.arriving if route.counted else {}
            sent = await request.read(self._limits[route.limit], route.template, arriving)
            body = b"" if route.body is None else sent
            key = request.headers.get(b"idempotency-key")
            # On the open callback route, the key identifies the signal. Answers to reads are not
            # stored: callers who may not write could fill the store.
            if key is not None and route.scope not in (None, "read"):
                return await self._repeats.run(key, call, body, self._run)
        return await self._run(call, body)

    async def _run(self, call: Call[Any, Any], body: bytes) -> Reply | EventStream:
        route, request = call.route, call.request
        if route.body is bytes:
            call.body = body
        elif route.body is not None:
            call.body = decode_body(request, body, route)
        call.query = queries.read(request.query, route.query)
        with acting_as(call.caller.token_id), continued(request.headers.get(b"traceparent")):
            return await route.handler(call)

    def _failure(self, error: Exception, request: Request, template: str) -> Reply:
        return failure(error, request.request_id, template, subject=_subject(request, error))


def decode_body(request: Request, body: bytes, route: Route) -> Any:
    """The JSON body of a request as the type that its route declares."""
    if not body and route.optional_body:
        return route.body()
    if not bodies.is_json(request.headers.get(b"content-type")):
        raise not_json(415)
    return bodies.decode(body, route.body)


def _subject(request: Request, error: Exception) -> str:
    """The id, from the path, of what was not found; empty if the path has none."""
    if not isinstance(error, NotFoundError):
        return ""
    noun = error.code.removesuffix("_not_found")
    name = _COLLECTIONS.get(noun, f"{noun}s")
    parts = cast("str", request.scope["path"]).split("/")
    if name not in parts[:-1] or parts[2] == "engine":
        return ""
    return parts[parts.index(name) + 1]


def failure(error: Exception, request_id: str, template: str, subject: str = "") -> Reply:
    """The answer to a request whose handler raised this error."""
    if isinstance(error, EngineError):
        error = problem_of(error, subject)
    elif not isinstance(error, Problem):
        fault = error if not isinstance(error, FlowFabricError) else None
        extra = {"action": "request_failed", "request_id": request_id, "path": template}
        log.error("%s failed: %s", template, error, exc_info=fault, extra=extra)
        error = Problem("invariant_violation", "see the server's log for the cause")
    if error.status >= 500 and error.is_fault:
        extra = {"action": "backend_fault", "kind": error.kind, "context": template}
        extra |= {"request_id": request_id, "detail": error.detail}
        log.error("%s: %s", template, error.error, extra=extra)
    elif error.rejects_body and log.isEnabledFor(logging.DEBUG):
        extra = {"action": "body_rejected", "kind": error.kind, "detail": error.detail}
        extra |= {"context": template, "request_id": request_id}
        log.debug("%s: %s", template, error.error, extra=extra)
    return Reply(
        error.status,
        encode(error.body(request_id)),
        headers=tuple(error.headers.items()),
    )
