"""A server that is killed at a chosen call of the engine: `python -m tests.support.dying_server`.

Arguments: the store's url, `noun.operation`, `before` or `after`, the number of the call, and
`hold` to keep claims back until their clients have gone. It prints its port.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from typing import Any

from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess
from flowfabric.valkey.address import parse_url


def kill_at(backend: Any, operation: str, when: str, number: int) -> None:
    """Replace an operation by one that ends this process as `kill -9` does."""
    noun, name = operation.split(".")
    original = getattr(getattr(backend, noun), name)
    calls = 0

    @functools.wraps(original)
    async def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await original(*args, **kwargs)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(getattr(backend, noun), name, dying)


def hold_claims(server: ServerProcess) -> None:
    """Answer no claim before its client has gone."""
    desk: Any = server.services.remote.desk
    claim = desk.claim

    async def held(requests: Any, wanted: int, wait_s: float, given_up: Any, *rest: Any) -> Any:
        found = await claim(requests, wanted, wait_s, given_up, *rest)
        await given_up
        return found

    desk.claim = held


async def main(url: str, operation: str, when: str, number: str, *options: str) -> None:
    backend = await ValkeyBackend.connect(parse_url(url))
    kill_at(backend, operation, when, int(number))
    server = ServerProcess(backend, ServerConfig(listen=("127.0.0.1", 0)))
    if "hold" in options:
        hold_claims(server)
    await server.listen()
    print(server.address[1], flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
