"""`flowfabric server` and `config`."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from flowfabric import __version__
from flowfabric.cli import options
from flowfabric.cli.early import take_early_records
from flowfabric.cli.errors import UsageError
from flowfabric.cli.logs import Level, flush_logs, log_settings, set_up_logs
from flowfabric.cli.options import Target, flag, value
from flowfabric.cli.session import describe_location
from flowfabric.cli.settings import Assignments, File, load_settings
from flowfabric.cli.views.screen import Row, Screen, print_json
from flowfabric.core.text import host_port, shown
from flowfabric.engine.connect import ServerLocation, check_environment
from flowfabric.sdk.service import service_runner
from flowfabric.server import config as settings
from flowfabric.server.auth import read_tokens
from flowfabric.server.config import ServerConfig, misspelled
from flowfabric.server.process import ServerProcess

log = logging.getLogger(__name__)


def check_settings() -> ServerConfig:
    """The settings of a server; a bad one is a `ConfigError` that names it."""
    config = ServerConfig.from_env()
    if config.tokens_file is not None:
        read_tokens(config.tokens_file)
    check_environment()
    log_settings()
    return config


def _warnings(config: ServerConfig) -> list[str]:
    """What is allowed, but probably a mistake."""
    found = [
        f"{shown(name)} is not a setting; did you mean {meant}?"
        for name, meant in misspelled(os.environ)
    ]
    path = config.tokens_file
    if path is not None and not path.exists():
        text = f"FF_API_TOKENS_FILE: {shown(str(path))} does not exist, so no token of it is valid."
        found.append(f"{text} Create one with: flowfabric tokens create")
    return found


def server(
    context: typer.Context,
    *,
    listen: Annotated[
        str | None, value("HOST:PORT", "The address to listen on. Overrides FF_LISTEN_ADDR.")
    ] = None,
    config: File = None,
    assignments: Assignments = None,
    check_config: Annotated[
        bool, flag("--check-config", "Check the settings and exit without connecting.")
    ] = False,
    log_level: Annotated[
        Level | None, value("LEVEL", "The lowest level to log: debug, info, warning or error.")
    ] = None,
    http: Annotated[
        bool, flag("--http/--no-http", "Serve the API, or only run the scanners.")
    ] = True,
    as_json: options.JsonLogs = False,
    url: options.ValkeyUrl = None,
) -> None:
    """Serve the REST API until SIGTERM or Ctrl-C.

    Also runs the scanners and the event dispatcher; with --no-http, only those. The first signal
    lets running requests finish; the second stops at once. Several servers can use one deployment.
    """
    if listen is not None and not http:
        problem = "--listen sets an address, but --no-http serves none"
        raise UsageError("usage", problem, "pass only one of them")
    target = Target.of(context, url, None, as_json=as_json)
    load_settings(config, assignments, {} if listen is None else {"FF_LISTEN_ADDR": listen})
    checked = check_settings()
    location = ServerLocation(target.url)
    location.check_server(has_secret=checked.has_hmac_secret)
    if check_config:
        early = [record.getMessage() for record in take_early_records()]
        _print_check([*early, *_warnings(checked)], as_json=as_json)
        return
    as_json = set_up_logs(log_level, as_json=as_json)
    for text in _warnings(checked):
        log.warning(text, extra={"action": "setting_doubtful"})
    try:
        with service_runner() as runner:
            start = ServerProcess.start(checked, location, http=http)
            runner.run(_serve(start, location, as_json=as_json))
    finally:
        location.close()
        flush_logs()


def _print_check(warnings: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json({"valid": True, "warnings": warnings})
        return
    screen = Screen()
    for text in warnings:
        screen.line(("warning: ", "yellow"), text)
    screen.line("The settings are valid.")


async def start_unless(
    asked: asyncio.Event, start: Coroutine[Any, Any, ServerProcess]
) -> ServerProcess | None:
    """A running server; None if a signal stops it before it is ready."""
    starting, stopping = asyncio.create_task(start), asyncio.create_task(asked.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
    return None if starting.cancelled() else starting.result()


async def _serve(
    start: Coroutine[Any, Any, ServerProcess], location: ServerLocation, *, as_json: bool
) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if asked.is_set():
            # Killing a server is safe at any point: the engine keeps every state.
            flush_logs()
            os._exit(128 + number)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    running = await start_unless(asked, start)
    if running is None:
        log.info("stopped before the server was ready", extra={"action": "server_stopped"})
        return
    try:
        if as_json:
            extra = {"action": "server_ready", **_facts(running, location)}
            log.info("server ready", extra=extra)
        else:
            _print_banner(running, location)
        await asked.wait()
    finally:
        await running.stop()


def openness(running: ServerProcess) -> str:
    """Who can call a server."""
    if running.app.tokens.required:
        return "required"
    if settings.is_loopback(running.address[0]):
        return "none: open to this machine"
    return "none: open to everyone who can reach this address"


def _facts(running: ServerProcess, location: ServerLocation) -> dict[str, str]:
    deployment = describe_location(location)
    if not running.serves_http:
        return {"address": "none: only the scanners run", "deployment": deployment}
    address = f"http://{host_port(*running.address)}"
    return {"address": address, "deployment": deployment, "tokens": openness(running)}


def _print_banner(running: ServerProcess, location: ServerLocation) -> None:
    screen = Screen()
    screen.line((f"FlowFabric {__version__} server", "bold"))
    screen.facts(list(_facts(running, location).items()))
    when = " after running requests finish" if running.serves_http else ""
    screen.line((f"Ready. Ctrl-C or SIGTERM stops it{when}.", "green"))
    sys.stdout.flush()


def config(
    *,
    file: File = None,
    assignments: Assignments = None,
    all_settings: Annotated[bool, flag("--all", "Include settings at their defaults.")] = False,
    as_json: options.Json = False,
) -> None:
    """Print the settings of a server and their sources.

    Secrets are not printed. With --json, prints one JSON object per line.
    """
    given = load_settings(file, assignments, {})
    shown = [
        each
        for each in settings.effective(given, check_settings())
        if all_settings or as_json or each.source != "default"
    ]
    if as_json:
        print_json(*shown)
    elif shown:
        rows: list[Row] = [
            {"SETTING": (each.name, "bold"), "VALUE": each.value or "-", "SOURCE": each.source}
            for each in shown
        ]
        Screen().table(rows)
    else:
        Screen().line("All settings have their default values. List them with --all.")
