"""A deployment behind a FlowFabric server: opening backends there, and checking it."""

from contextlib import aclosing

from flowfabric.core.errors import AuthError, ConfigError, EngineError, UnavailableError
from flowfabric.core.version import __version__
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.meta import Finding, broken, ok, warning
from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.backend import EngineDescription, HttpBackend
from flowfabric.engine.http.link import HttpLink
from flowfabric.engine.http.operations import ROOT

_PREPARES = (
    "a server prepares its deployment when it starts; to do it yourself, pass the Valkey URL"
)
_READINESS = {
    "ping": "check that the server can reach its Valkey",
    "library": "restart the server: it loads the function library",
    "partitions": "set the server's FF_*_PARTITIONS to the stored counts, and restart it",
    "dispatcher": "read the server's log, and restart the server",
    "scanners": "read the server's log, and restart the server",
    "shutdown": "this server is shutting down; use another one",
}


class HttpLocation:
    """Opens backends on one server."""

    embedded = False

    def __init__(self, address: ServerAddress) -> None:
        self._address = address

    @property
    def peer(self) -> str:
        return self._address.url

    async def open(self, *, name: str = "flowfabric", prepare: bool = False) -> Backend:
        if prepare:
            raise ConfigError("url", f"{name} cannot use {self.peer}: {_PREPARES}")
        return await HttpBackend.connect(self._address)

    async def open_existing(self, *, name: str, connect_timeout: float) -> Backend:
        del name  # The server knows its callers by their tokens.
        return await HttpBackend.connect(
            self._address, patient=False, connect_timeout_s=connect_timeout
        )

    async def diagnose(
        self, namespace: str | None, *, prepare: bool, connect_timeout: float
    ) -> list[Finding]:
        if prepare:
            return [broken("prepare", "this is the address of a FlowFabric server", _PREPARES)]
        link = HttpLink(self._address, patient=False, connect_timeout_s=connect_timeout)
        found: list[Finding] = []
        async with aclosing(link):
            try:
                await link.call("GET", "/livez")
                found.append(ok("server", f"{self.peer} answers"))
                described = await link.call("GET", ROOT, answer=EngineDescription, op="connect")
                found += [_token(self._address), _version(described.version)]
                found += await _readiness(link)
                found += await HttpBackend(link, described).meta.diagnose(namespace)
            except EngineError as error:
                found.append(_stopped_by(error, reached=bool(found)))
        return found

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _token(address: ServerAddress) -> Finding:
    if address.token is None:
        return ok("API token", "the server requires no token")
    return ok("API token", "the server accepts FF_API_TOKEN")


def _version(server: str) -> Finding:
    if server == __version__:
        return ok("release", f"client and server have {server}")
    detail = f"the server has {server}, this client {__version__}"
    return warning("release", detail, "install the same version on the client and the server")


async def _readiness(link: HttpLink) -> list[Finding]:
    try:
        await link.call("GET", "/readyz")
    except UnavailableError as error:
        failing = error.detail.split(", ")
        return [broken("ready", f"{each} fails", _READINESS.get(each, "")) for each in failing]
    return [ok("ready", "the server is ready for requests")]


def _stopped_by(error: EngineError, *, reached: bool) -> Finding:
    if isinstance(error, AuthError):
        if error.code != "unauthorized":
            advice = "use a token with the scope 'read' that is not limited to namespaces"
            return broken("permission", error.explanation, advice)
        advice = "set FF_API_TOKEN to a token of this server; `flowfabric tokens create` makes one"
        return broken("API token", error.explanation, advice)
    name = "operation" if isinstance(error, UnavailableError) else "server"
    if reached and name == "server":
        name = "answer"
    return broken(name, error.explanation or error.code, error.hint)
