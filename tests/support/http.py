"""A small HTTP client for tests: sends exactly the given bytes, and reads the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec

Address = tuple[str, int]


class Response(msgspec.Struct, frozen=True):
    """What the server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def kind(self) -> tuple[int, str]:
        """Status and kind of an error."""
        return self.status, self.json["kind"]


class Http:
    """One client of one server; a connection per request."""

    def __init__(self, address: Address, **headers: str) -> None:
        self.address = address
        self.headers = headers

    def with_token(self, token: str) -> Self:
        return type(self)(self.address, **{**self.headers, "authorization": f"Bearer {token}"})

    async def get(self, path: str, **headers: str) -> Response:
        return await self.send("GET", path, headers=headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> Response:
        return await self.send("POST", path, body, headers)

    async def put(self, path: str, body: Any = None, **headers: str) -> Response:
        return await self.send("PUT", path, body, headers)

    async def delete(self, path: str, **headers: str) -> Response:
        return await self.send("DELETE", path, headers=headers)

    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Send a request; a body that is not bytes is sent as JSON."""
        async with self.open(method, path, body, headers) as (reader, status, found):
            content = b""
            if method != "HEAD" and status != 204:
                length = found.get("content-length")
                content = await (reader.readexactly(int(length)) if length else reader.read())
            return Response(status, found, content)

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, int, dict[str, str]]]:
        """Send a request and read the head of the answer."""
        lines = {"host": "test", "connection": "close"} | self.headers
        content = b""
        if body is not None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            if not isinstance(body, bytes):
                lines["content-type"] = "application/json"
            lines["content-length"] = str(len(content))
        lines |= {name.replace("_", "-"): value for name, value in (headers or {}).items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        async with asyncio.timeout(40):
            reader, writer = await asyncio.open_connection(*self.address)
            try:
                writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
                status, found = await read_head(reader)
                yield reader, status, found
            finally:
                writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status and the headers of an answer."""
    raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *rest = raw.strip().split("\r\n")
    pairs = (line.split(": ", 1) for line in rest)
    return int(first.split()[1]), {name.lower(): value for name, value in pairs}
