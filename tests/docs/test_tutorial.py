"""The tutorial followed to the letter: its files, its commands, its workers left running."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.docs.markdown import ROOT, blocks, programs
from tests.docs.scratch import clean_environment, wait_for_server_end

PAGE = ROOT / "docs" / "learn" / "first-steps.md"
_file_name = re.compile(r"# (\w+\.py)\n").match


def environment(folder: Path) -> dict[str, str]:
    """As in an activated environment: `python` and `flowfabric` are commands."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    commands = {"python": "", "flowfabric": "-m flowfabric"}
    for name, module in commands.items():
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        script.chmod(0o755)
    env = clean_environment()
    return {**env, "PATH": f"{tools}{os.pathsep}{env['PATH']}"}


def steps(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what the page says that it prints."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        else:
            command, told = found[-1]
            found[-1] = (command, f"{told}{line}\n")
    return found


def fits(printed: str, told: str) -> bool:
    """Whether a command printed this; `…` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in told.strip().split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


@contextmanager
def terminals(folder: Path, env: dict[str, str]) -> Generator[list[subprocess.Popen[str]]]:
    """Workers that are left running; each ends well on Ctrl-C."""
    running: list[subprocess.Popen[str]] = []
    try:
        yield running
    finally:
        for worker in running:
            worker.send_signal(signal.SIGINT)
        for worker in running:
            worker.communicate(timeout=30)
    assert [worker.returncode for worker in running] == [0] * len(running)
    wait_for_server_end(folder / ".flowfabric")


def start(command: str, folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        shlex.split(command), cwd=folder, env=env, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    assert any(line.startswith("Ready.") for line in worker.stdout), "the worker ended"
    return worker


def test_the_tutorial_to_the_letter(tmp_path: Path) -> None:
    env = environment(tmp_path)
    commands = 0
    with terminals(tmp_path, env) as running:
        for block in blocks(PAGE):
            if name := _file_name(block.text):
                (tmp_path / name[1]).write_text(block.text)
            if block.language != "console":
                continue
            for command, told in steps(block.text):
                commands += 1
                if command.startswith("flowfabric worker"):
                    running.append(start(command, tmp_path, env))
                    continue
                done = subprocess.run(
                    shlex.split(command),
                    cwd=tmp_path,
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert done.returncode == 0, done.stdout + done.stderr
                assert fits(done.stdout, told), f"line {block.line}: {command}\n{done.stdout}"
    assert commands == sum(
        len(steps(block.text)) for block in blocks(PAGE) if block.language == "console"
    )
    assert len(running) == 2
    assert len(programs(PAGE)) >= 5
