"""The address of a FlowFabric server: its URL, and the token of the environment."""

import os
import ssl
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import msgspec

from flowfabric.core.environment import invalid
from flowfabric.core.errors import ConfigError
from flowfabric.core.text import host_port

TOKEN_VARIABLE: Final = "FF_API_TOKEN"  # noqa: S105 - the name, not a token
FORM: Final = "http://host:9090 or https://host"
_SCHEMES: Final = ("http", "https")


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one server.

    >>> parse_url("http://flows.example:9090/team").path
    '/team'
    """

    host: str
    port: int
    tls: bool = False
    path: str = ""
    """The path before `/v1`, for a server behind a proxy."""
    token: str | None = None
    tls_ca: str | None = None

    @property
    def peer(self) -> str:
        """The server's name in messages."""
        return host_port(self.host, self.port)

    @property
    def url(self) -> str:
        """The address as a URL; it has no secret."""
        return f"{'https' if self.tls else 'http'}://{self.peer}{self.path}"

    def context(self) -> ssl.SSLContext | None:
        """The context that verifies the server's certificate; None without TLS."""
        if not self.tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("tls", f"cannot read FF_TLS_CA: {error}") from error

    def __repr__(self) -> str:
        return f"ServerAddress({self.url!r})"


def is_server_url(text: str) -> bool:
    """Whether a URL names a FlowFabric server, and not a Valkey deployment."""
    return text.strip().lower().startswith(("http:", "https:"))


def parse_url(text: str, environ: Mapping[str, str] = {}, *, name: str = "url") -> ServerAddress:
    """The address of a URL; the token is `FF_API_TOKEN` of the environment."""
    try:
        return _parse(text.strip(), environ)
    except ValueError as error:
        raise invalid(name, str(error)) from None


def server_at(url: str, *, name: str = "url") -> ServerAddress:
    """The address of a URL, with the token of this process's environment."""
    return parse_url(url, os.environ, name=name)


def configured_token(environ: Mapping[str, str]) -> str | None:
    """The token in `FF_API_TOKEN`, the same for a server and its clients."""
    # Strip the line break at the end of a secret file, which no header can contain.
    token = environ.get(TOKEN_VARIABLE, "").strip() or None
    if token is not None and not (token.isascii() and token.isprintable()):
        # The value is not repeated.
        raise invalid(TOKEN_VARIABLE, "contains characters that are not allowed in a token")
    return token


def _parse(text: str, environ: Mapping[str, str]) -> ServerAddress:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"the host or the port is wrong; use {FORM}") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"use {FORM}")
    if "@" in parts.netloc:
        # Do not repeat the value, which may contain the token.
        raise ValueError("a server URL cannot contain a user or password; set FF_API_TOKEN")
    if not host:
        raise ValueError(f"the host is missing; use {FORM}")
    if port == 0:
        raise ValueError("the port must be 1-65535")
    if parts.query or parts.fragment:
        raise ValueError(f"a server URL cannot contain '?' or '#'; use {FORM}")
    tls = parts.scheme == "https"
    return ServerAddress(
        host=host,
        port=port or (443 if tls else 80),
        tls=tls,
        path=parts.path.rstrip("/").removesuffix("/v1"),
        token=configured_token(environ),
        tls_ca=environ.get("FF_TLS_CA") or None,
    )
