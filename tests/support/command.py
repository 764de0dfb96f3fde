"""Running the real command: to its end, or beside the test while its output is read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from flowfabric.core.ids import ExecutionId
from flowfabric.sdk.client import Client
from tests.support import zygote

COMMAND = Path(sys.executable).with_name("flowfabric")
PATIENCE_S = 40
_FORKED_WITH = ("FF_", "COLUMNS", "COMP_", "_FLOWFABRIC_COMPLETE", "_TYPER_COMPLETE")
"""Variables that a command reads when it runs; others already shape the start of Python."""


class Done(msgspec.Struct, frozen=True):
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def objects(self) -> list[Any]:
        """The JSON objects on its output."""
        return [json.loads(line) for line in self.lines]

    @property
    def error(self) -> dict[str, Any]:
        """The one JSON error on its error stream."""
        (line,) = self.err.splitlines()
        return json.loads(line)["error"]


class Running:
    """A command under way. Both of its streams arrive as one sequence of lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.seen: list[str] = []

    async def line(self, part: str) -> str:
        """The next line that contains `part`; what comes before is kept in `seen`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while raw := await self.process.stdout.readline():
                text = raw.decode().rstrip("\n")
                self.seen.append(text)
                if part in text:
                    return text
        raise AssertionError(f"{part!r} never came; it said:\n" + "\n".join(self.seen))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> Done:
        """Wait for its end."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            rest = await self.process.stdout.read()
            code = await self.process.wait()
        self.seen += rest.decode().splitlines()
        return Done(code, "\n".join(self.seen), "")


@cache
def _zygote() -> zygote.Zygote:
    return zygote.Zygote(_clean_environment())


def _clean_environment() -> dict[str, str]:
    ours = ("FF_", "PYTHONUNBUFFERED")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class Cli:
    """The command with one environment and one current folder."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.environment = _clean_environment() | {"COLUMNS": "100"} | variables

    async def __call__(self, *arguments: str, **variables: str) -> Done:
        """Run it to its end."""
        if all(name.startswith(_FORKED_WITH) for name in variables):
            return await self._fork(arguments, variables)
        process = await asyncio.create_subprocess_exec(
            COMMAND,
            *arguments,
            cwd=self.folder,
            env=self.environment | variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
        return Done(process.returncode or 0, out.decode(), err.decode())

    async def _fork(self, arguments: tuple[str, ...], variables: dict[str, str]) -> Done:
        environment = self.environment | variables
        async with asyncio.timeout(PATIENCE_S):
            code, out, err = await _zygote().run(arguments, self.folder, environment)
        return Done(code, out.decode(), err.decode())

    @asynccontextmanager
    async def start(self, *arguments: str, **variables: str) -> AsyncGenerator[Running]:
        """Run it beside the block; it never outlives it."""
        process = await asyncio.create_subprocess_exec(
            COMMAND,
            *arguments,
            cwd=self.folder,
            env=self.environment | variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            yield Running(process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@asynccontextmanager
async def busy_worker(
    cli: Cli, client: Client, kind: str, *options: str
) -> AsyncGenerator[tuple[Running, ExecutionId]]:
    """A worker of `shop:app` whose handler of this kind has begun, and what it works on."""
    submitted = await client.submit(kind)
    async with cli.start("worker", "shop:app", *options) as running:
        await running.line("handler started")
        yield running, submitted.execution_id
