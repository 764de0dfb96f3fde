"""Where the deployment is: an address, or the embedded Valkey of the project."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from flowfabric.app.secret_file import folder_secret
from flowfabric.core.errors import ConfigError
from flowfabric.engine.backend import Backend
from flowfabric.valkey.address import Address, from_env, parse_url

if TYPE_CHECKING:
    from flowfabric.valkey.embedded import EmbeddedServer

__all__ = ["Place"]

log = logging.getLogger(__name__)


class Place:
    """Opens backends on one deployment. The embedded server starts with the first one."""

    def __init__(self, url: str | None = None) -> None:
        self._address = parse_url(url, name="url") if url else from_env(os.environ)
        self._server: EmbeddedServer | None = None

    @property
    def embedded(self) -> bool:
        """Whether the package brings its own server for this deployment."""
        return self._address is None

    async def address(self) -> Address:
        """The deployment's address; starts or joins the embedded server when there is no other."""
        if self._address is not None:
            return self._address
        if self._server is None:
            # Needs fcntl, which not every platform has; external servers do without.
            from flowfabric.valkey.embedded import EmbeddedServer  # noqa: PLC0415

            self._server = await asyncio.to_thread(EmbeddedServer.acquire)
        return parse_url(self._server.url)

    async def open(self, *, name: str = "flowfabric") -> Backend:
        """A backend in the running event loop."""
        address = await self.address()
        if self.embedded:
            return await Backend.connect_and_prepare(
                address, name=name, revive=self._revive, mint_secret=self._mint_secret
            )
        return await Backend.connect(address, name=name)

    def _mint_secret(self) -> str:
        """Nobody configures a secret for an embedded server: its folder keeps one."""
        if self._server is None:
            raise ConfigError("embedded", "the server was released")
        return folder_secret(self._server.data_dir)

    def _revive(self) -> None:
        """The embedded server is ours to start again when it has crashed."""
        if self._server is not None:
            try:
                self._server.ensure_running()
            except ConfigError as error:
                log.warning("embedded Valkey: %s", error, extra={"action": "revive_failed"})

    def close(self) -> None:
        """Let the embedded server go; it ends with its last user."""
        if self._server is not None:
            self._server.release()
            self._server = None
