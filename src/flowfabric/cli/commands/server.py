"""`flowfabric server` and `config`."""

import asyncio
import os
import signal
import sys
from typing import Annotated

import typer

from flowfabric import __version__
from flowfabric.cli import options
from flowfabric.cli.logs import Level, flush_logs, log_settings, set_up_logs
from flowfabric.cli.options import Target, flag, value
from flowfabric.cli.session import describe_location
from flowfabric.cli.settings import Assignments, File, load_settings
from flowfabric.cli.views.screen import Row, Screen, print_json
from flowfabric.engine.connect import ServerLocation, check_environment
from flowfabric.server import config as settings
from flowfabric.server.auth import read_tokens
from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess


def check_settings() -> ServerConfig:
    """The settings of a server; a bad one is a `ConfigError` that names it."""
    config = ServerConfig.from_env()
    if config.tokens_file is not None:
        read_tokens(config.tokens_file)
    check_environment()
    log_settings()
    return config


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
    json_logs: Annotated[bool, flag("--json-logs", "Log one JSON object per line.")] = False,
    url: options.Url = None,
) -> None:
    """Serve the REST API until SIGTERM or Ctrl-C.

    Also runs the scanners. The first signal lets running requests finish; the second
    stops at once. Several servers can use one deployment.
    """
    target = Target.of(context, url, None, as_json=json_logs)
    load_settings(config, assignments, {} if listen is None else {"FF_LISTEN_ADDR": listen})
    checked = check_settings()
    location = ServerLocation(target.url)
    location.check_server(has_secret=checked.has_hmac_secret)
    if check_config:
        Screen().line("The settings are valid.")
        return
    as_json = set_up_logs(log_level, as_json=json_logs)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(checked, location, as_json=as_json))
    finally:
        location.close()
        flush_logs()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return None
    return uvloop.Loop


async def _serve(config: ServerConfig, location: ServerLocation, *, as_json: bool) -> None:
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
    running = await ServerProcess.start(config, location)
    try:
        if not as_json:
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


def _print_banner(running: ServerProcess, location: ServerLocation) -> None:
    host, port = running.address
    screen = Screen()
    screen.line((f"FlowFabric {__version__} server", "bold"))
    facts = [
        ("address", f"http://{host}:{port}"),
        ("deployment", describe_location(location)),
        ("tokens", openness(running)),
    ]
    screen.facts(facts)
    screen.line(("Ready. Ctrl-C or SIGTERM stops it after running requests finish.", "green"))
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
