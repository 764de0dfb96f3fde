"""A scripted peer: answers each RESP command with the bytes a test chooses."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from libvalkey import Reader

HELLO = b"%1\r\n+server\r\n+valkey\r\n"


@asynccontextmanager
async def scripted_peer(
    answer: Callable[[list[bytes]], bytes], *, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[int]:
    """Listen on loopback, yield the port; on leaving, every connection is closed."""
    writers: set[asyncio.StreamWriter] = set()
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        tasks.add(asyncio.current_task())
        parser = Reader(notEnoughData=None)
        try:
            while data := await reader.read(1 << 16):
                parser.feed(data)
                while (command := parser.gets()) is not None:
                    writer.write(answer(command))
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        if tasks:
            await asyncio.wait([task for task in tasks if task is not None])


def bulk(text: str) -> bytes:
    """A RESP bulk string."""
    data = text.encode()
    return b"$%d\r\n%s\r\n" % (len(data), data)
