"""No notes to self, no stubs, no traces of the machine something was written on."""

from __future__ import annotations

import ast
import re

import pytest

from tests.project.checkout import files, name_of

# Written so that this file does not find itself.
NOTES = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
MACHINES = re.compile(r"(?<![\w.])(?:/ho" + r"me/\w|/ro" + r"ot/\w|/Us" + r"ers/\w|/wo" + r"rk/\w)")


def texts() -> list[tuple[str, str]]:
    """Every text file with its name; lock files hold only hashes."""
    return [
        (name_of(path), path.read_text(errors="replace"))
        for path in files()
        if path.suffix != ".lock"
    ]


def hits(pattern: re.Pattern[str], name: str, text: str) -> list[str]:
    """Where a pattern occurs."""
    return [
        f"{name}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("pattern", [NOTES, MACHINES], ids=["notes", "machines"])
def test_no_traces(pattern: re.Pattern[str]) -> None:
    assert [hit for name, text in texts() for hit in hits(pattern, name, text)] == []


def stubs(name: str, source: str) -> list[str]:
    """Functions that only say that they are not written yet."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if len(body) == 1 and isinstance(body[0], ast.Raise):
            raised = ast.unparse(body[0])
            if raised.startswith("raise NotImplementedError"):
                found.append(f"{name}:{node.lineno}: {node.name}")
    return found


def test_no_function_is_a_stub() -> None:
    found = [stub for name, text in texts() if name.endswith(".py") for stub in stubs(name, text)]
    assert found == [], "write it, or declare it with abc.abstractmethod"


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for name, text in texts():
        if name.startswith("src/") and name.endswith(".py"):
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(name)
    assert homes, "no class found"
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    "line", ["# TO" + "DO later", "x = 1  # FIX" + "ME", "see /ho" + "me/ada/x", "'/wo" + "rk/a'"]
)
def test_the_patterns_catch(line: str) -> None:
    assert hits(NOTES, "f", line) + hits(MACHINES, "f", line)


def test_the_stub_guard_catches() -> None:
    assert stubs("f", 'def f():\n    """Later."""\n    raise NotImplementedError') == ["f:1: f"]
    assert stubs("f", "def f(x):\n    if x:\n        raise NotImplementedError") == []
