"""A test's engine behind a real server: operations that clients have go over HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.backend import HttpBackend
from flowfabric.engine.http.operations import operations
from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess
from tests.support.engine import Engine

_BUILT_ON_OTHERS = {"flows": {"wait_flow"}, "streams": {"append_frame", "follow_stream"}}


class _Concern:
    """One noun: over HTTP what the server offers, next to the store what only tests need."""

    def __init__(self, noun: str, remote: object, local: object) -> None:
        self._offered = operations().get(noun, {}).keys() | _BUILT_ON_OTHERS.get(noun, set())
        self._remote = remote
        self._local = local

    def __getattr__(self, name: str) -> Any:
        return getattr(self._remote if name in self._offered else self._local, name)


class MixedBackend:
    """A backend whose operations go over HTTP where the server offers them."""

    def __init__(self, remote: HttpBackend, local: Any) -> None:
        self.remote = remote
        self._local = local

    def __getattr__(self, name: str) -> Any:
        local = getattr(self._local, name)
        if name == "events":
            return self.remote.events
        return _Concern(name, getattr(self.remote, name), local) if name in operations() else local


class HttpEngine(Engine):
    """Leaves out what the server keeps to recognise repeats: it belongs to no execution."""

    async def dump(self) -> dict[bytes, Any]:
        kept = (await super().dump()).items()
        return {name: value for name, value in kept if not name.startswith(b"ff:http:idem:")}


@asynccontextmanager
async def serving(engine: Engine, **settings: Any) -> AsyncGenerator[ServerProcess]:
    """A server over the engine of a test, without scanners: tests move the clock themselves."""
    given: dict[str, Any] = {"listen": ("127.0.0.1", 0), "shutdown_timeout_s": 5, **settings}
    server = ServerProcess(engine.backend, ServerConfig(**given))
    await server.listen()
    try:
        yield server
    finally:
        await server.stop_serving()


@asynccontextmanager
async def over_http(engine: Engine, **settings: Any) -> AsyncGenerator[Engine]:
    """The same engine, reached through a server."""
    async with serving(engine, **settings) as server:
        host, port = server.address
        address = ServerAddress(host=host, port=port)
        async with await HttpBackend.connect(address) as remote:
            yield HttpEngine(MixedBackend(remote, engine.backend))  # pyright: ignore[reportArgumentType] - it has every concern
