"""Help, version, mistyped commands, options and addresses: what to do next, never a traceback."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from flowfabric import __version__
from flowfabric.cli.main import COMMANDS, SYNONYMS, app, load_command
from tests.support.command import Cli
from tests.support.listening import listening
from tests.support.server import free_port
from tests.support.terminal import shown

ALL_COMMANDS = (*COMMANDS, "bench", "version")


@pytest.fixture
def bare(tmp_path: Path) -> Cli:
    """The command in an empty folder without any setting."""
    return Cli(tmp_path)


async def test_help_names_every_command(bare: Cli) -> None:
    without, asked = await bare(), await bare("--help")
    assert (without.code, asked.code) == (0, 0)
    assert without.out == asked.out
    for command in ALL_COMMANDS:
        assert f"\n  {command} " in asked.out


@pytest.mark.parametrize("command", ALL_COMMANDS)
async def test_every_command_has_help(bare: Cli, command: str) -> None:
    done = await bare(command, "--help")
    assert done.code == 0
    assert done.out.startswith(f"Usage: flowfabric {command} ")
    assert done.err == ""


@pytest.mark.parametrize("asked", ["--version", "version"])
async def test_version(bare: Cli, asked: str) -> None:
    done = await bare(asked)
    assert (done.code, done.out) == (0, f"flowfabric {__version__}\n")


async def test_version_as_json(bare: Cli) -> None:
    done = await bare("version", "--json")
    assert (done.code, done.objects) == (0, [{"version": __version__}])


def test_every_command_has_json() -> None:
    whole: Any = typer.main.get_command(app)
    found = {name: load_command(name) for name in COMMANDS} | {
        name: whole.commands[name] for name in set(ALL_COMMANDS) - set(COMMANDS)
    }
    lacking = [
        f"{name} {each.name}"
        for name, command in found.items()
        for each in getattr(command, "commands", {"": command}).values()
        if not any("--json" in option.opts for option in each.params)
    ]
    assert lacking == []


async def test_it_is_a_module_too(bare: Cli) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "flowfabric", "version"],
        env=bare.environment,
        cwd=bare.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"flowfabric {__version__}\n"


GROUPS = [(), *((name,) for name in ("flow", "lane", "quota", "budget", "tokens", "admin"))]


@pytest.mark.parametrize("group", GROUPS)
async def test_help_cuts_no_summary(bare: Cli, group: tuple[str, ...]) -> None:
    listed = (await bare(*group, "--help", COLUMNS="80")).out.partition("Commands:")[2]
    assert listed
    assert "..." not in listed


async def test_no_help_is_wider_than_the_terminal(bare: Cli) -> None:
    wide = [
        (name, line)
        for name in ALL_COMMANDS
        for line in (await bare(name, "--help", COLUMNS="80")).lines
        if len(line) > 80
    ]
    assert wide == []


@pytest.mark.parametrize("command", ["server", "dev"])
async def test_commands_that_need_valkey_offer_no_other_address(bare: Cli, command: str) -> None:
    assert "http://" not in (await bare(command, "--help")).out


@pytest.mark.parametrize(
    ("command", "default"),
    [
        (("ps",), "Use only this namespace. Default: all."),
        (("submit",), "The namespace to use. Default: the application's, or `default`."),
        (("budget", "show"), "The namespace to use. Default: the application's, or `default`."),
    ],
)
async def test_help_names_the_default_namespace(
    bare: Cli, command: tuple[str, ...], default: str
) -> None:
    done = await bare(*command, "--help", COLUMNS="120")
    assert default in " ".join(done.out.split())


async def test_help_shows_no_types(bare: Cli) -> None:
    usage = {name: (await bare(name, "--help")).out for name in ("cancel", "show", "signal")}
    assert usage["cancel"].startswith("Usage: flowfabric cancel [OPTIONS] [ID]...\n")
    assert usage["show"].startswith("Usage: flowfabric show [OPTIONS] ID\n")
    assert usage["signal"].startswith("Usage: flowfabric signal [OPTIONS] ID WAITPOINT NAME\n")
    assert "<" not in "".join(usage.values())


async def test_ctrl_c_while_it_is_loaded_is_quiet(bare: Cli) -> None:
    """Stopped in the middle of an import, where Python 3.11 makes it a RuntimeError."""
    trap = bare.folder / "typer"
    trap.mkdir()
    (trap / "__init__.py").write_text(
        "class Slow:\n"
        "    def __set_name__(self, owner, name):\n"
        "        print('loading', flush=True)\n"
        "        input()\n"
        "class Owner:\n"
        "    slow = Slow()\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "flowfabric", "ps"),
        cwd=bare.folder,
        env=bare.environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        assert await process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")


def test_help_loads_no_engine_and_no_tables() -> None:
    """What `--help` imports beyond the package itself is the declarations and the CLI library."""
    code = (
        "import sys, flowfabric; before = set(sys.modules)\n"
        "import flowfabric.cli.main\n"
        "new = {name for name in set(sys.modules) - before}\n"
        "print(*sorted(n for n in new if n.startswith(('flowfabric', 'rich', 'uvloop'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "flowfabric.cli.main" in loaded
    assert [name for name in loaded if name.startswith(("rich", "uvloop"))] == []
    assert [name for name in loaded if name.startswith("flowfabric.cli.commands.")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str) -> None:
    help_text = cast("str", load_command(name).help)
    assert help_text.partition("\n")[0] == COMMANDS[name][1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("pss",), "No such command 'pss'. Did you mean 'ps'"),
        (("ps", "--lnae", "x"), "No such option: --lnae"),
        (("ps", "--limit", "0"), "Invalid value for '--limit': must be at least 1"),
        (("ps", "--limit", "many"), "Invalid value for '--limit': expected a whole number"),
        (("ps", "--state", "actve"), "'actve' is not one of waiting, delayed"),
        (("ps", "--tag", "team"), "expected key=value, got 'team'"),
        (("ps", "--lane", ""), "Invalid value for '--lane': it must not be empty"),
        (("ps", "--namespace", "a:b"), "Invalid value for '--namespace': must not contain"),
        (("ps", "--url", "nonsense"), "Invalid value for '--url': write valkey://nonsense"),
        (("--url", "redis://x", "ps"), "Invalid value for '--url': redis:// is not supported"),
        (("show",), "Missing argument 'ID'"),
        (("replay", "1", "2", "--expected-replay-count", "1"), "needs one ID"),
        (("ps", "--kind", "x"), "No such option: --kind"),
        (("cancel", "1", "--lane", "x"), "pass either IDs or options"),
        (("cancel", "--state", "failed"), "cancel is for unfinished executions, not for 'failed'"),
        (("purge", "--state", "active"), "purge is for finished executions, not for 'active'"),
        (("replay", "--lane", "x", "--expected-replay-count", "1"), "needs one ID"),
        (("list",), "No such command 'list'. Did you mean 'ps'?"),
        (("status",), "No such command 'status'. Did you mean 'show'?"),
        (("retry",), "No such command 'retry'. Did you mean 'replay'?"),
        (("logs",), "No such command 'logs'. Did you mean 'tail'?"),
        (("serv",), "No such command 'serv'. Did you mean 'server'?"),
        (("serve",), "No such command 'serve'. Did you mean 'server'?"),
        (("stauts",), "No such command 'stauts'. Did you mean 'show'?"),
    ],
)
async def test_typing_mistakes_end_with_2(bare: Cli, arguments: tuple[str, ...], said: str) -> None:
    done = await bare(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: usage: ")
    assert said in done.err
    assert "hint: see `flowfabric" in done.err


def test_every_synonym_means_a_command_and_is_none() -> None:
    assert set(SYNONYMS.values()) <= set(ALL_COMMANDS)
    assert not set(SYNONYMS) & set(ALL_COMMANDS)


COMPLETIONS = {
    "bash": {"COMP_WORDS": "flowfabric {}", "COMP_CWORD": "{}"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "flowfabric {}"},
    "fish": {"_TYPER_COMPLETE_ARGS": "flowfabric {}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


@pytest.mark.parametrize("shell", COMPLETIONS)
async def test_shells_complete_commands_options_and_states(bare: Cli, shell: str) -> None:
    async def complete(typed: str) -> str:
        asked = {name: text.format(typed) for name, text in COMPLETIONS[shell].items()}
        asked |= {"COMP_CWORD": str(typed.count(" ") + 1)} if shell == "bash" else {}
        done = await bare(_FLOWFABRIC_COMPLETE=f"complete_{shell}", **asked)
        assert (done.code, done.err) == (0, "")
        return done.out

    assert "workers" in await complete("wor")
    assert "--older-than" in await complete("cancel --ol")
    assert "suspended" in await complete("cancel --state sus")
    script = await bare(_FLOWFABRIC_COMPLETE=f"source_{shell}")
    assert f"complete_{shell}" in script.out


async def test_a_group_without_a_command_prints_its_help(bare: Cli) -> None:
    alone, asked = await bare("lane"), await bare("lane", "--help")
    assert (alone.code, alone.err, alone.out) == (0, "", asked.out)


async def test_a_typing_mistake_as_json(bare: Cli) -> None:
    done = await bare("ps", "--json", "--state", "actve")
    assert (done.code, done.out) == (2, "")
    assert done.error["code"] == "usage"
    assert "'actve' is not one of" in done.error["message"]
    assert done.error["hint"] == "see `flowfabric ps --help`"


@pytest.mark.parametrize(
    ("variables", "arguments", "said"),
    [
        (
            {"FF_URL": "redis://x"},
            (),
            "config: invalid value for FF_URL: redis:// is not",
        ),
        (
            {"FF_HOST": "x", "FF_PORT": "z"},
            (),
            "config: invalid value for FF_PORT: must be 1 to 65535, not 'z'",
        ),
        *(
            ({"FF_HOST": "x", name: "ture"}, (), f"config: invalid value for {name}: write 1 or 0")
            for name in ("FF_TLS", "FF_CLUSTER")
        ),
    ],
)
async def test_a_bad_address(
    bare: Cli, variables: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    done = await bare("ps", *arguments, **variables)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {said}")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("variable", ["FF_DEV_MODE", "FF_FORCE_LUA_RELOAD"])
async def test_a_mistyped_switch_is_refused(cli: Cli, variable: str) -> None:
    done = await cli("ps", **{variable: "ture"})
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: config: invalid value for {variable}: write 1 or 0")


@pytest.mark.parametrize("command", [("show", "abcd"), ("cancel", "abcd")])
async def test_an_unreachable_server(bare: Cli, command: tuple[str, ...]) -> None:
    url = f"valkey://:hidden@127.0.0.1:{free_port()}"
    done = await bare(*command, "--url", url)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: transport: no connection to 127.0.0.1:")
    assert "hint: Check that Valkey is reachable." in done.err
    assert "Traceback" not in done.err
    assert "hidden" not in done.err


async def test_an_unreachable_server_as_json(bare: Cli) -> None:
    done = await bare("--url", f"valkey://127.0.0.1:{free_port()}", "ps", "--json")
    assert (done.code, done.out) == (1, "")
    assert done.error["code"] == "transport"
    assert done.error["details"] == ["transport"]
    assert "Connection refused" in done.error["message"]


async def test_the_url_of_the_command_wins_over_the_one_before_it(cli: Cli) -> None:
    good = cli.environment["FF_URL"]
    refused = f"valkey://127.0.0.1:{free_port()}"
    assert (await cli("--url", refused, "ps", "--url", good)).code == 0
    assert (await cli("--url", good, "ps", FF_URL=refused)).code == 0


async def test_an_unprepared_server_says_how_to_prepare_it(bare: Cli, unprepared: str) -> None:
    done = await bare("ps", "--url", unprepared)
    assert (done.code, done.out) == (1, "")
    assert "flowfabric doctor --prepare" in done.err


async def test_ctrl_c_while_waiting_is_quiet(bare: Cli) -> None:
    """A server that accepts and then says nothing."""
    connected = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()

    async with (
        listening(silent) as port,
        bare.start("ps", "--url", f"valkey://127.0.0.1:{port}") as running,
    ):
        async with asyncio.timeout(20):
            await connected.wait()
        running.send(signal.SIGINT)
        done = await running.end()
    assert done.code == 130
    assert "Traceback" not in done.out


async def test_errors_are_red_on_a_terminal_only(bare: Cli) -> None:
    assert "\x1b[31m" in await shown(bare, "show", "zzzz")
    assert "\x1b" not in (await bare("show", "zzzz")).err
    bare.environment["NO_COLOR"] = "1"
    assert "\x1b" not in await shown(bare, "show", "zzzz")


async def test_bench_is_mounted(bare: Cli) -> None:
    done = await bare("bench", "floor", "--n", "50", "--repeat", "1", "--json")
    assert done.code == 0, done.err
    assert isinstance(json.loads(done.out), dict)
