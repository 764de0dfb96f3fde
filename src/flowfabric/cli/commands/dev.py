"""`flowfabric dev`: the embedded Valkey, the server and the workers of a project, for development.

The server and the scanners run in this process, the workers in others. A change of the project's
files restarts only the workers.
"""

import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flowfabric import __version__
from flowfabric.cli import options
from flowfabric.cli.commands.server import check_settings, openness, start_unless
from flowfabric.cli.commands.worker import APPLICATION, CAPABILITIES, LANES, PROCESSES, listed
from flowfabric.cli.errors import UsageError
from flowfabric.cli.logs import Level, flush_logs, set_up_logs
from flowfabric.cli.options import Target, flag, value
from flowfabric.cli.processes import Facts, Supervisor
from flowfabric.cli.session import describe_location
from flowfabric.cli.settings import load_settings
from flowfabric.cli.views.screen import Cell, Screen
from flowfabric.cli.watching import ProjectFiles
from flowfabric.core.text import host_port, plural, shown
from flowfabric.engine.connect import ServerLocation
from flowfabric.sdk.logs import log_always
from flowfabric.server.config import DEFAULT_PORT
from flowfabric.server.process import ServerProcess

log = logging.getLogger(__name__)

_LISTED = 3
_ROUTINE = ("flowfabric.engine", "flowfabric.scanners", "flowfabric.server.process")
"""Loggers whose routine lines repeat the banner; silenced unless --log-level is given."""
_PORT = value("PORT", f"The port of the API. Default: {DEFAULT_PORT}.", min=0, max=65535)
_WATCH = value(
    "FOLDER",
    "Also reload on changes in this folder. Repeatable.",
    exists=True,
    file_okay=False,
)
_GRACE = options.duration("How long a reload or Ctrl-C waits for running tasks.")


def dev(
    context: typer.Context,
    application: Annotated[str, APPLICATION],
    *,
    port: Annotated[int | None, _PORT] = None,
    listen: Annotated[
        str | None, value("HOST:PORT", "The address of the API. Overrides FF_LISTEN_ADDR.")
    ] = None,
    reload: Annotated[
        bool, flag("--reload/--no-reload", "Restart the worker when a Python file changes.")
    ] = True,
    watch: Annotated[list[Path] | None, _WATCH] = None,
    processes: Annotated[int, PROCESSES] = 1,
    concurrency: Annotated[int, value("N", "How many tasks run at once.", min=1, max=100_000)] = 64,
    lanes: Annotated[Sequence[str] | None, LANES] = None,
    capabilities: Annotated[Sequence[str] | None, CAPABILITIES] = None,
    # The parser reads defaults too.
    grace: Annotated[float, _GRACE] = "5s",  # pyright: ignore[reportArgumentType]
    log_level: Annotated[
        Level | None, value("LEVEL", "The lowest level to log: debug, info, warning or error.")
    ] = None,
    as_json: options.JsonLogs = False,
    url: options.ValkeyUrl = None,
) -> None:
    """Run an application and all it needs, for development.

    This runs the REST API with the scanners, and a worker. Without FF_URL, it also runs the
    embedded Valkey. When a Python file in this folder changes, the worker restarts; the API and
    Valkey keep running. If the application cannot be imported, no worker runs until the next
    change.

    Ctrl-C stops everything after running tasks finish; a second Ctrl-C stops it at once.
    """
    if port is not None and listen is not None:
        raise UsageError("usage", "--port and --listen both set the port", "pass only one of them")
    target = Target.of(context, url, None, as_json=as_json)
    address = listen or (None if port is None else f"127.0.0.1:{port}")
    if address is None and not os.environ.get("FF_LISTEN_ADDR"):
        # Even with a token, which would otherwise open it to the network.
        address = f"127.0.0.1:{DEFAULT_PORT}"
    load_settings(None, (), {} if address is None else {"FF_LISTEN_ADDR": address})
    config = check_settings()
    as_json = set_up_logs(log_level, as_json=as_json)
    if log_level is None:
        for name in _ROUTINE:
            logging.getLogger(name).setLevel(logging.WARNING)
    location = ServerLocation(target.url)
    given: dict[str, str | None] = {
        "--concurrency": str(concurrency),
        "--grace": f"{grace}s",
        "--lanes": ",".join(lanes or ()),
        "--capabilities": ",".join(capabilities or ()),
        "--log-level": log_level,
        "--url": target.url,
        "--namespace": target.namespace,
    }
    command = ["worker", application, "--no-scanners", "--processes", str(processes)]
    command += [part for name, text in given.items() if text for part in (name, text)]
    command += ["--json"] if as_json else []
    folders = [Path.cwd(), *(each.absolute() for each in watch or ())] if reload else []
    development = _Development(location, command, processes, folders, as_json=as_json)
    try:
        with asyncio.Runner() as runner:
            code = runner.run(development.run(ServerProcess.start(config, location, warn=False)))
    finally:
        location.close()
        flush_logs()
    raise typer.Exit(code)


