"""One HTTP exchange over ASGI: reading the request, and sending the answer."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import quote

import msgspec

from flowfabric.core.ids import new_uuid
from flowfabric.server.problems import made_room, not_json, too_large
from flowfabric.server.wire import Reply

log = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
BODY_TIMEOUT_S = 30.0
"""How long a client may take to send a body."""
SEND_TIMEOUT_S = 30.0
"""How long a client may leave an event unread before its stream ends."""
_NO_CONTENT = 204
_PRINTABLE = "".join(map(chr, range(32, 127)))
_is_header_value = re.compile(r"[ -~]*").fullmatch
_is_request_id = re.compile(rb"[!-~]{1,128}").fullmatch


class ClientGone(Exception):
    """The client closed the connection."""


class EventStream(msgspec.Struct, frozen=True):
    """An answer of server-sent events."""

    events: AsyncGenerator[bytes]
    release: Callable[[], Awaitable[None]]
    """Called once when the stream has ended, or if it never began."""


class Request:
    """A request as it arrives."""

    __slots__ = ("_receive", "headers", "method", "path", "query", "request_id", "scope")

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive) -> None:
        self.scope = scope
        self._receive = receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        method: str = scope["method"]
        self.method = "GET" if method == "HEAD" else method
        self.path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        given = self.headers.get(b"x-request-id")
        known = given is not None and _is_request_id(given) is not None
        self.request_id = given.decode() if known and given is not None else new_uuid()

    def header(self, name: bytes) -> str | None:
        """A header as text."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def read(
        self, limit: int, route: str, arriving: MutableMapping[asyncio.Timeout, None]
    ) -> bytes:
        """The body; raises an error if it exceeds the limit or arrives too slowly.

        While it arrives, its time limit is in `arriving`; removing it there ends it early.
        """
        self.check_length(limit, route)
        parts: list[bytes] = []
        size = 0
        patience = asyncio.timeout(BODY_TIMEOUT_S)
        try:
            async with patience:
                arriving[patience] = None
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise too_large(limit, route)
                    parts.append(part)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            if patience not in arriving:
                raise made_room() from None
            raise not_json(400, f"body: did not arrive within {BODY_TIMEOUT_S:g} s") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check_length(self, limit: int, route: str) -> None:
        """Refuse a declared length over the limit before anything is read."""
        declared = self.headers.get(b"content-length")
        if declared is not None and declared.isdigit() and int(declared[:20]) > limit:
            raise too_large(limit, route)

    async def disconnected(self) -> None:
        """Return when the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _header_value(text: str) -> bytes:
    """The text as a header value; everything but printable ASCII is percent-encoded."""
    return text.encode() if _is_header_value(text) else quote(text, safe=_PRINTABLE).encode()


async def send_reply(send: Send, reply: Reply, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Send a complete answer."""
    found: Headers = [
        *headers,
        *((name.encode(), _header_value(value)) for name, value in reply.headers),
    ]
    # Without content there is no Content-Length (RFC 9110 §8.6).
    if reply.status != _NO_CONTENT:
        found.append((b"content-length", b"%d" % len(reply.body)))
        found.append((b"content-type", reply.content_type.encode()))
    await send({"type": "http.response.start", "status": reply.status, "headers": found})
    await send({"type": "http.response.body", "body": reply.body})


async def send_events(
    send: Send,
    stream: EventStream,
    headers: Iterable[tuple[bytes, bytes]],
    *,
    only_head: bool = False,
) -> None:
    """Send events until they end; disconnects a client that does not read them."""
    start: Headers = [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-store"),
        # Otherwise proxies such as nginx buffer events.
        (b"x-accel-buffering", b"no"),
        *headers,
    ]
    try:
        await send({"type": "http.response.start", "status": 200, "headers": start})
        if not only_head:
            async for event in stream.events:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
    except TimeoutError:
        log.debug("closed an event stream that its client did not read for %g s", SEND_TIMEOUT_S)
        return
    finally:
        await stream.events.aclose()
        await stream.release()
    await send({"type": "http.response.body", "body": b""})
