"""Running a worker process: its banner, its event loop, its summary."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from flowfabric import __version__
from flowfabric.app.fabric import Fabric
from flowfabric.app.place import Place
from flowfabric.app.stopping import Overdue, ends_within, on_signals
from flowfabric.app.worker import AppWorker
from flowfabric.cli.errors import report
from flowfabric.cli.loader import load_app
from flowfabric.cli.logs import flush, set_up
from flowfabric.cli.options import Target
from flowfabric.cli.screen import Screen
from flowfabric.cli.session import data_folder
from flowfabric.cli.words import clean, duration, plural
from flowfabric.core.errors import FlowFabricError
from flowfabric.core.ids import validate_namespace
from flowfabric.sdk.runtime import RunSummary

__all__ = ["Plan", "serve"]

log = logging.getLogger(__name__)

_SHOWN_TASKS = 12
_CLOSING_S = 2.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How the worker is to run."""

    concurrency: int
    lanes: list[str]
    capabilities: list[str]
    lease_ttl_s: float
    scanners: bool
    grace_s: float
    on_unknown: Literal["fail", "release"]
    log_level: str | None
    json_logs: bool


def serve(application: str, target: Target, plan: Plan) -> None:
    """Load the application and run its tasks until a signal ends the process."""
    as_json = set_up(plan.log_level, as_json=plan.json_logs)
    app = load_app(application)
    if target.url is not None:
        app.place = Place(target.url)
    if target.namespace is not None:
        app.namespace = validate_namespace(target.namespace)
    worker = app.worker(
        concurrency=plan.concurrency,
        lanes=plan.lanes or None,
        capabilities=plan.capabilities,
        lease_ttl=plan.lease_ttl_s,
        scanners=plan.scanners,
        on_unknown_kind=plan.on_unknown,
    )
    started = time.monotonic()
    runner = asyncio.Runner(loop_factory=_loop_factory())
    try:
        summary = runner.run(_run(app, worker, plan, as_json=as_json))
    except BaseException as error:
        problem = error
        flush()
        with ends_within(_CLOSING_S, 1, lambda: _tell(problem)):
            runner.close()
        raise
    _report_end(summary, round((time.monotonic() - started) * 1000), as_json=as_json)
    # Closing waits for tasks that ignore their cancellation, and for threads.
    with ends_within(_CLOSING_S, 0, lambda: None):
        runner.close()


def _tell(error: BaseException) -> None:
    if isinstance(error, FlowFabricError):
        report(error, as_json=False)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _run(app: Fabric, worker: AppWorker, plan: Plan, *, as_json: bool) -> RunSummary:
    if app.place.embedded:
        # Its server starts with the worker, once the settings are known to be right.
        where = f"embedded Valkey in {data_folder()}"
    else:
        where = (await app.place.address()).peer

    overdue = Overdue(plan.grace_s, worker.give_back)

    with contextlib.ExitStack() as signals:

        def ready() -> None:
            signals.enter_context(on_signals(worker.stop, overdue))
            _announce(app, worker, where, as_json=as_json)
            _warn_of_unserved(app, worker)

        try:
            return await worker.run(grace_s=plan.grace_s, signals=False, ready=ready)
        finally:
            await app.aclose()


def _announce(app: Fabric, worker: AppWorker, where: str, *, as_json: bool) -> None:
    config = worker.config
    facts = {
        "address": where,
        "namespace": app.namespace,
        "lanes": ", ".join(map(clean, config.lanes)),
        "tasks": _named(sorted(app.tasks)),
        "concurrency": str(config.permits),
        "capabilities": ", ".join(map(clean, config.capabilities)),
        "worker": config.worker_instance_id,
    }
    if as_json:
        log.info(
            "worker ready",
            extra={
                "action": "worker_ready",
                **facts,
                "lanes": list(config.lanes),
                "tasks": sorted(app.tasks),
                "concurrency": config.permits,
                "capabilities": list(config.capabilities),
            },
        )
        return
    screen = Screen()
    screen.line((f"FlowFabric {__version__} worker", "bold"))
    screen.facts([(name, value) for name, value in facts.items() if value])
    screen.line(("Ready. Ctrl-C or SIGTERM lets running tasks finish.", "green"))
    sys.stdout.flush()


def _named(tasks: list[str]) -> str:
    shown = ", ".join(map(clean, tasks[:_SHOWN_TASKS]))
    more = len(tasks) - _SHOWN_TASKS
    return f"{shown} and {more} more" if more > 0 else shown


def _warn_of_unserved(app: Fabric, worker: AppWorker) -> None:
    """A mistyped lane would otherwise look like a worker without work."""
    served = set(worker.config.lanes)
    named = {task.lane for task in app.tasks.values()}
    for lane in sorted(named - served):
        log.warning(
            "tasks of this app submit to lane %s, which this worker does not serve",
            lane,
            extra={"action": "lane_not_served"},
        )


def _report_end(summary: RunSummary, ran_ms: int, *, as_json: bool) -> None:
    counts: dict[str, int] = msgspec.structs.asdict(summary)
    if as_json:
        log.info("worker stopped", extra={"action": "worker_stopped", "ran_ms": ran_ms, **counts})
        return
    flush()
    told = [f"{count:,} {name}" for name, count in counts.items() if count]
    work = ", ".join(told) or plural(0, "task")
    Screen().line(("Stopped", "bold"), f" after {duration(ran_ms)}: {work}.")
    sys.stdout.flush()
