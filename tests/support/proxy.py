"""A proxy in front of a test server that loses replies, cuts connections and holds bytes back."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.support.listening import some_turns, stop_listening

T = TypeVar("T")


class _Pair:
    """One client connection and its upstream half."""

    def __init__(self, client: asyncio.StreamWriter, upstream: asyncio.StreamWriter) -> None:
        self.client = client
        self.upstream = upstream
        self.drop_reply = False

    def cut(self) -> None:
        self.client.transport.abort()
        self.upstream.transport.abort()


class FaultProxy:
    """Listens on its own unix socket and forwards to `upstream`; runs in its own thread.

    For an upstream with a port, it listens on a port of its own: `address`.

    Every method returns when the fault is in place, and may be called from any thread. Use it as
    a context manager, or call `stop()`.
    """

    def __init__(self, upstream: str | Path | tuple[str, int]) -> None:
        self._upstream = upstream
        self.address = ("127.0.0.1", 0)
        self._folder = Path(tempfile.mkdtemp(prefix="ffp-"))
        self.socket_path = self._folder / "p.sock"
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Event()
        self._gate.set()
        self._server: asyncio.Server | None = None
        # None: off. An empty marker matches everything.
        self._lose_reply: bytes | None = None
        self._lose_request: bytes | None = None
        self._mute = False
        self.dropped = 0
        self.accepted = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.up()

    @property
    def url(self) -> str:
        """The proxy's own address."""
        return f"unix://{self.socket_path}"

    @property
    def connections(self) -> int:
        """Connections open right now."""
        return len(self._pairs)

    def drop_next_reply(self, containing: bytes = b"") -> None:
        """Let the next request (holding these bytes) run, lose its reply, cut its connection."""
        self._run(self._set(_lose_reply=containing))

    def drop_next_request(self, containing: bytes = b"") -> None:
        """Lose the next request (holding these bytes) before the server sees it, and cut."""
        self._run(self._set(_lose_request=containing))

    def mute(self) -> None:
        """Let requests through and lose their replies, until the next `cut`."""
        self._mute = True

    def cut(self) -> None:
        """Break every open connection; new ones are accepted."""
        self._run(self._cut())

    def pause(self) -> None:
        """Hold all bytes, both ways."""
        self._run(self._hold(held=True))

    def resume(self) -> None:
        """Let the held bytes go on."""
        self._run(self._hold(held=False))

    def down(self) -> None:
        """Refuse new connections and cut the open ones."""
        self._run(self._down())

    def up(self) -> None:
        """Accept connections (again)."""
        self._run(self._up())

    def stop(self) -> None:
        """End the thread and remove the socket."""
        self._run(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- in the proxy's thread ------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _set(self, **values: bytes) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    async def _hold(self, *, held: bool) -> None:
        if held:
            self._gate.clear()
        else:
            self._gate.set()

    async def _cut(self) -> None:
        self._mute = False
        for pair in list(self._pairs):
            pair.cut()

    async def _up(self) -> None:
        if self._server is None:
            if isinstance(self._upstream, tuple):
                self._server = await asyncio.start_server(self._serve, *self.address)
                self.address = self._server.sockets[0].getsockname()[:2]
            else:
                path = str(self.socket_path)
                self._server = await asyncio.start_unix_server(self._serve, path)

    async def _down(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await stop_listening(server)
            self.socket_path.unlink(missing_ok=True)
        await self._cut()

    async def _finish(self) -> None:
        await self._down()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await some_turns()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        try:
            if isinstance(self._upstream, tuple):
                up_reader, upstream = await asyncio.open_connection(*self._upstream)
            else:
                up_reader, upstream = await asyncio.open_unix_connection(str(self._upstream))
        except (OSError, asyncio.CancelledError):
            client.transport.abort()
            self._tasks.discard(task)
            return
        pair = _Pair(client, upstream)
        self._pairs.add(pair)
        pumps = [
            asyncio.ensure_future(self._requests(reader, pair)),
            asyncio.ensure_future(self._replies(up_reader, pair)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass
        finally:
            pair.cut()
            for pump in pumps:
                pump.cancel()
            self._pairs.discard(pair)
            self._tasks.discard(task)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _requests(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        while data := await reader.read(1 << 16):
            await self._gate.wait()
            if self._lose_request is not None and self._lose_request in data:
                self._lose_request = None
                self.dropped += 1
                return
            if self._lose_reply is not None and self._lose_reply in data:
                self._lose_reply = None
                pair.drop_reply = True
            pair.upstream.write(data)
            await pair.upstream.drain()

    async def _replies(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        while data := await reader.read(1 << 16):
            await self._gate.wait()
            if pair.drop_reply:
                self.dropped += 1
                return
            if self._mute:
                self.dropped += 1
                continue
            pair.client.write(data)
            await pair.client.drain()
