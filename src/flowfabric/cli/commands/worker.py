"""`flowfabric worker`."""

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import typer

from flowfabric import __version__
from flowfabric.app.fabric import Fabric
from flowfabric.app.stopping import ends_within, on_signals
from flowfabric.app.worker import AppWorker
from flowfabric.cli import options
from flowfabric.cli.errors import report
from flowfabric.cli.loader import load_app
from flowfabric.cli.logs import Level, flush_logs, set_up_logs
from flowfabric.cli.options import Target, argument, flag, value
from flowfabric.cli.processes import Facts, Member, Supervisor
from flowfabric.cli.session import describe_location
from flowfabric.cli.settings import Assignments, File, load_settings
from flowfabric.cli.views.screen import Screen
from flowfabric.core.capabilities import normalise
from flowfabric.core.errors import FlowFabricError
from flowfabric.core.ids import validate_lane, validate_namespace
from flowfabric.core.text import duration
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.connect import ServerLocation
from flowfabric.sdk.logs import log_always
from flowfabric.sdk.runtime import RunSummary
from flowfabric.sdk.service import service_runner

log = logging.getLogger(__name__)

_MAX_LISTED = 12
_CLOSING_S = 2.0


def _parse_application(text: str) -> str:
    module, _, attribute = text.partition(":")
    if not module or not attribute or "/" in module or module.endswith(".py"):
        module = module.removesuffix(".py").strip("./").replace("/", ".")
        suggestion = f"{module or 'app'}:{attribute or 'app'}"
        problem = f"{text!r} does not have the form module:app; did you mean {suggestion}?"
        raise typer.BadParameter(problem)
    return text


APPLICATION = argument(
    "MODULE:APP",
    "The application to run, such as `app:app` or `shop.tasks:fabric`.",
    parser=_parse_application,
)
LANES = value(
    "A,B",
    "Serve these lanes instead of the lanes of the application's tasks.",
    parser=partial(options.checked_names, validate_lane),
)
CAPABILITIES = value(
    "GPU,…",
    "The capabilities that this worker offers.",
    parser=partial(options.checked_names, lambda name: normalise([name], "worker")),
)
_NAMESPACES = value(
    "A,B",
    "Serve these namespaces instead of the application's own; * serves all. A single name also "
    "replaces the application's namespace.",
    "--namespace",
    parser=partial(options.checked_names, validate_namespace),
)
_LEASE_TTL = options.duration("How long a lease lasts if it is not renewed.", "1s", "7d")
_BLOCK_LIMIT = options.duration(
    "How long a task may block the event loop before the worker releases its other tasks. "
    "The default is three times --lease-ttl.",
    *("1s", "7d"),
)
_SCANNERS = flag(
    "--scanners/--no-scanners", "Run background jobs: retries, expired leases, deadlines."
)
_GRACE = options.duration("How long to wait for running tasks before releasing them.")
PROCESSES = value("N", "Run N worker processes, each with its own concurrency.", min=1, max=1000)
_ON_UNKNOWN = value(
    "release|fail",
    "What to do with unknown tasks: release them to workers that know them, or fail them.",
)
_METRICS_PORT = value(
    "PORT",
    "Serve Prometheus metrics on this port. With --processes, the others use the ports after it.",
    min=1,
    max=65535,
)
_METRICS_HOST = value("ADDRESS", "The address that --metrics-port listens on.")


