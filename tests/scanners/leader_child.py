"""A process that runs the scanners until it is killed. Prints `leading` once it does."""

from __future__ import annotations

import asyncio
import sys

from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners import ScannerSettings, ScannerSupervisor
from flowfabric.valkey.address import parse_url


async def main(url: str) -> None:
    backend = await ValkeyBackend.connect(parse_url(url))
    supervisor = ScannerSupervisor(backend, ScannerSettings())
    supervisor.start()
    await supervisor.leadership.scanning.wait()
    sys.stdout.write("leading\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
