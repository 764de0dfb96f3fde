"""Open a backend on Valkey, and start the embedded Valkey. Callers use `engine/connect.py`."""

import asyncio
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from flowfabric.core.environment import invalid
from flowfabric.core.errors import (
    BackendNotBuilt,
    ConfigError,
    FlowFabricError,
    TransportError,
)
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.text import shown
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.meta import Finding, Grade, ok, warning
from flowfabric.engine.valkey import meta
from flowfabric.engine.valkey.backend import ValkeyBackend, check_settings
from flowfabric.engine.valkey.boot import (
    configured_counts,
    configured_lanes,
    join,
    read_counts,
)
from flowfabric.valkey.address import Address, from_env, from_url, parse_url
from flowfabric.valkey.connect import connect
from flowfabric.valkey.connection import tls_context
from flowfabric.valkey.project_folder import NO_SERVER, data_folder
from flowfabric.valkey.transport import Transport

if TYPE_CHECKING:
    # Needs fcntl, which some platforms lack; external servers work without it.
    from flowfabric.valkey.embedded import EmbeddedServer
    from flowfabric.valkey.embedded_folder import Aof

Place: TypeAlias = Address | str
"""An address or its url."""
_BACKENDS: Final = ("valkey", "postgres", "sqlite")
_DATA_FILES: Final = ("appendonlydir", "valkey.sock")


async def open_backend(
    place: Place, *, name: str = "flowfabric", prepare_with: PartitionCounts | None = None
) -> Backend:
    """A backend on the deployment at an address or url; with `prepare_with`, sets it up first."""
    address = from_url(place) if isinstance(place, str) else place
    return await ValkeyBackend.connect(address, name=name, prepare_with=prepare_with)


def check_environment() -> None:
    """Raise `ConfigError` for a wrong setting of a process that sets up a deployment."""
    check_settings()
    for name in ("FF_TLS_CA", "FF_TLS_CERT", "FF_TLS_KEY"):
        if path := os.environ.get(name):
            _check_readable(name, Path(path))
    if (address := from_env(os.environ)) is not None:
        try:
            tls_context(address)
        except TransportError as error:
            raise ConfigError("environment", error.message) from None


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise invalid(name, f"cannot read {shown(str(path))}: {error.strerror}") from None


