"""The checkout as the guards see it: its root, its files, its settings."""

from __future__ import annotations

import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "flowfabric"
CODE = ("src", "tests", "benchmarks", "examples", "docs")


@cache
def files() -> tuple[Path, ...]:
    """Every file that is, or is about to be, under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        # A source archive has no repository; then it holds nothing but the project.
        folders = [ROOT / name for name in (*CODE, ".ci")]
        paths = [path for folder in folders for path in folder.rglob("*")]
        paths += [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    return tuple(p for p in paths if p.is_file() and "__pycache__" not in p.parts)


def modules() -> list[Path]:
    """Every Python file of the package."""
    return [path for path in files() if path.suffix == ".py" and path.is_relative_to(SOURCE)]


def code() -> list[Path]:
    """Every Python and Lua file, tests included."""
    return [path for path in files() if path.suffix in {".py", ".lua"}]


def name_of(path: Path) -> str:
    """A path as messages show it."""
    return path.relative_to(ROOT).as_posix()


@cache
def settings() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def dependencies() -> list[str]:
    """What users install with the package, each with its marker."""
    return settings()["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]
