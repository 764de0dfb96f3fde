"""The address of a Valkey deployment, from a URL or the environment."""

import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Final, Self
from urllib.parse import SplitResult, parse_qsl, unquote, unquote_to_bytes, urlsplit

import msgspec

from flowfabric.core.environment import flag, invalid, whole_number
from flowfabric.core.text import host_port, shown

log = logging.getLogger(__name__)
DEFAULT_PORT: Final = 6379
_INSTEAD: Final = ("FF_HOST", "FF_PORT", "FF_TLS", "FF_CLUSTER")
"""The variables that set the address if there is no URL."""
_MAX_DB: Final = 2**31 - 1
_ESCAPE: Final = "in a password, write @ / ? # and [ as %40 %2F %3F %23 and %5B"
_is_host = re.compile(r"[\w.-]+(:\d+)?(/\d+)?|\[[0-9a-fA-F:]+\](:\d+)?").fullmatch
FORMS: Final = (
    "valkey://[user:password@]host:port[/db], valkeys://…, "
    "valkey+cluster://host:port,host:port, unix://path[?db=N], or http://host:9090 for a server"
)


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one Valkey server, or the seed nodes of a cluster.

    >>> parse_url("valkey://app:s3cret@db.example:6380/2").port
    6380
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    socket_path: str | None = None
    socket_owner: int | None = None
    username: str | None = None
    password: str | None = None
    db: int = 0
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    seeds: tuple[tuple[str, int], ...] = ()
    """The nodes from which to discover the cluster; empty for a single server."""

    @property
    def cluster(self) -> bool:
        return bool(self.seeds)

    @property
    def peer(self) -> str:
        """The server's name in messages: `unix:/path` or `host:port`, never a secret."""
        if self.socket_path is not None:
            return f"unix:{shown(self.socket_path)}"
        return host_port(self.host, self.port)

    def node(self, host: str, port: int) -> Self:
        """The address of one node of the same deployment: same credentials and TLS."""
        return msgspec.structs.replace(self, host=host, port=port, socket_path=None, seeds=())

    def __repr__(self) -> str:
        fields = msgspec.structs.asdict(self)
        if self.password is not None:
            fields["password"] = "***"  # noqa: S105
        return f"Address({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def parse_url(text: str, *, name: str = "FF_URL") -> Address:
    """Parse a URL; a bad one raises a `ConfigError` that names the variable `name`.

    The error repeats no part of it: the password may be anywhere if a character is not escaped.
    """
    try:
        return _parse(text.strip())
    except ValueError as error:
        raise invalid(name, str(error)) from None


def from_url(text: str, environ: Mapping[str, str] = os.environ, *, name: str = "url") -> Address:
    """A URL's address; login, database and certificates default to the environment's."""
    address = parse_url(text, name=name)
    # A URL in code or on the command line replaces the environment's address on purpose.
    instead = _INSTEAD if name == "FF_URL" else ("FF_TLS",)
    if ignored := tuple(each for each in instead if environ.get(each, "").strip()):
        _warn_ignored(name, ignored)
    return _with_extras(address, environ)


@cache
def _warn_ignored(name: str, ignored: tuple[str, ...]) -> None:
    """Warn once per process: settings are read several times."""
    text = f"{name} sets the address, so these have no effect: {', '.join(ignored)}"
    if "FF_TLS" in ignored:
        text += ". TLS is used only with valkeys://"
    log.warning(text, extra={"action": "settings_ignored", "ignored": ignored})


def from_env(environ: Mapping[str, str]) -> Address | None:
    """The address that the environment sets; None means the embedded Valkey."""
    if url := environ.get("FF_URL", "").strip():
        return from_url(url, environ, name="FF_URL")
    # Check each variable even if it is not used, so that a typo is found at once.
    port = whole_number(environ, "FF_PORT", DEFAULT_PORT, 1, 65535)
    whole_number(environ, "FF_DB", 0, 0, _MAX_DB)
    tls, cluster = flag(environ, "FF_TLS"), flag(environ, "FF_CLUSTER")
    host = environ.get("FF_HOST", "").strip()
    if not host:
        return None
    seeds = ((host, port),) if cluster else ()
    return _with_extras(Address(host=host, port=port, tls=tls, seeds=seeds), environ)