def worker(
    context: typer.Context,
    application: Annotated[str, APPLICATION],
    *,
    concurrency: Annotated[int, value("N", "How many tasks run at once.", min=1, max=100_000)] = 64,
    lanes: Annotated[Sequence[str] | None, LANES] = None,
    capabilities: Annotated[Sequence[str] | None, CAPABILITIES] = None,
    # The parser reads defaults too.
    lease_ttl: Annotated[float, _LEASE_TTL] = "30s",  # pyright: ignore[reportArgumentType]
    block_limit: Annotated[float | None, _BLOCK_LIMIT] = None,
    scanners: Annotated[bool, _SCANNERS] = True,
    grace: Annotated[float, _GRACE] = "30s",  # pyright: ignore[reportArgumentType]
    on_unknown: Annotated[Literal["release", "fail"], _ON_UNKNOWN] = "release",
    processes: Annotated[int, PROCESSES] = 1,
    metrics_port: Annotated[int | None, _METRICS_PORT] = None,
    metrics_host: Annotated[str, _METRICS_HOST] = "127.0.0.1",
    log_level: Annotated[
        Level | None, value("LEVEL", "The lowest level to log: debug, info, warning or error.")
    ] = None,
    as_json: options.JsonLogs = False,
    namespace: Annotated[Sequence[str] | None, _NAMESPACES] = None,
    config: File = None,
    assignments: Assignments = None,
    url: options.Url = None,
) -> None:
    """Run the tasks of an application until SIGTERM or Ctrl-C.

    The first signal stops the worker after running tasks finish; the second stops it at once. A
    task that ignores cancellation or blocks the process delays the stop by at most the grace
    period and a few seconds.

    With --processes, a process that dies is restarted, and every log line names its process.
    """
    # What handlers print must appear immediately, even in a pipe.
    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)
    load_settings(config, assignments, {})
    target = Target.of(context, url, None, as_json=as_json)
    member = Member.current()
    label = member.number if member is not None and member.count > 1 else None
    as_json = set_up_logs(log_level, as_json=as_json, process=label)
    if processes > 1 and member is None:
        raise typer.Exit(_supervise(processes, as_json=as_json))
    serve_metrics = None
    if metrics_port is not None:
        port = metrics_port + (member.number - 1 if member else 0)
        serve_metrics = _keep_metrics(port, metrics_host)
    app = load_app(application)
    if target.url is not None:
        app.location = ServerLocation(target.url)
    served = namespace or ([] if target.namespace is None else [target.namespace])
    if len(served) == 1 and served != ["*"]:
        (app.namespace,) = served
    runner = app.worker(
        concurrency=concurrency,
        lanes=lanes,
        capabilities=capabilities or (),
        namespaces=served,
        lease_ttl=lease_ttl,
        block_limit=block_limit,
        scanners=scanners,
        on_unknown_kind=on_unknown,
    )
    _serve(app, runner, grace, member, serve_metrics, as_json=as_json)


def _keep_metrics(port: int, host: str) -> Callable[[Backend], Any]:
    """Enable metrics before anything connects; returns the function that serves them."""
    from flowfabric import observability  # noqa: PLC0415 - only where metrics are wanted

    observability.enable()
    return partial(observability.serve, port=port, host=host)


def _supervise(count: int, *, as_json: bool) -> int:
    """Run worker processes until a signal stops them; returns their worst exit status."""
    started = time.monotonic()

    def first_ready(facts: Facts) -> None:
        if not as_json:
            _print_banner(facts)

    def all_ready() -> None:
        if as_json:
            extra = {"action": "workers_ready", "processes": count}
            log.info("%d worker processes ready", count, extra=extra)
        else:
            _print_ready(f"All {count} processes are ready. Ctrl-C or SIGTERM stops them")

    async def run() -> int:
        workers = Supervisor(sys.argv[1:], count, first_ready=first_ready, all_ready=all_ready)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, workers.on_signal, number)
        return await workers.run()

    code = asyncio.run(run())
    ran_ms = round((time.monotonic() - started) * 1000)
    log_always(
        logging.INFO,
        f"stopped after {duration(ran_ms)}",
        action="workers_stopped",
        ran_ms=ran_ms,
        status=code,
    )
    flush_logs()
    return code


