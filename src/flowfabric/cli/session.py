"""Reaching the deployment a command is about, without creating one by looking."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from flowfabric.app.place import Place
from flowfabric.cli.errors import CliError
from flowfabric.engine.backend import Backend
from flowfabric.engine.boot import join
from flowfabric.valkey.connect import connect

__all__ = ["CONNECT_S", "NoDataYet", "data_folder", "has_data", "opened"]

CONNECT_S = 3.0
"""A person waits for the answer; a worker has the transport's patience."""


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
    folder = data_folder()
    return any((folder / trace).exists() for trace in ("appendonlydir", "valkey.pid"))


@asynccontextmanager
async def opened(url: str | None) -> AsyncGenerator[Backend]:
    """A backend on data that exists; `NoDataYet` instead of a new folder."""
    place = Place(url)
    if place.embedded and not has_data():
        raise NoDataYet(data_folder())
    try:
        address = await place.address()
        transport = await connect(address, connect_timeout=CONNECT_S, name="flowfabric-cli")
        try:
            backend = Backend(transport, await join(transport, owned=place.embedded))
        except BaseException:
            await transport.aclose()
            raise
        async with backend:
            yield backend
    finally:
        place.close()