def check_backend(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` if `FF_BACKEND` names another store than this one."""
    text = environ.get("FF_BACKEND", "")
    name = text.strip().lower() or "valkey"
    if name not in _BACKENDS:
        raise invalid("FF_BACKEND", f"must be one of {', '.join(_BACKENDS)}, not {text!r}")
    if name != "valkey":
        problem = f"invalid value for FF_BACKEND: this version has no {name} backend; use valkey"
        raise BackendNotBuilt("environment", problem)


def configured_layout() -> tuple[list[str], PartitionCounts]:
    """The lanes and the partition counts that the environment sets; connects to nothing."""
    return configured_lanes(), configured_counts()


def check_url(url: str) -> None:
    """Raise `ConfigError` unless this is the url of a deployment."""
    parse_url(url)


def start_embedded(data_dir: Path | None = None, *, aof: "Aof" = "everysec") -> "EmbeddedServer":
    """Start or join the embedded Valkey of a folder; blocks, and the caller releases it."""
    _check_platform()
    from flowfabric.valkey.embedded import EmbeddedServer  # noqa: PLC0415

    return EmbeddedServer.acquire(data_dir, aof=aof)


def _check_platform() -> None:
    if find_spec("fcntl") is None:
        problem = "FlowFabric has no embedded Valkey for this platform"
        raise ConfigError("embedded", f"{problem}. {NO_SERVER}")


def has_data() -> bool:
    """Whether an embedded Valkey runs, or ever ran, in the project's folder."""
    _check_platform()
    from flowfabric.valkey.embedded_folder import explained  # noqa: PLC0415

    folder = data_folder()
    with explained(folder):
        return any(_exists(folder / name) for name in _DATA_FILES)


def _exists(path: Path) -> bool:
    # Unlike Path.exists, this raises an error for an unreadable folder.
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def no_data() -> tuple[str, str]:
    """The error and advice to show if `has_data` is false."""
    advice = (
        "run `flowfabric worker module:app` or submit something from your program; "
        "for another deployment, set FF_URL (or --url) or FF_DATA_DIR"
    )
    return f"there is no data in {shown(str(data_folder()))} yet", advice


def store_secret(secret: str) -> None:
    """Keep the secret that the project's embedded deployment was rotated to."""
    from flowfabric.valkey.embedded_folder import replace_folder_secret  # noqa: PLC0415

    replace_folder_secret(data_folder(), secret)


class ValkeyLocation:
    """Opens backends on the Valkey of a url, or of the environment; starts an embedded one."""

    def __init__(self, place: Place | None = None) -> None:
        check_backend(os.environ)
        if isinstance(place, Address):
            self._address: Address | None = place
        else:
            self._address = from_url(place) if place else from_env(os.environ)
        self._server: EmbeddedServer | None = None
        self._releases = 0
        self._users: dict[object, asyncio.AbstractEventLoop] = {}
        """The open backends, each with its event loop, because every thread may run one."""
        self._close_after_users = False
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
        """The deployment's address; starts or joins the embedded Valkey if there is no other."""
        if self._address is not None:
            return self._address
        if self._server is None:
            await asyncio.to_thread(self._acquire, self._releases)
        server = self._server
        if server is None:
            raise ConfigError("embedded", "the server was released")
        return server.address

    def _acquire(self, releases: int) -> None:
        """Runs on a thread, which cannot be cancelled; releases a second or late hold."""
        server = start_embedded()
        with self._lock:
            if self._server is None and self._releases == releases:
                self._server = server
                return
        server.release()

    async def open_server(self) -> Backend:
        """A backend for a server process; `doctor` finds it by its connection name."""
        host = "".join(c for c in socket.gethostname() if c.isascii() and c.isprintable())
        name = f"{meta.SERVER_NAME}{host.replace(' ', '')}:{os.getpid()}"
        return await self.open(name=name, prepare=True)

    async def open(self, *, name: str = "flowfabric", prepare: bool = False) -> Backend:
        """A backend in the running event loop; the embedded deployment is always prepared."""
        if not self.embedded:
            counts = configured_counts() if prepare else None
            return await open_backend(await self.address(), name=name, prepare_with=counts)
        # Refuse wrong settings before starting a server.
        check_settings()
        user = object()
        with self._lock:
            self._users[user] = asyncio.get_running_loop()
            self._close_after_users = False
        try:
            backend = await ValkeyBackend.connect(
                await self.address(),
                name=name,
                prepare_with=configured_counts(),
                revive=self._revive,
                mint_secret=self._mint_secret,
            )
        except BaseException:
            self._leave(user)
            raise
        backend.on_closed = partial(self._leave, user)
        return backend

    async def open_existing(self, *, name: str, connect_timeout: float) -> Backend:
        """A backend for a command: fails at once if no server answers, and sets nothing up."""
        transport = await connect(
            await self.address(), connect_timeout=connect_timeout, name=name, patient=False
        )
        try:
            return ValkeyBackend(transport, await self._join(transport, name))
        except BaseException:
            await transport.aclose()
            raise

    async def _join(self, transport: Transport, name: str) -> PartitionCounts:
        try:
            return await join(transport, owned=self.embedded)
        except ConfigError as error:
            if not self.embedded or error.field != "partition_config":
                raise
        # The first start was interrupted; any program that uses the folder may complete it.
        await (await self.open(name=name)).aclose()
        return await join(transport, owned=True)

    async def diagnose(
        self, namespace: str | None, *, prepare: bool, connect_timeout: float
    ) -> list[Finding]:
        """Check the deployment, prepared or not; `prepare` sets it up first."""
        found: list[Finding] = []
        try:
            if self.embedded:
                _check_platform()
                from flowfabric.engine.valkey import embedded_checks  # noqa: PLC0415

                if not prepare and not has_data():
                    found.append(warning("data", *no_data()))
                    return found + embedded_checks.check_new_folder(data_folder())
                found += embedded_checks.check_secret_file(data_folder())
            name = "flowfabric-doctor"
            transport = await connect(
                await self.address(), connect_timeout=connect_timeout, name=name, patient=False
            )
            async with aclosing(transport):
                if prepare:
                    await (await self.open(name=name, prepare=True)).aclose()
                    found.append(ok("prepare", "partition counts and functions are set up"))
                found += await meta.check_server(transport, owned=self.embedded)
                if all(each.name != "version" or each.grade is Grade.OK for each in found):
                    backend = ValkeyBackend(transport, await read_counts(transport))
                    found += await meta.check_deployment(backend, transport, namespace)
        except FlowFabricError as error:
            found.append(meta.stopped_by(error, owned=self.embedded))
        return found

    def _mint_secret(self) -> str:
        """The secret of the data folder, because an embedded Valkey needs no configured one."""
        from flowfabric.valkey.embedded_folder import folder_secret  # noqa: PLC0415

        if self._server is None:
            raise ConfigError("embedded", "the server was released")
        return folder_secret(self._server.data_dir)

    def _revive(self) -> None:
        if self._server is not None:
            self._server.ensure_running()

    def close(self) -> None:
        """Release the embedded Valkey when no backend opened here uses it any longer."""
        self._close_after_users = True
        self._release_unused()

    def _leave(self, user: object) -> None:
        with self._lock:
            del self._users[user]
        if self._close_after_users:
            self._release_unused()

    def _release_unused(self) -> None:
        with self._lock:
            # A closed loop may have left its backends open.
            if not all(loop.is_closed() for loop in self._users.values()):
                return
            server, self._server = self._server, None
            self._releases += 1
        if server is not None:
            server.release()
