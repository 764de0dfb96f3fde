"""The entry point: the table of commands, the global options, and exit codes."""

import errno
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from flowfabric.bench.command import register as register_bench
from flowfabric.cli.early import keep_early_records
from flowfabric.cli.errors import CliError, UsageError, discard_output, prepare_streams, report
from flowfabric.cli.options import Json, Namespace, Target, Url, flag
from flowfabric.core.errors import FlowFabricError

COMMANDS = {
    "dev": ("dev", "Run an application and all it needs, for development."),
    "worker": ("worker", "Run the tasks of an application until SIGTERM or Ctrl-C."),
    "server": ("server", "Serve the REST API until SIGTERM or Ctrl-C."),
    "submit": ("submit", "Submit one execution of a task."),
    "result": ("submit", "Wait for the result of an execution and print it as JSON."),
    "ps": ("executions", "List executions, newest first."),
    "show": ("executions", "Show everything about one execution."),
    "explain": ("executions", "Explain why an execution is not running."),
    "flows": ("flows", "List flows, newest first."),
    "flow": ("flows", "Show or change one flow."),
    "tail": ("tail", "Print the output of an execution live, until it finishes."),
    "waiting": ("waits", "List executions that wait for an answer."),
    "approve": ("waits", "Answer a wait as an operator, without a token."),
    "signal": ("waits", "Answer a wait with the token of its waitpoint."),
    "cancel": ("executions", "Cancel executions that have not finished."),
    "replay": ("executions", "Rerun finished executions under the same ids."),
    "purge": ("executions", "Delete finished executions and all their data."),
    "summary": ("tail", "Print the summary document of an execution."),
    "revoke-lease": ("executions", "Revoke the lease of a running execution."),
    "close-waitpoint": ("waits", "Close a waitpoint, so that its token stops working."),
    "top": ("top", "Show the activity of the deployment, live."),
    "workers": ("fleet", "List live workers."),
    "drain-worker": ("fleet", "Stop giving work to a worker."),
    "lanes": ("fleet", "List lanes with their work and their workers."),
    "lane": ("fleet", "Show, pause, resume, drain or change one lane."),
    "quotas": ("quotas", "List quotas and how much of each is used."),
    "quota": ("quotas", "Show, create or change one quota."),
    "budgets": ("budgets", "List budgets with their usage."),
    "budget": ("budgets", "Show or change one budget."),
    "secrets": ("deployment", "List the keys that sign waitpoint tokens."),
    "rotate-secret": ("deployment", "Sign waitpoint tokens with a new secret."),
    "config": ("server", "Print the settings of a server and their sources."),
    "tokens": ("tokens", "Create, list and revoke the API tokens of a server."),
    "admin": ("admin", "Check a planned deployment without connecting to it."),
    "doctor": ("deployment", "Check the deployment and suggest fixes."),
}
"""The module of each command and its line in `flowfabric --help`.

A command's module loads the engine. It is imported only to run the command or to show its help.
"""

_OTHER_NAMES = {
    "budgets": "costs spending usage",
    "cancel": "abort kill stop terminate",
    "doctor": "check health ping",
    "flows": "dags graphs pipelines workflows",
    "flow": "dag graph pipeline tree workflow",
    "lanes": "queues",
    "lane": "queue",
    "ps": "executions find jobs list ls runs search tasks",
    "purge": "clean clear delete prune remove rm",
    "quotas": "limits rates ratelimits throttles",
    "replay": "redo rerun resubmit restart retry",
    "result": "get output wait",
    "show": "describe info inspect state status",
    "explain": "diagnose reason why",
    "submit": "call enqueue invoke push run send start",
    "top": "dashboard live monitor overview",
    "tail": "follow log logs stream watch",
    "waiting": "approvals blocked pending suspended waits",
    "server": "api serve",
    "worker": "consume work",
    "dev": "develop up",
    "approve": "accept answer reject resume",
    "workers": "fleet nodes processes",
    "version": "about",
}
SYNONYMS = {name: command for command, names in _OTHER_NAMES.items() for name in names.split()}
"""The command that people mean by another name; it is suggested, not run."""

_OUTPUT_ERRORS = (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EDQUOT, errno.EFBIG)
_SETTINGS: dict[str, Any] = {
    # Rich's boxes and colours would double the time that `--help` takes.
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}

_PLAIN_PROBLEMS = (
    ("Value error, ", ""),
    ("Input should be a valid integer, .*", "expected a whole number"),
    ("Input should be greater than or equal to ", "must be at least "),
    ("Input should be less than or equal to ", "must be at most "),
)
"""The CLI library's words for a wrong value, and ours."""

_required_argument = re.compile(r"\{([^|{}]+)\}((?:\.\.\.)?)")
_type_mark = re.compile(r"^(  [^-\s]\S*(?: \S+)*?)( <[^>]+>)( *)", re.MULTILINE)


