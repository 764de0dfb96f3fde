"""`flowfabric bench`: cheap to import; the measuring code is loaded when it runs."""

import json
import sys
from typing import Annotated, Literal

import typer
from typer.core import TyperCommand

Aof = Literal["no", "everysec", "always"]
# fmt: off
Scenario = Literal[
    "lifecycle", "floor", "latency", "memory", "idle", "lanes",
    "backlog", "recovery", "resume", "stream", "tokens",
    "chain", "fanout", "cancel", "http", "remote", "admission",
    "routed", "fairness",
]
# fmt: on

_HELP = """Measure this machine on a private, temporary Valkey.

\b
lifecycle  Submits n executions, then one worker runs a no-op for each. The
           figure is n / (submit time + process time); processing lasts from
           the first handler to the last completion. With --unbatched, each
           call submits or claims one execution, with 64 callers and a worker
           process of 64 slots at the same time: n / total time. serial_per_s
           is the same with one caller and one slot, where the round trip
           (ping_us) matters.
floor      The same state changes as raw batched calls, prepared in advance.
latency    From submit to handler start and to result, on an idle worker.
memory     Bytes per execution in each state, with a 200-byte payload.
idle       Commands per second of 1 and of 100 idle workers. How much 100 idle
           workers slow down a submitter of n executions: on another lane, and
           on its own lane but unable to run its work. Compared with the same
           submitter right before they start and right after they stop.
lanes      One worker runs n executions of one lane, then n of 100 lanes, then
           10 of each of 1,000 lanes. Commands per second of an idle worker
           with 100 lanes.
backlog    The time of a claim with a thousand and with n executions waiting.
recovery   From kill -9 of a worker until its n executions run in another
           process, with a lease of 2 s: once for a worker that also runs the
           scanners, once for one that does not.
resume     From signal to resumed handler on an idle worker, one at a time.
           Then n executions wait, and all are signalled at once.
stream     Stored frames per second of one task and of ten. The time until a
           reader has a frame, with 1 and with 100 readers. How much 100
           waiting readers slow down other calls.
tokens     Sends signals with n forged, truncated or altered waitpoint tokens,
           or tokens of other waitpoints. All of them must be refused.
chain      Submits one flow of ten members at a time to an idle worker and
           waits until it has finished, n / 10 times. Then submits n flows
           while the worker runs them: n / total time.
fanout     From the completion of a member until the 1,000 members that wait
           for it can run. Then a whole flow of 1,002 members; n times each.
admission  Submits and runs n executions without limits, then n that name a
           budget and a quota, neither of which is reached.
cancel     Members cancelled per second in n flows of 1,002 waiting members.
           From the completion of one of 10, 100 and 1,000 running siblings
           until a join that needs only one has cancelled the others.
http       Submits n executions to a server process over HTTP, one per
           request, from 32 connections. Then n in bulk requests of 500,
           compared with the same batches through the engine. Then 1,000
           frames of 200 executions, each followed by a client.
remote     One worker, connected to a server process over HTTP, runs n
           executions while they are submitted: n / total time. Then one
           execution at a time, from submit to handler start on the idle
           worker.
routed     Runs n executions that require ten sets of capabilities on forty
           workers. Then submits them one at a time.
fairness   Time from submit to handler start of n executions in one namespace,
           one at a time: alone, then with 10 n executions of another
           namespace waiting. noise_left is how many of those still wait at
           the end. Then one every 10 ms, alone and while another process
           submits ten times as many in the other namespace, in bursts of 256.
"""


def bench(
    scenario: Annotated[
        Scenario | None,
        typer.Argument(
            metavar="SCENARIO", show_default=False, help="One of these. Without it, lists them."
        ),
    ] = None,
    *,
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            min=1,
            metavar="N",
            help="How many executions, frames, tokens or flows. Defaults vary by scenario.",
        ),
    ] = None,
    aof: Annotated[Aof, typer.Option(help="The server's append-only file.")] = "no",
    repeat: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many runs; reports the median run."),
    ] = None,
    unbatched: Annotated[
        bool,
        typer.Option("--unbatched", help="lifecycle: one execution per submit call and per claim."),
    ] = False,
    with_floor: Annotated[
        bool, typer.Option("--with-floor", help="lifecycle: also measure the floor and the ratio.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    if scenario is None:
        sys.stdout.write(_HELP.partition("\b\n")[2])
        return
    for given, name in ((unbatched, "--unbatched"), (with_floor, "--with-floor")):
        if given and scenario != "lifecycle":
            raise typer.BadParameter(f"{name} is only for the lifecycle scenario")
    # Engine, event loop and tables are loaded for a run only: `flowfabric --help` stays quick.
    from rich.console import Console  # noqa: PLC0415

    from flowfabric.bench.report import Options, Progress, as_table  # noqa: PLC0415
    from flowfabric.bench.scenarios import MEASUREMENTS, measure  # noqa: PLC0415
    from flowfabric.core.errors import FlowFabricError  # noqa: PLC0415
    from flowfabric.sdk.service import service_runner  # noqa: PLC0415

    usual = MEASUREMENTS[scenario]
    options = Options(n=n or usual.n, aof=aof, unbatched=unbatched, with_floor=with_floor)
    try:
        with Progress() as progress, service_runner() as runner:
            report = runner.run(measure(scenario, options, repeat or usual.repeat, progress))
    except FlowFabricError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        Console().print(as_table(report))


def register(app: typer.Typer, command: type[TyperCommand] = TyperCommand) -> None:
    """Add `bench` to an application, as a command of this class."""
    app.command("bench", help=_HELP, cls=command)(bench)
