"""Reaching the deployment a command is about, without creating one by looking."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from flowfabric.app.place import Place
from flowfabric.cli.errors import CliError
from flowfabric.core.errors import ConfigError
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.backend import Backend
from flowfabric.engine.boot import join
from flowfabric.valkey.connect import connect
from flowfabric.valkey.transport import Transport

__all__ = ["CONNECT_S", "NoDataYet", "data_folder", "has_data", "opened"]

CONNECT_S = 3.0
"""A person waits for the answer; a worker has the transport's patience."""

_TRACES = ("appendonlydir", "valkey.sock")


class NoDataYet(CliError):
    """The project's embedded Valkey was never started: there is nothing to look at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            "no_data",
            f"there is no data in {folder} yet",
            "start with `flowfabric worker module:app` or submit something from your program; "
            "to look at another deployment set FF_URL (or --url), or FF_DATA_DIR",
        )


def data_folder() -> Path:
    """Where the embedded Valkey of this project keeps its data."""
    return Path(os.environ.get("FF_DATA_DIR") or ".flowfabric").expanduser().absolute()


def has_data() -> bool:
    """Whether an embedded Valkey runs, or ever ran, in the project's folder."""
    # Needs fcntl, which not every platform has; external servers do without.
    from flowfabric.valkey.embedded_folder import explained  # noqa: PLC0415

    folder = data_folder()
    with explained(folder):
        return any(_exists(folder / trace) for trace in _TRACES)


def _exists(path: Path) -> bool:
    # Unlike Path.exists, a folder that may not be looked into is not the same as an empty one.
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


@asynccontextmanager
async def opened(url: str | None) -> AsyncGenerator[Backend]:
    """A backend on data that exists; `NoDataYet` instead of a new folder."""
    place = Place(url)
    if place.embedded and not has_data():
        raise NoDataYet(data_folder())
    try:
        address = await place.address()
        transport = await connect(
            address, connect_timeout=CONNECT_S, name="flowfabric-cli", patient=False
        )
        try:
            backend = Backend(transport, await _join(transport, place))
        except BaseException:
            await transport.aclose()
            raise
        async with backend:
            yield backend
    finally:
        place.close()


async def _join(transport: Transport, place: Place) -> PartitionCounts:
    try:
        return await join(transport, owned=place.embedded)
    except ConfigError as error:
        if not place.embedded or error.field != "partition_config":
            raise
    # The first start was interrupted; any program that uses the folder would finish it.
    await (await place.open(name="flowfabric-cli")).aclose()
    return await join(transport, owned=True)
