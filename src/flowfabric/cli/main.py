"""The entry point: commands, global options, and how errors end a run."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from flowfabric.bench.command import register as register_bench
from flowfabric.cli.approve import approve
from flowfabric.cli.change import cancel, replay
from flowfabric.cli.doctor import doctor
from flowfabric.cli.errors import Report, exit_code, print_error, report
from flowfabric.cli.help import Command
from flowfabric.cli.options import Target
from flowfabric.cli.ps import ps
from flowfabric.cli.show import show
from flowfabric.cli.signals import signal
from flowfabric.cli.streams import discard_output, ready_streams
from flowfabric.cli.tail import tail
from flowfabric.cli.waiting import waiting
from flowfabric.cli.worker import worker
from flowfabric.core.errors import FlowFabricError

__all__ = ["app", "main"]

_UNREAD = 141
"""Whoever read the output had enough; shells know that end by the number of its signal."""

app = typer.Typer(
    name="flowfabric",
    help="Durable execution for Python on Valkey: run workers, look at executions, change them.",
    epilog="Without FF_URL or FF_HOST every command uses the project's own Valkey in .flowfabric.",
    add_completion=False,
    # Help and errors in colourful boxes would double the time that `--help` takes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:  # noqa: FBT001 - the form that option callbacks have
    if wanted:
        from flowfabric import __version__  # noqa: PLC0415

        sys.stdout.write(f"flowfabric {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    *,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="The Valkey to use; wins over FF_URL."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NAME", help="The namespace to use.")
    ] = None,
    print_version: Annotated[  # noqa: ARG001 - its callback does the work
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Remember what stands before the command."""
    context.obj = Target(url, namespace)


def version() -> None:
    """Print the version."""
    _version(wanted=True)


for command in (worker, ps, show, tail, waiting, approve, signal, cancel, replay, doctor):
    app.command(cls=Command)(command)
register_bench(app)
app.command(cls=Command)(version)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process: 0 done, 1 it failed, 2 it was typed wrongly."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    ready_streams()
    sys.exit(_run(given or ["--help"]))


def _run(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        code: Any = app(arguments, prog_name="flowfabric", standalone_mode=False)
        # What is still buffered is part of the command, too: it can fail here for the last time.
        sys.stdout.flush()
    except (typer.TyperException, FlowFabricError) as error:
        return _told(error, as_json=as_json)
    except typer.Abort:
        return 130
    except (OSError, SystemExit) as error:
        # The libraries below us exit when nobody reads the output any more.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, OSError):
            raise
        discard_output()
        if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
            return _UNREAD
        print_error(_refused(error), as_json=as_json)
        return 1
    return code if isinstance(code, int) else 0


def _told(error: typer.TyperException | FlowFabricError, *, as_json: bool) -> int:
    if isinstance(error, FlowFabricError):
        report(error, as_json=as_json)
        return exit_code(error)
    print_error(_usage(error), as_json=as_json)
    return error.exit_code


def _usage(error: typer.TyperException) -> Report:
    context: Any = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "flowfabric"
    return Report("usage", error.format_message(), (), f"see `{where} --help`")


_OUTPUT = (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EDQUOT, errno.EFBIG)


def _refused(error: OSError) -> Report:
    """What the system said no to: the output, or a file."""
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in _OUTPUT:
        hint = "give it an output that takes what is written, such as a file on a disk with room"
        return Report("output", f"cannot write to standard output: {reason}", (), hint)
    what = f"{error.filename}: " if error.filename is not None else ""
    return Report("system", f"{what}{reason}")
