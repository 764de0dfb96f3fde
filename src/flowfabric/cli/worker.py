"""`flowfabric worker`: run the tasks of an application."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from flowfabric.cli.options import Target, UrlOption, checked, names, seconds, within
from flowfabric.core.capabilities import normalise
from flowfabric.core.ids import validate_lane

__all__ = ["worker"]


class OnUnknown(StrEnum):
    """The choices of `--on-unknown`."""

    FAIL = "fail"
    RELEASE = "release"


def worker(
    context: typer.Context,
    application: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:APP",
            help="Where the Fabric is, such as `app:app` or `shop.tasks:fabric`.",
            show_default=False,
        ),
    ],
    *,
    concurrency: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="Tasks that run at the same time.")
    ] = 64,
    lanes: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Serve these lanes; else those that the tasks name."),
    ] = None,
    capabilities: Annotated[
        str | None, typer.Option(metavar="GPU,…", help="What this machine offers to tasks.")
    ] = None,
    lease_ttl: Annotated[
        float,
        typer.Option(
            parser=within("1s", "7d"),
            metavar="DURATION",
            help="How long the work of a dead worker stays reserved.",
        ),
    ] = "30s",  # pyright: ignore[reportArgumentType] - read by the parser
    scanners: Annotated[
        bool,
        typer.Option(
            "--scanners/--no-scanners",
            help="Take part in the deployment's upkeep: retries, lost leases, deadlines.",
        ),
    ] = True,
    grace: Annotated[
        float,
        typer.Option(
            parser=seconds,
            metavar="DURATION",
            help="When stopped, wait so long for running tasks, then give them back.",
        ),
    ] = "30s",  # pyright: ignore[reportArgumentType] - read by the parser
    on_unknown: Annotated[
        OnUnknown,
        typer.Option(
            metavar="fail|release",
            help="What to do with a task this app does not have: release it for another worker "
            "while two versions of an app serve one lane.",
        ),
    ] = OnUnknown.FAIL,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")
    ] = None,
    json_logs: Annotated[
        bool, typer.Option("--json-logs", help="Log one JSON object a line.")
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="NAME", help="Use this instead of the app's own."),
    ] = None,
    url: UrlOption = None,
) -> None:
    """Run the tasks of an application until SIGTERM or Ctrl-C.

    The first signal lets running tasks finish, the second ends at once. A task that ignores its
    end, or blocks the process, keeps it no longer than the grace and some seconds.
    """
    module, colon, attribute = application.partition(":")
    if not colon or not module or not attribute or "/" in module or module.endswith(".py"):
        raise typer.BadParameter(_form(application), param_hint="MODULE:APP")
    if log_level is not None and log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(
            f"{log_level!r} is not one of debug, info, warning, error", param_hint="--log-level"
        )
    plan_lanes, offered = names(lanes, "--lanes"), names(capabilities, "--capabilities")
    for lane in plan_lanes:
        checked(validate_lane, lane, "--lanes")
    for capability in offered:
        checked(lambda one: normalise([one], "worker"), capability, "--capabilities")
    # The engine is loaded for a run only: `flowfabric --help` stays quick.
    from flowfabric.cli.serve import Plan, serve  # noqa: PLC0415

    serve(
        application,
        Target.of(context, url, namespace),
        Plan(
            concurrency=concurrency,
            lanes=plan_lanes,
            capabilities=offered,
            lease_ttl_s=lease_ttl,
            scanners=scanners,
            grace_s=grace,
            on_unknown=on_unknown.value,
            log_level=log_level,
            json_logs=json_logs,
        ),
    )


def _form(text: str) -> str:
    module, _, attribute = text.partition(":")
    module = module.removesuffix(".py").strip("./").replace("/", ".")
    wanted = f"{module or 'app'}:{attribute or 'app'}"
    return f"{text!r} is not of the form module:app; did you mean {wanted}?"
