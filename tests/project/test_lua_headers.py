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
    pattern = r"function_name = '(\w+)'|\bregister(?:_function)?\('(\w+)'"
    registered = re.findall(pattern, path.read_text())
    assert [first or second for first, second in registered] == [path.stem]


def test_the_guard_itself() -> None:
    assert missing("ff_x", "-- ff_x: does.\n-- Arguments: none. Replies: one.\n") == [
        "Errors",
        "Events",
    ]
    assert missing("ff_x", "local x = 1") == ["ff_x: …", *WORDS]