def _with_extras(address: Address, environ: Mapping[str, str]) -> Address:
    """Complete an address from the environment; what the URL sets takes precedence."""
    db = address.db or whole_number(environ, "FF_DB", 0, 0, _MAX_DB)
    if address.cluster and db:
        raise invalid("FF_DB", "a cluster has only database 0")
    username, password = address.username, address.password
    if password is None:
        username = username or environ.get("FF_USERNAME") or None
        password = environ.get("FF_PASSWORD") or None
    if username is not None and password is None:
        raise invalid("FF_USERNAME", "a user name needs a password (FF_PASSWORD)")
    fields = ("tls_ca", "tls_cert", "tls_key")
    files = {field: environ.get(f"FF_{field.upper()}") or None for field in fields}
    if files["tls_key"] and not files["tls_cert"]:
        raise invalid("FF_TLS_KEY", "a key needs its certificate (FF_TLS_CERT)")
    return msgspec.structs.replace(address, username=username, password=password, db=db, **files)


def _parse(text: str) -> Address:
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError(f"it is not a URL; {_ESCAPE}") from None
    if parts.fragment:
        raise ValueError("a '#' is not allowed; write it as %23 inside a password")
    if parts.scheme == "unix":
        return _parse_unix(parts)
    if parts.scheme not in {"valkey", "valkeys", "valkey+cluster", "valkeys+cluster"}:
        raise ValueError(_unknown_form(text, parts.scheme))
    if parts.query:
        raise ValueError(f"only unix://path?db=N takes options after '?'; {_ESCAPE}")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    seeds = [_host_port(item) for item in hosts.split(",")]
    cluster = parts.scheme.endswith("+cluster")
    if len(seeds) > 1 and not cluster:
        raise ValueError("several hosts need valkey+cluster://")
    db = _database(parts.path.strip("/"))
    if cluster and db:
        raise ValueError("a cluster has only database 0")
    username, password = _credentials(userinfo)
    return Address(
        host=seeds[0][0],
        port=seeds[0][1],
        username=username,
        password=password,
        db=db,
        tls=parts.scheme.startswith("valkeys"),
        seeds=tuple(seeds) if cluster else (),
    )


def _unknown_form(text: str, scheme: str) -> str:
    if scheme in {"redis", "rediss"} and "://" in text:
        return f"{scheme}:// is not supported; write {scheme.replace('redis', 'valkey')}://"
    if scheme in {"http", "https"}:
        return "this is the address of a FlowFabric server; give that of Valkey, such as valkey://…"
    # Repeat only a bare host with or without a port: anything else may hold a password.
    if _is_host(text):
        return f"write valkey://{text} (or another of {FORMS})"
    return f"unknown form; use {FORMS}"


def _parse_unix(parts: SplitResult) -> Address:
    userinfo, _, first = parts.netloc.rpartition("@")
    raw_path = first + parts.path
    if not raw_path:
        raise ValueError("unix:// needs a socket path")
    if "@" in raw_path:
        raise ValueError(f"write the '@' of the socket path as %40; {_ESCAPE}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    db = _database(options.pop("db", ""))
    if options:
        raise ValueError(f"the only option of unix:// is db; {_ESCAPE}")
    username, password = _credentials(userinfo)
    # Decode as Python does for paths: the file system's encoding may not be UTF-8.
    path = os.fsdecode(unquote_to_bytes(os.fsencode(raw_path)))
    return Address(socket_path=path, username=username, password=password, db=db)


def _credentials(userinfo: str) -> tuple[str | None, str | None]:
    if not userinfo:
        return None, None
    username, colon, password = userinfo.partition(":")
    if not colon or not password:
        raise ValueError("credentials are user:password (user may be empty)")
    return unquote(username) or None, unquote(password)


def _host_port(text: str) -> tuple[str, int]:
    # urlsplit takes one host; this checks the brackets and the port of each of several.
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"the host or the port is wrong; {_ESCAPE}") from None
    if not host:
        raise ValueError("the host is missing")
    if port == 0:
        raise ValueError("the port must be 1-65535")
    return host, DEFAULT_PORT if port is None else port


def _database(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"the database must be a number; {_ESCAPE}")
    return int(text)
