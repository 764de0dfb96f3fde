"""Open a backend at any kind of address. The layers above use only this module.

`http://` and `https://` lead to a FlowFabric server, everything else to Valkey.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from flowfabric.core.errors import ConfigError
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.meta import Finding
from flowfabric.engine.api.secrets import SECRET_VARIABLE
from flowfabric.engine.http.address import is_server_url, server_at
from flowfabric.engine.http.address import parse_url as parse_server_url
from flowfabric.engine.valkey import connect as valkey
from flowfabric.engine.valkey.connect import (
    ValkeyLocation,
    check_backend,
    check_environment,
    configured_layout,
    data_folder,
    has_data,
    no_data,
    start_embedded,
    store_secret,
)

if TYPE_CHECKING:
    from flowfabric.engine.http.location import HttpLocation

__all__ = [
    "Place",
    "ServerLocation",
    "check_backend",
    "check_environment",
    "check_url",
    "configured_layout",
    "data_folder",
    "has_data",
    "no_data",
    "open_backend",
    "start_embedded",
    "store_secret",
]
Place: TypeAlias = valkey.Place
"""An address or its url."""


async def open_backend(
    place: Place, *, name: str = "flowfabric", prepare_with: PartitionCounts | None = None
) -> Backend:
    """A backend at an address or url; with `prepare_with`, sets up the deployment first."""
    if isinstance(place, str) and is_server_url(place):
        return await _server(place).open(name=name, prepare=prepare_with is not None)
    return await valkey.open_backend(place, name=name, prepare_with=prepare_with)


def check_url(url: str) -> None:
    """Raise `ConfigError` unless this is the url of a deployment or of a server."""
    if is_server_url(url):
        parse_server_url(url)
    else:
        valkey.check_url(url)


def _server(url: str, name: str = "url") -> "HttpLocation":
    # Imported here, because programs on Valkey do not need the HTTP client.
    from flowfabric.engine.http.location import HttpLocation  # noqa: PLC0415

    return HttpLocation(server_at(url, name=name))


def _located(url: str | None) -> "ValkeyLocation | HttpLocation":
    if url is not None and is_server_url(url):
        return _server(url)
    given = "" if url else os.environ.get("FF_URL", "")
    return _server(given, "FF_URL") if is_server_url(given) else ValkeyLocation(url)


class ServerLocation:
    """Opens backends at a url, or at the address of the environment."""

    def __init__(self, url: str | None = None) -> None:
        self._at = _located(url)

    @property
    def embedded(self) -> bool:
        """Whether FlowFabric starts its own Valkey for this deployment."""
        return self._at.embedded

    @property
    def remote(self) -> bool:
        """Whether a FlowFabric server is between this process and the store."""
        return not isinstance(self._at, ValkeyLocation)

    @property
    def peer(self) -> str:
        """The deployment's name in messages, without any secret."""
        return self._at.peer

    @contextmanager
    def redirected(self, place: Place) -> Generator[None]:
        """Open backends at another address until the block ends."""
        before, self._at = self._at, ValkeyLocation(place)
        try:
            yield
        finally:
            self._at = before

    async def open(self, *, name: str = "flowfabric", prepare: bool = False) -> Backend:
        """A backend in the running event loop; `prepare` sets up the deployment first."""
        return await self._at.open(name=name, prepare=prepare)

    async def open_server(self) -> Backend:
        """A backend for a server process, on Valkey only."""
        return await self._valkey().open_server()

    def check_server(self, *, has_secret: bool) -> None:
        """Raise `ConfigError` if a server process cannot use this address."""
        if not (self._valkey().embedded or has_secret):
            problem = (
                f"{SECRET_VARIABLE} is not set: a server on an external Valkey needs it to sign "
                "waitpoint tokens. Generate one with: openssl rand -hex 32"
            )
            raise ConfigError("environment", problem)

    def _valkey(self) -> ValkeyLocation:
        if isinstance(self._at, ValkeyLocation):
            return self._at
        problem = f"{self.peer} is a FlowFabric server. Set FF_URL to the address of Valkey."
        raise ConfigError("server", problem)

    async def open_existing(self, *, name: str, connect_timeout: float) -> Backend:
        """A backend for a command: fails at once if nothing answers, and sets nothing up."""
        return await self._at.open_existing(name=name, connect_timeout=connect_timeout)

    async def diagnose(
        self, namespace: str | None, *, prepare: bool, connect_timeout: float
    ) -> list[Finding]:
        """Check the deployment; `prepare` sets it up first."""
        return await self._at.diagnose(namespace, prepare=prepare, connect_timeout=connect_timeout)

    def close(self) -> None:
        """Release the embedded Valkey; it stops after its last user."""
        self._at.close()
