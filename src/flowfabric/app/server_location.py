"""Where the deployment is: an address, or the embedded Valkey of the project."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING

from flowfabric.app.secret_file import folder_secret
from flowfabric.core.errors import ConfigError
from flowfabric.engine.valkey.backend import ValkeyBackend, check_settings
from flowfabric.valkey.address import Address, from_env, from_url

if TYPE_CHECKING:
    from flowfabric.valkey.embedded import EmbeddedServer

log = logging.getLogger(__name__)


class ServerLocation:
    """Opens backends on one deployment. The embedded server starts with the first one."""

    def __init__(self, url: str | None = None) -> None:
        self._address = from_url(url) if url else from_env(os.environ)
        self._server: EmbeddedServer | None = None
        self._closings = 0
        self._lock = threading.Lock()

    @property
    def embedded(self) -> bool:
        """Whether FlowFabric starts its own server for this deployment."""
        return self._address is None

    @property
    def peer(self) -> str:
        """The deployment's name in messages, without any secret."""
        return "embedded Valkey" if self._address is None else self._address.peer

    async def address(self) -> Address:
        """The deployment's address; starts or joins the embedded server when there is no other."""
        if self._address is not None:
            return self._address
        if self._server is None:
            await asyncio.to_thread(self._acquire, self._closings)
        server = self._server
        if server is None:
            raise ConfigError("embedded", "the server was released")
        return server.address

    def _acquire(self, closings: int) -> None:
        """Start or join the embedded server.

        Runs in a thread, which cannot be cancelled: a hold that arrives after `close`, or second,
        is released.
        """
        # Needs fcntl, which some platforms lack; external servers work without it.
        from flowfabric.valkey.embedded import EmbeddedServer  # noqa: PLC0415

        server = EmbeddedServer.acquire()
        with self._lock:
            if self._server is None and self._closings == closings:
                self._server = server
                return
        server.release()

    async def open(self, *, name: str = "flowfabric") -> ValkeyBackend:
        """A backend in the running event loop."""
        if self.embedded:
            # Refuse wrong settings before starting a server.
            check_settings()
        address = await self.address()
        if self.embedded:
            return await ValkeyBackend.connect_and_prepare(
                address, name=name, revive=self._revive, mint_secret=self._mint_secret
            )
        return await ValkeyBackend.connect(address, name=name)

    def _mint_secret(self) -> str:
        """The secret of the data folder: an embedded server needs no configured one."""
        if self._server is None:
            raise ConfigError("embedded", "the server was released")
        return folder_secret(self._server.data_dir)

    def _revive(self) -> None:
        """Restart the embedded server if it has crashed."""
        if self._server is not None:
            try:
                self._server.ensure_running()
            except ConfigError as error:
                log.warning("embedded Valkey: %s", error, extra={"action": "revive_failed"})

    def close(self) -> None:
        """Release the embedded server; it ends with its last user."""
        with self._lock:
            server, self._server = self._server, None
            self._closings += 1
        if server is not None:
            server.release()
