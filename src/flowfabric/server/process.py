"""A server process: boot, serving, and shutdown in their fixed orders (09 §1, §5)."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Self

from flowfabric import observability
from flowfabric.core.errors import EngineError
from flowfabric.core.text import host_port
from flowfabric.engine import metrics
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.connect import ServerLocation
from flowfabric.scanners.supervisor import ScannerSupervisor
from flowfabric.server.app import ServerApp
from flowfabric.server.calls import Services
from flowfabric.server.config import ServerConfig
from flowfabric.server.dispatcher import EventDispatcher
from flowfabric.server.listener import Listener, bind
from flowfabric.server.routes.metrics import RequestMeter
from flowfabric.server.routes.table import all_routes
from flowfabric.server.routing import RouteTable

log = logging.getLogger(__name__)
_STEP_S = 15.0
"""The most that one step of shutdown may take."""


class ServerProcess:
    """One running server.

    >>> server = await ServerProcess.start(ServerConfig(), ServerLocation())  # doctest: +SKIP
    >>> await server.stop()  # doctest: +SKIP
    """

    def __init__(self, backend: Backend, config: ServerConfig) -> None:
        self.backend = backend
        self.config = config
        self.scanners = ScannerSupervisor(backend, config.scanners)
        self.services = Services(backend, config, self.scanners)
        self.dispatcher = EventDispatcher(backend, config.scanners)
        self.app = ServerApp(
            self.services, RouteTable(all_routes(metrics_auth=config.metrics_auth))
        )
        self._meter = metrics.active()
        if self._meter is not None:
            self.app.observers.append(RequestMeter(self._meter))
        self.address: tuple[str, int] = config.listen
        """Where it listens; the port is the real one if 0 was asked for."""
        self._listener: Listener | None = None

    @classmethod
    async def start(
        cls, config: ServerConfig, location: ServerLocation, *, warn: bool = True, http: bool = True
    ) -> Self:
        """Boot in the order of 09 §1. If a step fails, stops the earlier ones and raises the error.

        `warn` logs what is open to everyone; `flowfabric dev` shows that itself. Without `http`,
        only the scanners and the event dispatcher run (09 §11.10).
        """
        location.check_server(has_secret=config.has_hmac_secret)
        observability.enable()
        backend = await location.open_server()
        try:
            server = cls(backend, config)
            server.scanners.start()
            server.services.dispatcher = server.dispatcher
            server.dispatcher.start()
            try:
                if http:
                    if warn:
                        server.warn()
                    await server.listen()
            except BaseException:
                await server.dispatcher.stop()
                await server.scanners.stop()
                raise
        except BaseException:
            await backend.aclose()
            raise
        return server

    @property
    def serves_http(self) -> bool:
        """Whether it serves HTTP."""
        return self._listener is not None

    def warn(self) -> None:
        """Log what is open to everyone."""
        if self.app.tokens.required:
            return
        listen_addr = host_port(*self.config.listen)
        extra = {"action": "no_api_token", "listen_addr": listen_addr}
        for text in (
            "no API token: anyone who can reach %s can call /v1/admin/* and rotate the secret",
            "no API token: anyone who can reach %s can read waitpoint tokens and results",
        ):
            log.warning(text, listen_addr, extra=extra)

    async def listen(self) -> None:
        """Bind the port and serve."""
        bound = bind(*self.config.listen)
        self.address = bound.getsockname()[:2]
        self._listener = Listener(self.app, bound)
        await self._listener.start()
        where = host_port(*self.address)
        extra = {"action": "http_listening", "listen_addr": where}
        log.info("HTTP API listening on %s", where, extra=extra)

    async def stop(self) -> None:
        """Shut down in the order of 09 §5."""
        ends_at = time.monotonic() + self.config.shutdown_timeout_s
        await self.stop_serving(ends_at)
        await self.dispatcher.stop()
        await self.scanners.stop(_left(ends_at))
        await self.backend.aclose()
        log.info("server stopped", extra={"action": "server_stopped"})

    async def stop_serving(self, ends_at: float | None = None) -> None:
        """End streams and requests, but keep the scanners and the backend."""
        if ends_at is None:
            ends_at = time.monotonic() + self.config.shutdown_timeout_s
        services = self.services
        services.stopping.set()
        services.event_streams.closed = services.remote_claims.closed = True
        await services.remote.aclose()
        try:
            await self.backend.meta.shutdown_prepare(_left(ends_at))
        except EngineError as error:
            self._late("stream calls", error)
        await self._until(lambda: services.event_streams.held == 0, ends_at, "event streams")
        await services.frames.aclose()
        if self._listener is not None and not await self._listener.stop(_left(ends_at)):
            self._late("requests")
        services.feeds.close()
        await self._until(lambda: not services.background, ends_at, "background tasks")
        for task in list(services.background):
            task.cancel()
        await asyncio.gather(*services.background, return_exceptions=True)

    async def _until(self, done: Callable[[], bool], ends_at: float, what: str) -> None:
        try:
            async with asyncio.timeout(_left(ends_at)):
                while not done():  # noqa: ASYNC110 - a few steps, once per process
                    await asyncio.sleep(0.025)
        except TimeoutError:
            self._late(what)

    def _late(self, what: str, error: Exception | None = None) -> None:
        # The backend counts what its own step runs out of.
        if self._meter is not None and error is None:
            self._meter.count("ff_shutdown_timeout_total")
        extra = {"action": "shutdown_timeout", "what": what}
        if error is not None:
            extra["error"] = str(error)
        log.warning("shutdown timed out while waiting for %s", what, extra=extra)


def _left(ends_at: float) -> float:
    """How long the next step of shutdown may take."""
    return max(0.0, min(_STEP_S, ends_at - time.monotonic()))
