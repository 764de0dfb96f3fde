"""A scripted peer: answers each RESP command with the bytes a test chooses."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from libvalkey import Reader

from tests.support.listening import listening

HELLO = b"%1\r\n+server\r\n+valkey\r\n"


@asynccontextmanager
async def scripted_peer(
    answer: Callable[[list[bytes]], bytes], *, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[int]:
    """Listen on loopback, yield the port; on leaving, every connection is closed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = Reader(notEnoughData=None)
        while data := await reader.read(1 << 16):
            parser.feed(data)
            while (command := parser.gets()) is not None:
                writer.write(answer(command))

    async with listening(serve, tls=tls) as port:
        yield port


def bulk(text: str) -> bytes:
    """A RESP bulk string."""
    data = text.encode()
    return b"$%d\r\n%s\r\n" % (len(data), data)
