"""Type checkers over the code that users read and write."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from tests.docs.markdown import PAGES, ROOT, name_of, programs, python_blocks

BIN = Path(sys.executable).parent
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
_found_by_mypy = re.compile(r"(.+?):(\d+): error: (.*)").fullmatch


class Finding(NamedTuple):
    """An error that a checker reports."""

    file: str
    line: int
    message: str


def write_pages(folder: Path) -> list[Path]:
    """Every page with Python as modules. Blocks that a reader types in turn share one function,
    so that they may `await`.
    """
    written: list[Path] = []
    for page in PAGES:
        blocks = python_blocks(page)
        if not blocks:
            continue
        name = re.sub(r"\W", "_", name_of(page).removesuffix(".md"))
        whole = {name: text for name, text, _ in programs(page)}
        if page.name == "README.md":
            whole = {f"{name}.py": blocks[0].text}
        if not whole:
            body = "\n".join(block.text for block in blocks)
            whole = {f"{name}.py": f"async def session() -> None:\n{textwrap.indent(body, '    ')}"}
        for file, text in whole.items():
            path = folder / file
            path.write_text(text)
            written.append(path)
    return written


def mypy(_: Path, files: list[Path]) -> list[Finding]:
    """The errors of `mypy --strict`, with a cache that makes a second run quick."""
    options = ["--strict", "--no-error-summary", "--no-color-output", "--follow-imports=silent"]
    done = subprocess.run(
        [BIN / "mypy", *options, f"--cache-dir={ROOT / '.mypy_cache'}", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    matches = filter(None, map(_found_by_mypy, done.stdout.splitlines()))
    return [Finding(Path(found[1]).name, int(found[2]), found[3]) for found in matches]


def pyright(folder: Path, files: list[Path]) -> list[Finding]:
    """The errors of basedpyright's strict mode; its settings go into `folder`."""
    settings = folder / "pyrightconfig.json"
    settings.write_text(
        json.dumps(
            {
                "typeCheckingMode": "strict",
                "include": [str(file) for file in files],
                "extraPaths": [str(ROOT)],
                # An example that is only looked at, and one that shows a statement's value.
                "reportUnusedExpression": False,
                "reportUnusedFunction": False,
            }
        )
    )
    done = subprocess.run(
        [BIN / "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", settings],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    reported = json.loads(done.stdout)["generalDiagnostics"]
    return [
        Finding(Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
        for each in reported
        if each["severity"] == "error"
    ]
