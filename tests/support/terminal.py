"""The real command in a pseudo-terminal: what it shows, and keys that are typed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import termios
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.support.command import COMMAND, PATIENCE_S, Cli
from tests.support.sdk import until

CTRL_C = "\x03"
_control = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])|\r")


def plain(raw: str) -> str:
    """The text without control sequences."""
    return _control.sub("", raw)


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self._master = master
        self._arrived = asyncio.Event()
        self.raw = ""
        """Everything shown so far."""
        self._read_to = 0
        self._ended = False
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        try:
            part = os.read(self._master, 65_536)
        except OSError:
            # Linux says so when no process has the terminal any longer.
            part = b""
        if not part:
            self._ended = True
            asyncio.get_running_loop().remove_reader(self._master)
        self.raw += part.decode(errors="replace")
        self._arrived.set()

    @property
    def text(self) -> str:
        """Everything shown so far, without control sequences."""
        return plain(self.raw)

    async def until(self, part: str) -> None:
        """Wait for text after what was waited for last."""
        async with asyncio.timeout(PATIENCE_S):
            while (at := self.text.find(part, self._read_to)) < 0:
                assert not self._ended, f"{part!r} never came:\n{self.text}"
                self._arrived.clear()
                await self._arrived.wait()
        self._read_to = at + len(part)

    async def shows(self, part: str) -> str:
        """Wait for text after what was waited for last; the line that it is in."""
        await self.until(part)
        at = self._read_to - len(part)
        while "\n" not in self.text[self._read_to :]:
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), PATIENCE_S)
        start = self.text.rfind("\n", 0, at) + 1
        return self.text[start : self.text.index("\n", self._read_to)]

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    async def interrupt(self) -> None:
        """Send SIGINT; again if Python had not begun to read: it then waits for the next key."""
        while self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), 5)

    async def end(self) -> int:
        """Wait for its exit status, and for all that it shows."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._ended:
                self._arrived.clear()
                await self._arrived.wait()
            return await self.process.wait()


async def shown(cli: Cli, *arguments: str) -> str:
    """What a command that ends by itself shows in a terminal, with control sequences."""
    async with in_terminal(cli, *arguments) as terminal:
        await terminal.end()
    return terminal.raw


@asynccontextmanager
async def in_terminal(
    cli: Cli, *arguments: str, columns: int = 100, rows: int = 40, **variables: str
) -> AsyncGenerator[Terminal]:
    """Run a command in a terminal beside the block; it never outlives it."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**cli.environment, "TERM": "xterm-256color", **variables}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)

    def own_terminal() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    try:
        process = await asyncio.create_subprocess_exec(
            *(COMMAND, *arguments),
            cwd=cli.folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=own_terminal,
        )
    finally:
        os.close(slave)
    terminal = Terminal(process, master)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)


def processes_in(folder: Path) -> list[str]:
    """The commands of the processes that run in a folder."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


async def nothing_left(folder: Path) -> None:
    """Wait until no process runs in the folder and no socket is left in it."""
    await until(lambda: not processes_in(folder), "the end of every process")
    left = await asyncio.to_thread(lambda: [each for each in folder.rglob("*") if each.is_socket()])
    assert left == []
