"""A listener of a test's own: on leaving, every connection is closed and served no more."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_TURNS = 5


async def stop_listening(server: asyncio.Server) -> None:
    """Accept no more, serve what was accepted, then close it.

    A server that closes between accepting a connection and serving it leaves the socket open.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    await some_turns()
    server.close()


async def some_turns() -> None:
    """Let the loop accept what it is about to accept, and close what it is about to close."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


@asynccontextmanager
async def listening(
    serve: Serve, *, path: Path | None = None, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[int]:
    """Listen on a free port of loopback and yield it, or on a unix socket."""
    tasks: set[asyncio.Task[None]] = set()

    async def each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            tasks.discard(task)

    if path is None:
        server = await asyncio.start_server(each, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
    else:
        server, port = await asyncio.start_unix_server(each, path), 0
    try:
        yield port
    finally:
        await stop_listening(server)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