class _Development:
    """One run of `flowfabric dev`."""

    def __init__(
        self,
        location: ServerLocation,
        command: list[str],
        count: int,
        folders: list[Path],
        *,
        as_json: bool,
    ) -> None:
        self._where = describe_location(location)
        self._command = command
        self._count = count
        self._folders = folders
        self._as_json = as_json
        self._workers: Supervisor | None = None
        self._stopping = asyncio.Event()
        self._server: ServerProcess | None = None
        self._introduced = False

    async def run(self, start: Coroutine[Any, Any, ServerProcess]) -> int:
        """Serve until a signal arrives; returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        self._server = server = await start_unless(self._stopping, start)
        if server is None:
            return 0
        try:
            return await self._serve()
        finally:
            await server.stop()

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            if self._workers is not None:
                self._workers.kill(number)
            # Killing a server is safe at any point: the engine keeps every state.
            flush_logs()
            os._exit(128 + number)
        self._stopping.set()
        log_always(logging.INFO, "stopping", action="dev_stopping")
        if self._workers is not None:
            self._workers.stop(number)

    async def _serve(self) -> int:
        """Run the workers, again after each change."""
        files = ProjectFiles(self._folders)
        stopping = asyncio.create_task(self._stopping.wait())
        while not self._stopping.is_set():
            self._workers = workers = self._supervisor()
            running = asyncio.create_task(workers.run())
            changed = asyncio.create_task(files.changed())
            await asyncio.wait((stopping, running, changed), return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not stopping.done():
                if not self._folders:
                    changed.cancel()
                    return running.result()
                self._introduce(None)
                text = "the worker did not start; waiting for a file to change"
                log.error(text, extra={"action": "dev_worker_failed"})
                await asyncio.wait((stopping, changed), return_when=asyncio.FIRST_COMPLETED)
            if changed.done():
                self._announce(changed.result())
                workers.stop()
            changed.cancel()
            await running
        return 0

    def _supervisor(self) -> Supervisor:
        # Do not use compiled files: Python considers them current if a file is saved twice within
        # a second and keeps its size.
        variables = {"PYTHONDONTWRITEBYTECODE": "1"}
        return Supervisor(
            self._command, self._count, first_ready=self._introduce, variables=variables
        )

    def _announce(self, changed: list[str]) -> None:
        names = [shown(os.path.relpath(path)) for path in changed]
        more = f" and {plural(len(names) - _LISTED, 'other file')}" if len(names) > _LISTED else ""
        text = f"{', '.join(names[:_LISTED])}{more} changed: restarting the worker"
        log.info(text, extra={"action": "dev_reload", "files": names})

    def _introduce(self, facts: Facts | None) -> None:
        """Print the banner once; after a reload, print only what the new worker serves."""
        if facts is not None and facts["deployment"] != self._where:
            extra = {"action": "dev_other_deployment"}
            text = "the application uses %s, but the API uses %s: set --url or FF_URL for both"
            log.warning(text, facts["deployment"], self._where, extra=extra)
        tasks = "none yet: the application cannot be loaded" if facts is None else facts["tasks"]
        if self._introduced:
            if facts is not None:
                log.info("serving %s", listed(tasks), extra={"action": "dev_serving"})
            return
        self._introduced = True
        assert self._server is not None
        address = f"http://{host_port(*self._server.address)}"
        shown_facts: dict[str, Cell] = {
            "API": address,
            "docs": f"{address}/docs",
            "tokens": openness(self._server),
            "deployment": self._where,
            "tasks": listed(tasks),
            "reload": self._watched(),
        }
        if self._as_json:
            log.info("dev ready", extra={"action": "dev_ready", **shown_facts})
            return
        screen = Screen()
        screen.line((f"FlowFabric {__version__} dev", "bold"))
        screen.facts(list(shown_facts.items()))
        if facts is not None:
            screen.line(("Ready. Ctrl-C stops everything after running tasks finish.", "green"))
        sys.stdout.flush()

    def _watched(self) -> str:
        if not self._folders:
            return "off"
        folders = ", ".join(shlex.quote(os.path.relpath(each)) for each in self._folders)
        return f"on changes to Python files in {folders}"