def _serve(
    app: Fabric,
    worker: AppWorker,
    grace_s: float,
    member: Member | None,
    serve_metrics: Callable[[Backend], Any] | None,
    *,
    as_json: bool,
) -> None:
    """Run the worker until a signal stops it, and print a summary."""
    started = time.monotonic()
    runner = service_runner()
    try:
        summary = runner.run(_run(app, worker, grace_s, member, serve_metrics, as_json=as_json))
    except BaseException as error:
        flush_logs()
        with ends_within(_CLOSING_S, 1, partial(_report, error, as_json=as_json)):
            runner.close()
        raise
    ran_ms = round((time.monotonic() - started) * 1000)
    _print_summary(summary, ran_ms, as_record=as_json or member is not None)
    # Closing waits for threads and for tasks that ignore cancellation.
    with ends_within(_CLOSING_S, 0, lambda: None):
        runner.close()


def _report(error: BaseException, *, as_json: bool) -> None:
    if isinstance(error, FlowFabricError):
        report(error, as_json=as_json)


async def _run(
    app: Fabric,
    worker: AppWorker,
    grace_s: float,
    member: Member | None,
    serve_metrics: Callable[[Backend], Any] | None,
    *,
    as_json: bool,
) -> RunSummary:
    with contextlib.ExitStack() as running:

        def ready() -> None:
            if serve_metrics is not None and worker.backend is not None:
                running.callback(serve_metrics(worker.backend).close)
            ask_to_stop = running.enter_context(
                on_signals(
                    worker.stop,
                    announce=partial(worker.announce_stop, grace_s),
                    grace_s=grace_s,
                    release=worker.release_leases,
                )
            )
            facts = _facts(app, worker, member)
            if as_json:
                log.info("worker ready", extra={"action": "worker_ready", **facts})
            elif member is None:
                del facts["processes"]
                _print_banner(facts)
                _print_ready("Ready. Ctrl-C or SIGTERM stops it")
            if as_json or member is None or member.number == 1:
                _warn_of_unserved_lanes(app, worker)
            if member is not None:
                del facts["worker"]
                member.serve(facts, ask_to_stop)

        try:
            return await worker.run(grace_s=grace_s, signals=False, ready=ready)
        finally:
            await app.aclose()


def _facts(app: Fabric, worker: AppWorker, member: Member | None) -> Facts:
    config = worker.config
    return {
        "processes": 1 if member is None else member.count,
        "deployment": describe_location(app.location),
        "namespace": ", ".join(config.namespaces) or app.namespace,
        "lanes": list(config.lanes),
        "tasks": sorted(app.tasks),
        "concurrency": config.permits,
        "capabilities": list(config.capabilities),
        "worker": config.worker_instance_id,
    }


def _print_banner(facts: Facts) -> None:
    screen = Screen()
    screen.line((f"FlowFabric {__version__} worker", "bold"))
    screen.facts([(name, listed(value)) for name, value in facts.items() if value])
    sys.stdout.flush()


def _print_ready(text: str) -> None:
    Screen().line((f"{text} after running tasks finish.", "green"))
    sys.stdout.flush()


def listed(value: str | int | list[str]) -> str:
    """A list as text, shortened if it is long."""
    if not isinstance(value, list):
        return str(value)
    more = len(value) - _MAX_LISTED
    return ", ".join(value[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _warn_of_unserved_lanes(app: Fabric, worker: AppWorker) -> None:
    """Warn about lanes of the tasks that are not served; a mistyped lane looks like an idle one."""
    for lane in sorted({task.lane for task in app.tasks.values()} - set(worker.config.lanes)):
        log.warning(
            "lane %s has tasks in this app, but this worker does not serve it",
            lane,
            extra={"action": "lane_not_served"},
        )


def _print_summary(summary: RunSummary, ran_ms: int, *, as_record: bool) -> None:
    if as_record:
        counts: dict[str, int] = msgspec.structs.asdict(summary)
        text = f"stopped after {duration(ran_ms)}: {summary}"
        log_always(logging.INFO, text, action="worker_stopped", ran_ms=ran_ms, **counts)
        return
    flush_logs()
    Screen().line(("Stopped", "bold"), f" after {duration(ran_ms)}: {summary}.")
    sys.stdout.flush()
