"""`flowfabric bench`: cheap to import; what it measures with is loaded when it runs."""

import json
import sys
from typing import Annotated, Literal

import typer

Aof = Literal["no", "everysec", "always"]
# fmt: off
Scenario = Literal[
    "lifecycle", "floor", "latency", "memory", "idle",
    "backlog", "recovery", "resume", "stream", "tokens",
    "chain", "fanout", "cancel",
]
# fmt: on

_HELP = """Measure this machine on a private, temporary Valkey.

\b
lifecycle  submit_many, then one worker runs a no-op for each:
           n / (submit time + process time). No worker runs while submitting;
           processing is from the first handler to the last completion.
           --unbatched: a submit call carries one execution and a claim takes
           one, with 64 callers and a worker process of 64 slots at the same
           time: n / time of the whole. serial_per_s is the same with one
           caller and one slot, where the machine's round trip (ping_us) counts.
floor      the same transitions as raw batched calls, prepared beforehand
latency    idle worker process: submit to handler start and to result seen
memory     bytes of an execution with a 200-byte payload in each state
idle       commands of 1 and of 100 idle workers; what 100 cost a submitter
           on another lane, and on its lane but unable to take the work,
           against a second server without workers, in turns
backlog    one claim at a time with a thousand and with n waiting, in turns
recovery   kill -9 of a worker until its n executions run in another
           process, lease 2 s; it did or did not also run the scanners
resume     idle worker process: signal to the waiting handler having it, one
           at a time; then n that wait at once: n / time until all have ended
stream     n frames of one task and of ten, all stored; a frame until the tail
           of its stream has it, one tail and 100 on 100 streams; calls beside
           100 waiting tails against calls beside one, in turns
tokens     n forged, cut, altered and misplaced waitpoint tokens are tried
chain      idle worker process: submit of a flow of ten members, one after the
           other, until it has finished, n / 10 times; then n flows, submitted
           and run at the same time: n / time of the whole
fanout     a member that 1,000 wait for completes, until all of them can run;
           then the whole flow of 1,002 members in a worker process; n times
cancel     n flows of 1,002 waiting members: members / time until all are
           cancelled; one of 10, 100 and 1,000 running siblings completes,
           until a join that needs only one has cancelled the others
"""


def bench(
    scenario: Annotated[Scenario, typer.Argument(show_default=False)],
    *,
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            min=1,
            help="Executions, frames, tokens or flows; each scenario has its own default.",
        ),
    ] = None,
    aof: Annotated[Aof, typer.Option(help="The server's append-only file.")] = "no",
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Runs; the median one is reported.")
    ] = None,
    unbatched: Annotated[
        bool,
        typer.Option("--unbatched", help="lifecycle: one execution per submit call and per claim."),
    ] = False,
    with_floor: Annotated[
        bool, typer.Option("--with-floor", help="lifecycle: measure the floor too, and the ratio.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    for given, name in ((unbatched, "--unbatched"), (with_floor, "--with-floor")):
        if given and scenario != "lifecycle":
            raise typer.BadParameter(f"{name} belongs to the lifecycle scenario")
    # Engine, event loop and tables are loaded for a run only: `flowfabric --help` stays quick.
    import uvloop  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    from flowfabric.bench.report import Options, Progress, as_table  # noqa: PLC0415
    from flowfabric.bench.scenarios import MEASUREMENTS, measure  # noqa: PLC0415
    from flowfabric.core.errors import FlowFabricError  # noqa: PLC0415

    usual = MEASUREMENTS[scenario]
    options = Options(n=n or usual.n, aof=aof, unbatched=unbatched, with_floor=with_floor)
    try:
        with Progress() as progress:
            report = uvloop.run(measure(scenario, options, repeat or usual.repeat, progress))
    except FlowFabricError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        Console().print(as_table(report))


def register(app: typer.Typer) -> None:
    """Add the `bench` command to an application."""
    app.command("bench", help=_HELP)(bench)