class Command(TyperCommand):
    """A command whose help says `ID...` instead of `{ID}...` and shows no types of arguments."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Required arguments as bare names; only optional ones have brackets."""
        pieces = super().collect_usage_pieces(ctx)
        return [_required_argument.sub(r"\1\2", piece) for piece in pieces]

    def get_help(self, ctx: Any) -> str:
        text = super().get_help(ctx)
        return _type_mark.sub(
            lambda found: found[1] + (" " * len(found[2]) + found[3] if found[3] else ""), text
        )


class _Commands(TyperGroup):
    """Loads a command when it is called. Lists commands from the table without loading them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.commands
        if args[0] not in known and not ctx.resilient_parsing:
            [meant] = get_close_matches(args[0], [*known, *SYNONYMS], 1) or [""]
            if meant in SYNONYMS:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {SYNONYMS[meant]!r}?")
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else command, rest


def load_command(name: str) -> Any:
    """Import a command of the table; a mapping in its module becomes a group of commands."""
    from flowfabric.cli.session import with_shared_options  # noqa: PLC0415 - loads the engine

    module = import_module(f"flowfabric.cli.commands.{COMMANDS[name][0]}")
    run = getattr(module, name.replace("-", "_"))
    if isinstance(run, Mapping):
        group = typer.Typer(add_completion=False, help=COMMANDS[name][1], **_SETTINGS)
        for each, part in cast("Mapping[str, Any]", run).items():
            shared = with_shared_options(part) if iscoroutinefunction(part) else part
            group.command(each, cls=Command)(shared)
        # Without a callback, Typer would collapse a group that has only one command.
        group.callback(invoke_without_command=True)(_show_help)
        return typer.main.get_command(group)
    single = typer.Typer(add_completion=False, **_SETTINGS)
    single.command(name, cls=Command)(with_shared_options(run) if iscoroutinefunction(run) else run)
    return typer.main.get_command(single)


def _show_help(context: typer.Context) -> None:
    """Print the help of a group that was called without a command."""
    if context.invoked_subcommand is None:
        sys.stdout.write(f"{context.get_help()}\n")


app = typer.Typer(
    name="flowfabric",
    cls=_Commands,
    help="Durable execution for Python on Valkey: run workers, inspect and change executions.",
    epilog="Without FF_URL or FF_HOST, commands use the project's embedded Valkey in .flowfabric.",
    **_SETTINGS,
)


def _version(wanted: bool) -> None:  # noqa: FBT001 - the signature of option callbacks
    if wanted:
        version()
        raise typer.Exit


_VERSION = flag("--version", "Print the version.", callback=_version, is_eager=True)


@app.callback()
def options(
    context: typer.Context,
    *,
    url: Url = None,
    namespace: Namespace = None,
    print_version: Annotated[bool, _VERSION] = False,  # noqa: ARG001 - its callback does the work
) -> None:
    """Keep the options that precede the command."""
    context.obj = Target(url, namespace)


def version(*, as_json: Json = False) -> None:
    """Print the version."""
    from flowfabric import __version__  # noqa: PLC0415

    shown = f'{{"version":"{__version__}"}}' if as_json else f"flowfabric {__version__}"
    sys.stdout.write(f"{shown}\n")


for _name, (_, _summary) in COMMANDS.items():
    app.command(_name, help=_summary)(lambda: None)
register_bench(app, Command)
app.command(cls=Command)(version)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 on success, 1 on failure, 2 on a usage error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    # Commands print their results. Those that log add a handler later.
    keep_early_records()
    sys.exit(_run(given or ["--help"]))


def _run(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        code: Any = app(arguments, prog_name="flowfabric", standalone_mode=False)
        # Writing buffered output can still fail.
        sys.stdout.flush()
    except FlowFabricError as error:
        return report(error, as_json=as_json)
    except typer.TyperException as error:
        report(_usage(error), as_json=as_json)
        return error.exit_code
    except typer.Abort:
        return 130
    except (OSError, SystemExit) as error:
        # Typer and Rich exit when the output is a broken pipe.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, OSError):
            raise
        discard_output(sys.stdout)
        if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
            # The status that shells report for a process that SIGPIPE killed.
            return 141
        return report(_system_error(error), as_json=as_json)
    return code if isinstance(code, int) else 0


def _usage(error: typer.TyperException) -> CliError:
    context: Any = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "flowfabric"
    problem = error.format_message()
    for pattern, plain in _PLAIN_PROBLEMS:
        problem = re.sub(pattern, plain, problem)
    return UsageError("usage", problem, f"see `{where} --help`")


def _system_error(error: OSError) -> CliError:
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in _OUTPUT_ERRORS:
        hint = "redirect it to a file on a disk with free space"
        return CliError("output", f"cannot write to standard output: {reason}", hint)
    what = f"{error.filename}: " if error.filename is not None else ""
    return CliError("system", f"{what}{reason}")
