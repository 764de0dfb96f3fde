"""Every Lua function file begins by telling what it takes, answers, refuses and reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.checkout import SOURCE

FUNCTIONS = sorted((SOURCE / "lua" / "functions").glob("*.lua"))
WORDS = ("Arguments", "Replies", "Errors", "Events")


def header(text: str) -> str:
    """The comment a file begins with, as one line."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)


def missing(name: str, text: str) -> list[str]:
    """What the header leaves out. A function that cannot write has no events to name."""
    said = header(text)
    wanted = [word for word in WORDS if word != "Events" or "no-writes" not in text]
    absent = [word for word in wanted if not re.search(rf"\b{word}\b[^.:]*:", said)]
    return absent if said.startswith(f"{name}: ") else [f"{name}: …", *absent]


@pytest.mark.parametrize("path", FUNCTIONS, ids=lambda path: path.stem)
def test_header(path: Path) -> None:
    assert missing(path.stem, path.read_text()) == []


@pytest.mark.parametrize("path", FUNCTIONS, ids=lambda path: path.stem)
def test_one_function_a_file_named_like_it(path: Path) -> None:
    registered = re.findall(r"\bregister(?:_function)?\('(\w+)'", path.read_text())
    assert registered == [path.stem]


@pytest.mark.parametrize("path", FUNCTIONS, ids=lambda path: path.stem)
def test_flags_are_passed_at_registration(path: Path) -> None:
    flags = re.search(r"\nend, (\{.*\})\)\n$", path.read_text())
    assert flags is not None, "end the file with `end, { flags })`: see lib/05_register.lua"
    assert set(re.findall(r"'([\w-]+)'", flags[1])) <= {"no-writes", "allow-oom", "allow-stale"}


def test_the_guard_itself() -> None:
    assert missing("ff_x", "-- ff_x: does.\n-- Arguments: none. Replies: one.\n") == [
        "Errors",
        "Events",
    ]
    assert missing("ff_x", "local x = 1") == ["ff_x: …", *WORDS]
